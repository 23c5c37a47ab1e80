"""A process that carries out one run after the other: seeds of a recipe then share what was compiled for the first.

    python -m nanosprint.worker < tasks > answers

Each line of standard input is a `Task` as JSON, which names a run directory, begun or not; the run is carried out as
`nanosprint resume` does it, or only the next step of its start-up is (`training/ahead.py`), and what it says goes to
DIR.log. Each is answered by a line of JSON, see `Answer`. The process ends with its input, and by itself after an error
that it or its GPU may not have survived unharmed. `evidence/workers.py` is the other end.
"""

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from nanosprint.cli import STARTED, carry_out, guarded, set_allocator, talk
from nanosprint.errors import EXIT_FAILED, DivergedError, lacks_memory
from nanosprint.results.runs import RunDir
from nanosprint.training.request import RunRequest, load_request, resumed

if TYPE_CHECKING:
    from nanosprint.training.ahead import Ahead
    from nanosprint.training.reuse import Kept


@dataclass(frozen=True)
class Task:
    """A run directory; and which step of the run's start-up is wanted, by its name: None for the whole run."""

    run: str
    step: str | None = None


@dataclass(frozen=True)
class Answer:
    """How a task ended: the exit code of a process of its own, whether memory was too short, whether more may come."""

    code: int
    lacks_memory: bool = False
    goes_on: bool = True


class Worker:
    """Carries out runs and keeps the graphs of the last, or those of one whose start-up alone was carried out."""

    def __init__(self) -> None:
        self._kept: Kept | None = None
        self._ahead: Ahead | None = None
        self._started: float | None = STARTED  # the first run waits for this process to start, too

    def carry_out(self, run: RunDir, step: str | None = None) -> Answer:
        """Begin the run or go on with it, or go one step ahead of it."""
        answer = Answer(0)
        task = partial(self._train, run) if step is None else partial(self._prepare, run, step)

        def work() -> None:
            nonlocal answer
            try:
                task()
            except BaseException as error:
                memory = lacks_memory(error)
                # Of these it is known that they came between steps; after others nobody knows what the GPU is at.
                harmless = isinstance(error, DivergedError | ValueError | OSError) and not memory
                answer = Answer(EXIT_FAILED, memory, harmless)
                raise

        try:
            code = guarded(work)
        except Exception:  # a fault of ours
            traceback.print_exc()
            code = EXIT_FAILED
        if "torch" in sys.modules:
            from nanosprint.training.reuse import release_memory

            release_memory()
        self._started = None
        return Answer(code, answer.lacks_memory, answer.goes_on)

    def _train(self, run: RunDir) -> None:
        started = time.time() if self._started is None else self._started
        request, kept = self._request(run)
        carry_out(request, run, resume=True, started=started, kept=kept)

    def _prepare(self, run: RunDir, step: str) -> None:
        """Go a step of the run's start-up. Nobody else may be at the run, as while it trains."""
        ahead, self._ahead = self._ahead, None  # after an error there is none
        request, kept = self._request(run)
        from nanosprint.training.ahead import Ahead
        from nanosprint.training.api import taken

        with taken(run):
            if step == "load":
                self._ahead = Ahead(request, kept)
                return
            assert ahead is not None, f"{step!r} without the steps before"
            getattr(ahead, step.replace(" ", "_"))()  # the steps of `evidence/workers.py` are its methods
        self._ahead = ahead if step != "warm up" else None

    def _request(self, run: RunDir) -> "tuple[RunRequest, Kept]":
        """What is asked of the run, and what the run before it has left."""
        request = load_request(run)
        request = resumed(request, request.execution)
        set_allocator(request.execution)
        from nanosprint.training.reuse import Kept

        self._kept = self._kept or Kept()
        return request, self._kept


def main() -> None:
    """Answer until the input ends."""
    requests, answers = _private(0, "r"), _private(1, "w")
    talk()
    worker = Worker()
    try:
        for line in iter(requests.readline, ""):
            task = Task(**json.loads(line))
            _speak_into(Path(f"{task.run}.log"))
            answer = worker.carry_out(RunDir(Path(task.run)), task.step)
            sys.stdout.flush()
            sys.stderr.flush()
            print(json.dumps(asdict(answer)), file=answers, flush=True)
            if not answer.goes_on:
                break
    except KeyboardInterrupt:  # between two runs: there is nothing to save
        sys.exit(130)
    except BrokenPipeError:  # who asked is gone
        sys.exit(EXIT_FAILED)


def _private(stream: int, mode: str) -> IO[str]:
    """A standard stream that no print and no process started by a run gets hold of; nothing stands in its place."""
    own = os.dup(stream)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, stream)
    os.close(nothing)
    return os.fdopen(own, mode)


def _speak_into(log: Path) -> None:
    """From now on all that is said here, by the processes that a run starts, too, is appended to `log`."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    main()
