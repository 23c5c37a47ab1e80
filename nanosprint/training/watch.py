"""Ends every process of a run when one of them cannot go on, and has the first cause told once.

A collective waits for all processes: where one is gone, the others would wait until the back end gives up, and then
each tell of the wait and none of the cause. So every process has a thread that knows of the others through the store at
which they met:

    beat     every process writes "I am here, at step n" every few seconds; process 0 reads all, the others process 0's
    cause    who fails writes why, unless somebody has before: the first writer tells the user, the others stay silent
    end      who reads a cause ends within seconds with its exit code, even while its main thread waits for a message

A process that raises an error writes the cause itself. One that was killed cannot: the others notice the broken
connection, look whose beat has stopped, and tell that. One that is stopped, or whose machine is cut off, is found by
its beat after `exec.timeout_s`, by which the back ends give up, too. The thread uses a connection of its own, so that
neither waits for the other. On the side of a cut that the store is not on, calls of the store hang, whatever their
time-out says (seen with a link taken down): there a second thread, which asks nobody, ends the process.

Idea: torch's NCCL watchdog and the heartbeats of elastic agents, made one for all back ends and with a cause.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from nanosprint.errors import EXIT_FAILED, LostProcess, exit_code, tell

PATIENCE_S = 10.0  # before processes know each other: a mistake usually stops all, and the main one tells it
GRACE_S = 3.0  # for the main thread to end in order, once a cause is known
_MISSED = 2.5  # beats without which a process counts as gone, where a connection to it broke
_CAUSE = "cause"


@dataclass(frozen=True)
class Cause:
    """Why the run ends: what to say, with which exit code, and who said it."""

    message: str
    code: int
    rank: int


@dataclass(frozen=True)
class Beat:
    """A sign of life. `count` grows; `step` is the last training step done; `left`: it has ended in order."""

    count: int
    step: int
    host: str
    pid: int
    left: bool = False


class Watch:
    """The thread of one process; a context manager around all that the processes do together.

    store: a connection that nobody else uses. end: called with an exit code to end this process at once.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, *, end: Callable[[int], None] | None = None
    ) -> None:
        self.store, self.rank, self.size, self.timeout_s = store, rank, size, timeout_s
        # A hundred processes a second are little work for a store, and a sixth of the time-out finds a silence in time.
        self.interval_s = min(timeout_s / 6, max(1.0, size / 100))
        self.step: Callable[[], int] = lambda: 0  # set when there is something to count
        self.on_cause: Callable[[str], None] = lambda _: None  # to write it down, where the main thread cannot
        self._end = end or _end_process
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # a store's connection serves one call at a time; so do its counters
        self._count, self._has_told = 0, False
        self._seen: dict[int, tuple[int, float]] = {}  # by rank, the last count and when it was new
        self._answered = time.monotonic()  # when the store last answered all that a round asks
        self._thread = threading.Thread(target=self._watch, name="nanosprint-watch", daemon=True)
        self._guard = threading.Thread(target=self._end_if_cut_off, name="nanosprint-guard", daemon=True)

    def __enter__(self) -> "Watch":
        global _active
        _active = self
        self._beat()
        self._answered = time.monotonic()
        self._thread.start()
        self._guard.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        """An orderly end is told to the others. After an error the thread stays, to end this process with them."""
        global _active
        if kind is None:
            _active = None
            self._stopped.set()
            with contextlib.suppress(RuntimeError):  # the store may have left first
                self._beat(left=True)

    def explained(self, error: BaseException) -> BaseException:
        """The error itself, or for one that only says that another process is gone, one that says why or which.

        Back ends say it in many words (gloo alone in five), so that of RuntimeErrors the state of the others decides.
        """
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return error
        deadline = time.monotonic() + (_MISSED + 1) * self.interval_s
        self._read_beats(range(self.size))
        while time.monotonic() < deadline:
            try:
                if cause := self.cause():
                    return LostProcess(cause.message)
                self._read_beats(range(self.size))
            except RuntimeError:
                break
            time.sleep(self.interval_s / 4)
        if silent := self._silent(_MISSED * self.interval_s):
            return LostProcess(self._describe(silent))
        return error

    def claim(self, error: BaseException) -> Cause | None:
        """Write down that `error` ends the run; the cause that another process wrote before, or None."""
        message = str(error) or type(error).__name__
        return self._claim(Cause(message, exit_code(error) or EXIT_FAILED, self.rank))

    def cause(self) -> Cause | None:
        """What ends the run, if something does. Raises RuntimeError where the store is gone."""
        with self._lock:
            return Cause(**json.loads(self.store.get(_CAUSE))) if self.store.check([_CAUSE]) else None

    def _claim(self, cause: Cause) -> Cause | None:
        with self._lock:
            try:
                told = self.store.compare_set(_CAUSE, "", json.dumps(asdict(cause)))
            except RuntimeError:  # nobody to ask: better told twice than never
                return None
        first = Cause(**json.loads(told))
        if first != cause or self._has_told:
            return first
        self._has_told = True
        return None

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval_s):
            try:
                self._beat()
                cause = self.cause() or self._found_silent()
                self._answered = time.monotonic()
            except RuntimeError as error:
                cause = Cause(f"the processes lost their meeting place ({_first_line(error)})", EXIT_FAILED, -1)
            if cause is not None:
                self._follow(cause)
                return

    def _end_if_cut_off(self) -> None:
        """End this process when the store has been silent for too long. Asks nothing: whoever asks hangs, too."""
        while not self._stopped.wait(self.interval_s) and self._thread.is_alive():
            silent_s = time.monotonic() - self._answered
            if silent_s > self.timeout_s + self.interval_s:  # those who can still ask find a lost process before
                message = (
                    f"process {self.rank} on {socket.gethostname()} is cut off: no answer from where the processes met "
                    f"for {silent_s:.0f} s. The network, or the first host, is down"
                )
                tell(message)
                with contextlib.suppress(Exception):
                    self.on_cause(message)
                self._end(EXIT_FAILED)
                return

    def _found_silent(self) -> Cause | None:
        """A process without signs of life for too long; told by whoever finds it first."""
        self._read_beats(range(self.size) if self.rank == 0 else (0,))
        silent = self._silent(self.timeout_s)
        if not silent:
            return None
        cause = Cause(self._describe(silent), EXIT_FAILED, self.rank)
        first = self._claim(cause)
        if first is None:
            tell(cause.message)
            self._end_siblings(silent)
        return first or cause

    def _follow(self, cause: Cause) -> None:
        """Let the main thread end in order if it can, else write down why and end the process."""
        if self._stopped.wait(GRACE_S):
            return
        with contextlib.suppress(Exception):  # nothing may keep it from ending
            self.on_cause(cause.message)
        if cause.rank < 0:  # without the store nobody can say who tells
            tell(cause.message)
        self._end(cause.code)

    def _end_siblings(self, silent: list[int]) -> None:
        """Kill those that our launcher started on this machine: a stopped one would keep its GPU, and the launcher."""
        mine = Path(f"/proc/{os.getpid()}/stat")
        for rank, beat in self._beats(silent).items():
            stat = Path(f"/proc/{beat.pid}/stat")
            near = beat.host == socket.gethostname() and beat.pid != os.getpid()
            if near and _parent(stat) == _parent(mine) is not None:
                print(f"process {rank} (pid {beat.pid}) is ended", file=sys.stderr, flush=True)
                os.kill(beat.pid, signal.SIGKILL)

    def _beat(self, *, left: bool = False) -> None:
        with self._lock:
            self._count += 1
            beat = Beat(self._count, self.step(), socket.gethostname(), os.getpid(), left)
            self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def _beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """The last of each; none of those that have not come this far. Empty without a store."""
        found = {}
        with self._lock, contextlib.suppress(RuntimeError):
            for rank in ranks:
                if self.store.check([f"beat/{rank}"]):
                    found[rank] = Beat(**json.loads(self.store.get(f"beat/{rank}")))
        return found

    def _read_beats(self, ranks: Iterable[int]) -> None:
        now = time.monotonic()
        for rank, beat in self._beats(ranks).items():
            if beat.left:
                self._seen.pop(rank, None)
            elif rank not in self._seen or self._seen[rank][0] != beat.count:
                self._seen[rank] = (beat.count, now)

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [r for r, (_, seen) in sorted(self._seen.items()) if r != self.rank and now - seen > seconds]

    def _describe(self, silent: list[int]) -> str:
        beats, now = self._beats(range(self.size)), time.monotonic()
        words = []
        for rank in silent[:8]:
            where = f" on {beats[rank].host}, pid {beats[rank].pid}, after step {beats[rank].step}" if beats else ""
            words.append(f"process {rank}{where}: no sign of life for {now - self._seen[rank][1]:.0f} s")
        more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
        return (
            f"lost {'; '.join(words)}{more}: killed, stopped, or its machine is down or cut off. "
            "`nanosprint resume` goes on from the last checkpoint, with as many processes as there are"
        )


_active: Watch | None = None


def open_watch(rank: int, size: int, timeout_s: float) -> "Watch | contextlib.nullcontext[None]":
    """The watch of this process over the others at the store where they met; nothing to watch for one alone."""
    if size == 1:
        return contextlib.nullcontext()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return Watch(dist.PrefixStore(f"nanosprint/{run}/watch", store), rank, size, timeout_s)


def may_tell(error: BaseException) -> int | None:
    """None if this process is the one to tell of `error`; else the exit code to end with in silence.

    Before the processes have met, those other than the main one wait a while first: they are usually ended meanwhile.
    """
    if _active is not None:
        earlier = _active.claim(error)
        return None if earlier is None else earlier.code
    if os.environ.get("RANK", "0") != "0" and not isinstance(error, KeyboardInterrupt):
        time.sleep(PATIENCE_S)
    return None


def _parent(stat: Path) -> str | None:
    """The parent's id in a process's line of /proc; None where there is no such process, or no /proc."""
    try:
        return stat.read_text().rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _end_process(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
