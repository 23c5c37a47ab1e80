"""Jobs as processes, in order, one or several at a time: what races, ablations and the ladder's benchmark stand on.

A job that fails says why and costs no other. Runs that can share compiled graphs may share a process (workers.py).
Children live in sessions of their own, so that Ctrl-C in the terminal reaches the program alone, which passes it on to
each of them once: a run then saves its state and ends. A second Ctrl-C ends them at once.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Generic, Protocol, TypeVar

from nanosprint.errors import UserError
from nanosprint.evidence.workers import COMMAND, Workers


class Named(Protocol):
    """A job has a name to be told by."""

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Named)


@dataclass(frozen=True)
class Preparation(Generic[J]):
    """Of workers, before jobs take their turns: how many side by side, and what makes a job's directory.

    `begin` returns the run directory, its request written, in which `Runner.train` will train. Its OSError or
    ValueError leaves the job's group without a head start.
    """

    at_once: int
    begin: Callable[[J], Path]


class _Plan(Generic[J]):
    """Jobs that wait for their turn. Those of a group stay where its first one went, or where it was claimed for."""

    def __init__(self, jobs: Sequence[J], group: Callable[[J], Hashable], claimed_only: bool = False) -> None:
        self.group = group
        self.groups = len({group(job) for job in jobs} - {None})
        self._claimed_only = claimed_only
        self._waiting = list(jobs)
        self._places: dict[Hashable, str | None] = {}
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        return len(self._waiting)

    def claim(self, gpu: str | None, most: int) -> list[J]:
        """Let the next groups of nobody's stay on `gpu`, `most` at most; the first job of each."""
        firsts: dict[Hashable, J] = {}
        with self._lock:
            for job in self._waiting:
                group = self.group(job)
                if group is not None and group not in self._places:
                    firsts.setdefault(group, job)
            claimed = dict(list(firsts.items())[:most])
            self._places |= dict.fromkeys(claimed, gpu)
        return list(claimed.values())

    def next_for(self, gpu: str | None) -> J | None:
        """The first job that may run on `gpu`, which is taken; None where all others belong elsewhere."""
        with self._lock:
            for job in self._waiting:
                if self._may_run(self.group(job), gpu):
                    self._waiting.remove(job)
                    return job
        return None

    def _may_run(self, group: Hashable, gpu: str | None) -> bool:
        if group is not None and not self._claimed_only:
            self._places.setdefault(group, gpu)
        return group is None or (group in self._places and self._places[group] == gpu)

    def has_more(self, job: J) -> bool:
        """Whether others of the job's group wait."""
        with self._lock:
            return any(self.group(other) == self.group(job) for other in self._waiting)


