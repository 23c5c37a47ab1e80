"""Others' text logs as runs, so that their curves stand beside ours: modded-nanogpt's and llm.c's formats.

    modded-nanogpt   the script's source, a line of "=", then lines such as
                     step:125/1770 val_loss:4.6012 train_time:9876ms step_avg:79.01ms
    llm.c main.log   s:250 tel:6.4612        validation loss after 250 steps
                     s:250 trl:6.4933 lr:...  training loss of step 250
                     s:250 eval:0.2874        accuracy on HellaSwag, which is no loss and is left out

What such a log does not tell stays unknown: llm.c's has no times, neither has tokens unless the batch is named. An
imported run has a request and metrics, but no record, so nothing that needs evidence accepts it. Its hash is that of
the source that the log starts with, so that runs of one script are one entry; without one it is that of the name.
"""

import hashlib
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanosprint.errors import UserError
from nanosprint.files import atomic_write
from nanosprint.results.metrics import encode_line
from nanosprint.results.runs import RunDir, claim_run_dir

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_MODDED = re.compile(rf"^step:(\d+)/(\d+) (val_loss|train_loss):{_NUMBER} train_time:{_NUMBER}ms\b")
_LLM_C = re.compile(rf"^s:(\d+) (tel|trl):{_NUMBER}")
_RULE = re.compile(r"^={20,}\s*$")
KINDS = {"val_loss": "val", "train_loss": "train", "tel": "val", "trl": "train"}


@dataclass(frozen=True)
class Log:
    """A log that was understood: its format, its metrics in order, and the source text before them ("" if none)."""

    format: str
    lines: tuple[dict[str, Any], ...]
    source: str
    num_steps: int | None


def read_log(path: str | Path) -> Log:
    """Read a log of either format. Raises ValueError for a missing file and for one that holds no such line."""
    path = Path(path)
    try:
        rows = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: name the log files in it") from None
    for format_name, reader in _READERS.items():
        lines, num_steps = reader(rows)
        if lines:
            return Log(format_name, tuple(_in_order(lines)), _source(rows), num_steps)
    raise UserError(
        f"{path} holds no loss in a format known here: expected lines such as 'step:125/1770 val_loss:4.6012 "
        "train_time:9876ms' (modded-nanogpt) or 's:250 tel:6.4612' (llm.c)"
    )


def import_logs(
    logs: Sequence[str | Path],
    out: str | Path,
    *,
    name: str | None = None,
    batch_tokens: int | None = None,
    devices: str | None = None,
) -> list[RunDir]:
    """Make a run directory of every log: `out` itself for one log, else one below it each.

    All logs are read before anything is written. Raises ValueError for what cannot be read, and where a run is already.
    """
    read = [(Path(path), read_log(path)) for path in logs]
    runs = []
    for (path, log), target in zip(read, _targets(logs, Path(out)), strict=True):
        run = claim_run_dir(target)
        lines = [dict(ln, tokens=ln["step"] * batch_tokens) if batch_tokens else ln for ln in log.lines]
        atomic_write(run.metrics_path, "".join(encode_line(line) + "\n" for line in lines))
        if log.source:
            atomic_write(run.path / "source.txt", log.source)
        # last, since this makes the folder a run
        run.write_request(_request(path, log, name or _name_of(path), devices))
        runs.append(run)
    return runs


def _request(path: Path, log: Log, name: str, devices: str | None) -> dict[str, Any]:
    identity = hashlib.sha256((log.source or name).encode()).hexdigest()[:12]
    return {
        "recipe": {"name": name},
        "recipe_hash": identity,
        "seed": None,
        "imported": {
            "log": path.name,
            "format": log.format,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "devices": devices,
            "num_steps": log.num_steps,
        },
    }


def _targets(logs: Sequence[str | Path], out: Path) -> list[Path]:
    """Where each log's run goes; equal names are told apart by their place in the list."""
    if len(logs) == 1:
        return [out]
    stems = [re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(log).resolve().parent.name}-{Path(log).stem}") for log in logs]
    return [out / (stem if stems.count(stem) == 1 else f"{stem}-{i}") for i, stem in enumerate(stems, start=1)]


def _name_of(path: Path) -> str:
    """The file's stem, or its folder's name where the stem says nothing: "main", or a UUID."""
    try:
        uuid.UUID(path.stem)
    except ValueError:
        if path.stem != "main":
            return path.stem
    return path.resolve().parent.name


def _modded(rows: Sequence[str]) -> tuple[list[dict[str, Any]], int | None]:
    found = [match for match in map(_MODDED.match, rows) if match]
    lines = [_line(m[3], int(m[1]), float(m[4]), train_ms=float(m[5])) for m in found]
    return lines, int(found[-1][2]) if found else None


def _llm_c(rows: Sequence[str]) -> tuple[list[dict[str, Any]], int | None]:
    return [_line(m[2], int(m[1]), float(m[3])) for m in map(_LLM_C.match, rows) if m], None


_READERS: dict[str, Callable[[Sequence[str]], tuple[list[dict[str, Any]], int | None]]] = {
    "modded-nanogpt": _modded,
    "llm.c": _llm_c,
}


def _line(word: str, step: int, loss: float, **fields: float) -> dict[str, Any]:
    return {"kind": KINDS[word], "step": step, "loss": loss, **fields}


def _in_order(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As logged; where steps go back the run was taken up again, which voids what came after that step before."""
    last = -1
    for line in lines:
        if line["step"] < last:
            yield {"kind": "event", "name": "resume", "step": max(line["step"] - 1, 0)}
        last = line["step"]
        yield line


def _source(rows: Sequence[str]) -> str:
    """What precedes the first rule of "=" characters, which is where modded-nanogpt puts the script."""
    end = next((i for i, row in enumerate(rows) if _RULE.match(row)), 0)
    return "\n".join(rows[:end]).strip()
