"""The log of a run: `metrics.jsonl`, one JSON object a line, appended while the run lives.

Lines have a `kind`: "train" and "val" carry `step`, `tokens`, `loss`, `train_ms` and whatever else the loop measures,
"event" carries a `name`. `step` is the number of optimizer steps that are done, so a checkpoint at step s agrees with
every line up to s. Where energy is measured, every "val" line and now and then a "train" line has `energy_j`, the
joules of all devices so far. A process may be killed in the middle of a write, so the last line may be torn: a line
counts once its newline is there. A run that was killed and resumed repeats steps: the event "resume" with its `step` s
says that everything logged before it beyond s never happened, and among equal steps the last line holds.

JSON has no NaN, yet a diverged loss must be on record: it is written as null with "nonfinite": "nan" beside it
(for another field than the loss: "<field>_nonfinite"), and reading gives the number back.
"""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanosprint.errors import UserError
from nanosprint.results.jsonfile import parse_object

RESUME = "resume"  # the event that voids what was logged beyond its step
KINDS = ("train", "val", "event")
_FLAG = "nonfinite"


class TornLine(UserWarning):
    """The last line of a metrics file is incomplete: its writer was killed, or is writing right now."""


def _warn(message: str) -> None:
    warnings.warn(message, TornLine, stacklevel=3)


def encode_line(line: Mapping[str, Any]) -> str:
    """One line of metrics as JSON without a newline; floats that are not finite become null and a flag.

    Raises ValueError for a kind other than train, val and event, and TypeError for values that are not plain Python.
    """
    if line.get("kind") not in KINDS:
        raise ValueError(f"kind={line.get('kind')!r}: a line of metrics is one of {', '.join(KINDS)}")
    plain: dict[str, Any] = {}
    for key, value in line.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain[key] = None
            plain[_flag_of(key)] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        else:
            plain[key] = value
    return json.dumps(plain, allow_nan=False)


def decode_line(text: str, where: str) -> dict[str, Any]:
    """The inverse of `encode_line`. Raises ValueError naming `where` for anything that is not a line of metrics."""
    line = parse_object(text, where)
    if line.get("kind") not in KINDS:
        raise UserError(f"{where} is damaged: kind={line.get('kind')!r} is not one of {', '.join(KINDS)}")
    if line["kind"] != "event" and (not isinstance(line.get("step"), int) or line.get("step", -1) < 0):
        raise UserError(f"{where} is damaged: step={line.get('step')!r} is not a step number")
    for key in [key for key, value in line.items() if value is None and _flag_of(key) in line]:
        line[key] = float(line.pop(_flag_of(key)))
    return line


def read_metrics(path: Path, on_torn: Callable[[str], None] = _warn) -> Iterator[dict[str, Any]]:
    """Every complete line of a metrics file, in order.

    A torn last line is left out and reported through `on_torn`, by default as a TornLine warning. Raises ValueError
    for a missing file and for a damaged line before the last, with its number.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: the run has logged nothing yet, or this is not a run directory")
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                on_torn(f"{path}: line {number} is torn after {len(raw)} bytes and was left out")
                return
            where = f"{path}, line {number},"
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is damaged at byte {error.start}: not UTF-8 text") from None
            yield decode_line(text, where)


def repair_tail(path: Path) -> int:
    """Cut a torn last line off, so that what is appended starts on a line of its own; the number of bytes cut.

    Nothing is done, and 0 returned, where the file is missing, empty or whole.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, size)
        if whole < size:
            file.truncate(whole)
            os.fsync(file.fileno())
    return size - whole


def effective_lines(lines: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """The lines of a kind ("train" or "val") that hold after resumes, one a step, in the order of steps."""
    kept: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if line["kind"] == kind:
            kept[line["step"]] = line
        elif line["kind"] == "event" and line.get("name") == RESUME:
            kept = {step: old for step, old in kept.items() if step <= line["step"]}
    return [kept[step] for step in sorted(kept)]


def at_target(validations: Sequence[Mapping[str, Any]], target: float, field: str) -> float | None:
    """`field` at the moment when the validation loss fell to `target`, on a straight line between two validations."""
    before: Mapping[str, Any] | None = None
    for line in validations:
        if line["loss"] <= target:
            if field not in line or (before is not None and field not in before):
                return None
            if before is None:
                return float(line[field])
            part = (before["loss"] - target) / (before["loss"] - line["loss"])
            return float(before[field] + part * (line[field] - before[field]))
        before = line
    return None


def series(lines: Iterable[Mapping[str, Any]], kind: str, key: str) -> dict[int, Any]:
    """`key` by step, ascending, for the lines of a kind that hold; lines without the key are left out."""
    return {line["step"]: line[key] for line in effective_lines(lines, kind) if key in line}


def metrics_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a metrics file. Raises ValueError where there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: its checksum cannot be computed") from None


def _flag_of(key: str) -> str:
    return _FLAG if key == "loss" else f"{key}_{_FLAG}"


def _end_of_last_line(file: Any, size: int, block: int = 1 << 16) -> int:
    """The offset just behind the last newline, found from the end; 0 without one."""
    end = size
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return int(start + newline + 1)
        end = start
    return 0
