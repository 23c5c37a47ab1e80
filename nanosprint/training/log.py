"""The run's log: every line goes to `metrics.jsonl`, to the display, and to trackers where asked for.

Lines are written with one system call a batch, straight to the file: a killed process tears at most the last one.
Only rank 0 writes; on other ranks the same calls do nothing, so the loop needs no conditions. The meaning of lines is
told in `results/metrics.py`.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from nanosprint.results.metrics import encode_line, repair_tail
from nanosprint.results.runs import RunDir
from nanosprint.training.console import Display
from nanosprint.training.trackers import TensorBoardTracker, Tracker, WandbTracker

__all__ = ["RunLog", "noted", "train_line", "val_line"]


def train_line(*, step: int, tokens: int, loss: float, train_ms: float, **fields: Any) -> dict[str, Any]:
    """A line of training after `step` steps and `tokens` tokens; `loss` is the plain next-token mean."""
    return {"kind": "train", "step": step, "tokens": tokens, "loss": loss, "train_ms": train_ms, **fields}


def val_line(*, step: int, tokens: int, loss: float, train_ms: float, **fields: Any) -> dict[str, Any]:
    """A line of validation after `step` steps; `loss` is the mean over the validation targets."""
    return {"kind": "val", "step": step, "tokens": tokens, "loss": loss, "train_ms": train_ms, **fields}


class RunLog:
    """The log of one run; a context manager. Appends, so that a resumed run goes on in the same file.

    `console`: a display from `console.open_display`, or None for silence. Opening cuts a line that an earlier process
    left torn. Raises ValueError at once where wandb or tensorboard is asked for and missing; OSError (disk full)
    passes through.
    """

    def __init__(
        self,
        run_dir: RunDir | str | Path,
        *,
        rank: int,
        console: Display | None,
        wandb: bool = False,
        tensorboard: bool = False,
    ) -> None:
        run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
        self.path = run.metrics_path
        self._console = console if rank == 0 else None
        self._said: set[str] = set()
        self._trackers: list[Tracker] = []
        self._file: int | None = None
        self._writes = rank == 0
        if not self._writes:
            return
        try:
            if wandb:
                self._trackers.append(WandbTracker(run))
            if tensorboard:
                self._trackers.append(TensorBoardTracker(run))
        except BaseException:
            self.close()  # gives the terminal back
            raise
        cut = repair_tail(self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o666)
        if cut:
            self.event("repair", message=f"cut a torn last line ({cut} bytes) off {self.path.name}", bytes=cut)

    def write(self, lines: Iterable[Mapping[str, Any]], show: bool = True) -> None:
        """Append lines with one system call, then show them if told so. See `train_line`, `val_line` and `event`."""
        if not self._writes:
            return
        if self._file is None:
            raise RuntimeError(f"{self.path} is closed: a line after the record would break its checksum")
        batch = list(lines)
        _write_all(self._file, "".join(encode_line(line) + "\n" for line in batch).encode())
        if any(line["kind"] != "train" for line in batch):
            self.sync()
        for line in batch:
            if self._console is not None and show:
                self._console.show(line)
            for tracker in self._trackers:
                tracker.log(line)

    def train(self, *, step: int, tokens: int, loss: float, train_ms: float, **fields: Any) -> None:
        """One training line; displays know the fields `mfu` (0 .. 1), `memory_bytes` and `watts`."""
        self.write([train_line(step=step, tokens=tokens, loss=loss, train_ms=train_ms, **fields)])

    def val(self, *, step: int, tokens: int, loss: float, train_ms: float, **fields: Any) -> None:
        """One validation line."""
        self.write([val_line(step=step, tokens=tokens, loss=loss, train_ms=train_ms, **fields)])

    def event(self, name: str, *, show: bool = True, **fields: Any) -> None:
        """Something that happened, with its wall-clock time; `message` is what people read, unless not to be shown.

        "resume" must carry `step`: lines logged before it beyond that step no longer hold.
        """
        assert name != "resume" or "step" in fields, "a resume event without its step would void nothing"
        self.write([{"kind": "event", "name": name, "time": datetime.now().astimezone().isoformat(), **fields}], show)

    def once(self, message: str) -> None:
        """A notice that is logged and shown the first time only."""
        if message not in self._said:
            self._said.add(message)
            self.event("notice", message=message)

    def sync(self) -> None:
        """Force what was written to the disk; happens by itself after validations and events."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Show the last line and close everything; a second call does nothing. No line may follow the record."""
        if self._console is not None:
            self._console.close()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def noted(log: RunLog, source: str, name: str) -> Iterator[None]:
    """Note meanwhile what the logger `source` says, from INFO on, as events called `name`. They are not shown here."""
    logger = logging.getLogger(source)
    handler, level = _Notes(log, name), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Notes(logging.Handler):
    def __init__(self, log: RunLog, name: str) -> None:
        super().__init__(logging.INFO)
        self._log, self._name = log, name

    def emit(self, record: logging.LogRecord) -> None:
        self._log.event(self._name, show=False, message=record.getMessage())


def _write_all(file: int, data: bytes) -> None:
    """One os.write, or more where it takes less, on a disk filling up. After an error nothing of it stays."""
    size = os.fstat(file).st_size
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        os.ftruncate(file, size)  # else a later line, such as the event of this failure, would join a half one
        raise
