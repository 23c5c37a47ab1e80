"""Checkpoints: the state of a run after a step, in one file with its checksum beside it.

A checkpoint is written under a temporary name, flushed to the disk and renamed, and the one before it is kept, so
that a crash at any moment leaves a good one. Loading checks the checksum and goes back to the one before, saying so,
when the newest is damaged.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

from nanosprint.errors import UserError
from nanosprint.files import TEMPORARY_SUFFIX, atomic_file, atomic_write

SCHEMA = 2  # optimizer state by parameter name
KEEP = 2
_log = logging.getLogger(__name__)


def save(folder: Path, state: dict[str, Any], step: int) -> Path:
    """Write `state` (tensors, numbers, text and containers of them) as the checkpoint after `step` steps.

    Raises OSError when it cannot be written, with nothing of the earlier checkpoints touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, step)
    try:
        with atomic_file(path) as file:
            torch.save({"schema": SCHEMA, "step": step, **state}, file)
        # The checksum comes last: a checkpoint without one is not listed, so a crash in between costs nothing.
        atomic_write(path.with_suffix(".json"), json.dumps({"step": step, "sha256": _sha256(path)}))
    except RuntimeError as error:  # torch's writer reports a full disk as a RuntimeError
        raise OSError(f"could not write {path}: {error}") from error
    for old in list_steps(folder)[:-KEEP]:
        _path(folder, old).unlink(missing_ok=True)
        _path(folder, old).with_suffix(".json").unlink(missing_ok=True)
    return path


def list_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, in order."""
    return sorted(
        int(p.stem.removeprefix("step-")) for p in folder.glob("step-*.json") if p.with_suffix(".pt").exists()
    )


def load_latest(folder: Path) -> dict[str, Any] | None:
    """The newest good checkpoint, on the CPU, or None where there has never been one.

    Raises UserError when there are checkpoints but none is good.
    """
    steps = list_steps(folder)
    for step in reversed(steps):
        path = _path(folder, step)
        if _is_whole(path):
            return load(path)
        _log.warning("checkpoint %s is damaged (its checksum does not match); trying the one before", path)
    if steps:
        raise UserError(
            f"every checkpoint in {folder} is damaged: move the folder away and `nanosprint resume` starts anew"
        )
    return None


def clean(folder: Path) -> None:
    """Remove what a crash in the middle of a checkpoint left. Not while another process may be writing one."""
    for leftover in folder.glob(f".step-*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    try:
        expected = json.loads(path.with_suffix(".json").read_text())["sha256"]
    except (ValueError, KeyError, TypeError, OSError):
        return False
    return _sha256(path) == expected


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint. Raises UserError when it is not one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is not a readable checkpoint: {error}") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise UserError(f"{path} is not a checkpoint of schema {SCHEMA}")
    return state


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