class Runner:
    """Carries out jobs, each by a function that calls `train` or `process`; `say` is told what became of each."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._children: set[subprocess.Popen[bytes]] = set()
        self._workers: dict[str | None, Workers] = {}  # by GPU
        self._lock = threading.Lock()
        self._stopping = False
        self._fault: BaseException | None = None

    def run(
        self,
        jobs: Sequence[J],
        carry_out: Callable[[J, str | None], str],
        *,
        gpus: Sequence[str | None] = (None,),
        group: Callable[[J], Hashable] = lambda _: None,
        stop_after_s: float = float("inf"),
        ahead: Preparation[J] | None = None,
    ) -> int:
        """Carry out `jobs` in order, as many at a time as there are `gpus`; how many were not started.

        ahead: before a group's first job all groups that a GPU can keep workers for are prepared; where there are more,
        the next ones when all jobs of these are done. Nothing is prepared on a GPU while a job has its turn there.

        `carry_out(job, gpu)` returns what there is to say; its OSError or ValueError is the job's failure. Jobs of a
        `group` other than None stay on one GPU, one after the other. No job is started later than `stop_after_s`
        seconds. An exception here, such as KeyboardInterrupt, reaches the children as SIGINT, and is raised again when
        they have ended.
        """
        plan = _Plan(jobs, group, claimed_only=ahead is not None)
        deadline = time.monotonic() + stop_after_s
        ended = threading.Semaphore(0)  # not Thread.join, which Python 3.11 takes as done once it was interrupted
        self._workers = {gpu: self._workers_of(gpu) for gpu in gpus}

        def work(gpu: str | None) -> None:
            try:
                with closing(self._workers[gpu]):
                    self._work(plan, carry_out, gpu, deadline, ahead)
            except BaseException as error:  # a fault of ours: told by `run`, not lost with the thread
                self._fault = error
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
        return plan.left

    def train(
        self,
        run: Path,
        *,
        gpu: str | None = None,
        group: Hashable = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Begin the run whose request lies in a directory, or go on with it; what it says is appended to RUN.log.

        Runs of a `group` share a process, one after the other, and its compiled graphs; None: a process of its own,
        which alone can have an `environment`. Raises ValueError with the last thing it said where it failed.
        """
        log = Path(f"{run}.log")
        if group is None:
            command = [sys.executable, "-m", "nanosprint", "resume", str(run)]
            self.process(command, log, gpu=gpu, environment=environment)
        else:
            assert environment is None, "a process that runs share has one environment"
            began = log.stat().st_size if log.exists() else 0
            _check(self._workers[gpu].carry_out(run, group), log, began)

    def process(
        self, command: Sequence[str], log: Path, *, gpu: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """Run a command to its end, what it says appended to `log`; `gpu` is the one that CUDA shows it.

        Raises ValueError with the last thing it said where it failed.
        """
        with log.open("ab") as file:
            began = file.tell()
            child = self._start(command, file.fileno(), gpu, environment or {})
            try:
                code = child.wait()
            finally:
                self._children.discard(child)
        _check(code, log, began)

    def _workers_of(self, gpu: str | None) -> Workers:
        def start(log: Path) -> subprocess.Popen[bytes]:
            with log.open("ab") as file:  # until it can say where its first run stands
                return self._start(COMMAND, file.fileno(), gpu, {}, asked=True)

        return Workers(start, self._children.discard, self.say)

    def _start(
        self,
        command: Sequence[str],
        output: int,
        gpu: str | None,
        environment: Mapping[str, str],
        *,
        asked: bool = False,
    ) -> subprocess.Popen[bytes]:
        """asked: by lines on its standard input, which it answers on its standard output."""
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with self._lock:
            if self._stopping:
                raise ValueError("stopped before it was started")
            child = subprocess.Popen(
                command,
                env={**os.environ, **seen, **environment},
                stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE if asked else output,
                stderr=output,
                start_new_session=True,
            )
            self._children.add(child)
            return child

    def _work(
        self,
        plan: "_Plan[J]",
        carry_out: Callable[[J, str | None], str],
        gpu: str | None,
        deadline: float,
        ahead: Preparation[J] | None,
    ) -> None:
        more = True
        while more and self._goes_on(deadline):
            if ahead is not None:
                self._prepare(plan, gpu, ahead)
            more = self._take_turns(plan, carry_out, gpu, deadline)

    def _goes_on(self, deadline: float) -> bool:
        return time.monotonic() < deadline and not self._stopping and self._fault is None

    def _prepare(self, plan: "_Plan[J]", gpu: str | None, ahead: Preparation[J]) -> None:
        """Claim as many groups as this GPU has room for, of those that are its share, and prepare their workers."""
        share = -(-plan.groups // len(self._workers))
        runs: dict[Hashable, Path] = {}
        for job in plan.claim(gpu, min(share, self._workers[gpu].room)):
            with suppress(OSError, ValueError):  # the job's turn will tell
                runs[plan.group(job)] = ahead.begin(job)
        if len(runs) < 2 or self._stopping:  # one alone gains nothing
            return
        where = "" if gpu is None else f" on GPU {gpu}"
        self.say(f"preparing {len(runs)} of {plan.groups}{where}: {', '.join(map(str, runs))}")
        logs = {group: Path(f"{run}.log") for group, run in runs.items()}
        began = {group: log.stat().st_size if log.exists() else 0 for group, log in logs.items()}
        failed, seconds = self._workers[gpu].prepare(runs, ahead.at_once)
        if self._stopping:
            return
        for group, code in failed.items():
            try:
                _check(code, logs[group], began[group])
            except (OSError, ValueError) as error:
                self.say(f"{group}: could not be prepared, its runs start by themselves: {error}")
        steps = ", ".join(f"{step} {took:.0f}" for step, took in seconds.items())
        self.say(f"prepared {len(runs) - len(failed)}{where} in {sum(seconds.values()):.0f} s ({steps})")

    def _take_turns(
        self, plan: "_Plan[J]", carry_out: Callable[[J, str | None], str], gpu: str | None, deadline: float
    ) -> bool:
        """Carry out the jobs that may run on this GPU; whether there were any."""
        any_job = False
        while self._goes_on(deadline) and (job := plan.next_for(gpu)) is not None:
            any_job = True
            try:
                self.say(f"{job.name}: {carry_out(job, gpu)}")
            except (OSError, ValueError) as error:
                self.say(f"{job.name}: {'stopped' if self._stopping else f'failed: {error}'}")
            if not plan.has_more(job):
                self._workers[gpu].end(plan.group(job))
        return any_job

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


def _check(code: int, log: Path, began: int) -> None:
    """Raise ValueError for a code other than 0, with the last line that `log` has beyond `began` bytes."""
    if code:
        with log.open("rb") as file:
            file.seek(began)
            said = file.read().decode(errors="replace").strip().splitlines()
        raise ValueError(f"{said[-1].removeprefix('error: ') if said else 'nothing said'} (code {code}, {log})")


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


def check_prepare(prepare: int, share: bool, unlike: str) -> None:
    """Raise UserError for workers to be prepared where runs share none; `unlike`: the options that keep them apart."""
    if prepare > 1 and not share:
        raise UserError(
            f"--prepare {prepare} is for runs that share a process with others of their recipe: not with {unlike}"
        )


def gpus_for(parallel: int, option: str = "--gpus-parallel") -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for each of `parallel` jobs; None leaves it as it is."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = visible.split(",") if visible else [str(i) for i in range(parallel)]
    if parallel > len(ids):
        raise UserError(f"{option} {parallel}, but CUDA_VISIBLE_DEVICES={visible} names {len(ids)}")
    return list(ids[:parallel]) if parallel > 1 else [None]
