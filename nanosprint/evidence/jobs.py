"""Jobs as processes, in order, one or several at a time: what races, ablations and the ladder's benchmark stand on.

A job that fails says why and costs no other. Children live in sessions of their own, so that Ctrl-C in the terminal
reaches the program alone, which passes it on to each of them once: a run then saves its state and ends. A second Ctrl-C
ends them at once.
"""

import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from nanosprint.errors import UserError


class Named(Protocol):
    """A job has a name to be told by."""

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Named)


class Runner:
    """Carries out jobs, each by a function that calls `process`; `say` is told in a line what became of each."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._fault: BaseException | None = None

    def run(
        self,
        jobs: Sequence[J],
        carry_out: Callable[[J, str | None], str],
        *,
        gpus: Sequence[str | None] = (None,),
        stop_after_s: float = float("inf"),
    ) -> int:
        """Carry out `jobs` in order, as many at a time as there are `gpus`; how many were not started.

        `carry_out(job, gpu)` returns what there is to say; its OSError or ValueError is the job's failure. No job is
        started later than `stop_after_s` seconds. An exception here, such as KeyboardInterrupt, reaches the children
        as SIGINT, and is raised again when they have ended.
        """
        waiting: queue.SimpleQueue[J] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        deadline = time.monotonic() + stop_after_s
        ended = threading.Semaphore(0)  # not Thread.join, which Python 3.11 takes as done once it was interrupted

        def work(gpu: str | None) -> None:
            try:
                self._work(waiting, carry_out, gpu, deadline)
            finally:
                ended.release()

        for gpu in gpus:
            threading.Thread(target=work, args=(gpu,)).start()
        left = len(gpus)
        try:
            while left:
                ended.acquire()
                left -= 1
        except BaseException:
            self._end(ended, left)
            raise
        if self._fault is not None:
            raise self._fault
        return waiting.qsize()

    def process(
        self, command: Sequence[str], log: Path, *, gpu: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """Run a command to its end, what it says appended to `log`; `gpu` is the one that CUDA shows it.

        Raises ValueError with the last thing it said where it failed.
        """
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with log.open("ab") as file:
            began = file.tell()
            child = self._start(command, file.fileno(), {**os.environ, **seen, **(environment or {})})
            try:
                code = child.wait()
            finally:
                self._children.discard(child)
        if code:
            with log.open("rb") as file:
                file.seek(began)
                said = file.read().decode(errors="replace").strip().splitlines()
            raise ValueError(f"{said[-1].removeprefix('error: ') if said else 'nothing said'} (code {code}, {log})")

    def _start(self, command: Sequence[str], output: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopping:
                raise ValueError("stopped before it was started")
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._children.add(child)
            return child

    def _work(
        self,
        waiting: "queue.SimpleQueue[J]",
        carry_out: Callable[[J, str | None], str],
        gpu: str | None,
        deadline: float,
    ) -> None:
        while time.monotonic() < deadline and not self._stopping and self._fault is None:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self.say(f"{job.name}: {carry_out(job, gpu)}")
            except (OSError, ValueError) as error:
                self.say(f"{job.name}: {'stopped' if self._stopping else f'failed: {error}'}")
            except BaseException as error:  # a fault of ours: told by `run`, not lost with the thread
                self._fault = error

    def _end(self, ended: threading.Semaphore, left: int) -> None:
        """Let the children save and end; a second interruption ends them at once."""
        with self._lock:
            self._stopping = True
        try:
            self._signal(signal.SIGINT)
            for _ in range(left):
                ended.acquire()
        except BaseException:
            self._signal(signal.SIGKILL)
            raise

    def _signal(self, signum: int) -> None:
        for child in list(self._children):
            with suppress(ProcessLookupError):
                # SIGINT to the run itself, which tells its own processes; the last word is for all of its group
                os.kill(child.pid, signum) if signum == signal.SIGINT else os.killpg(child.pid, signum)


@contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does: by an exception, which `Runner.run` passes on."""

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(signum, end) for signum in signals]
    try:
        yield
    finally:
        for signum, handler in zip(signals, before, strict=True):
            signal.signal(signum, handler)


@contextmanager
def cold_caches() -> Iterator[dict[str, str]]:
    """An environment in which nothing compiled before is found."""
    with tempfile.TemporaryDirectory() as empty:
        yield {"TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": empty}


def gpus_for(parallel: int, option: str = "--gpus-parallel") -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for each of `parallel` jobs; None leaves it as it is."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = visible.split(",") if visible else [str(i) for i in range(parallel)]
    if parallel > len(ids):
        raise UserError(f"{option} {parallel}, but CUDA_VISIBLE_DEVICES={visible} names {len(ids)}")
    return list(ids[:parallel]) if parallel > 1 else [None]
