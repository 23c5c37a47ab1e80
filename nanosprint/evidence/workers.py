"""The workers of a GPU: processes that carry out one run after the other (nanosprint/worker.py), seen from outside.

Runs that can share compiled graphs, such as seeds of a recipe, are a group. Each group has a worker, which waits while
those of other groups train, so that recipes can take turns. A waiting worker has given its weights back and holds a
CUDA context and the host's memory of a process that compiles, gigabytes of it; so only so many are kept.

Workers can be prepared: they go through the start-up of their first run side by side, before any run trains. What
measures or fills the GPU is left to one worker at a time, while none of the others does anything (training/ahead.py).
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "nanosprint.worker")
# Waiting workers of a GPU; runs of further groups get a worker that ends with them. A recipe, eight variants and more.
MOST = 12
_PATIENCE_S = 60.0  # for a worker that has nothing to do any more
Child = subprocess.Popen[bytes]
STEPS = {"load": False, "choose": True, "compile": False, "warm up": True}  # of a preparation: whether alone


class Workers:
    """For one thread. `start(log)` starts a worker's process, `forget` is told of each that has ended."""

    def __init__(
        self, start: Callable[[Path], Child], forget: Callable[[Child], None], say: Callable[[str], None]
    ) -> None:
        self._start, self._forget, self._say = start, forget, say
        self._waiting: dict[Hashable, Child] = {}  # the least recently used first
        self._most = MOST

    @property
    def room(self) -> int:
        """How many groups can have a worker that stays."""
        return max(1, self._most)

    def prepare(self, runs: Mapping[Hashable, Path], at_once: int) -> tuple[dict[Hashable, int], dict[str, float]]:
        """Give new workers to groups, and let each carry out the start-up of the group's run, `at_once` side by side.

        Exit codes of those that failed, by group, and the seconds of each step. Who failed is as if it had never been.
        """
        failed: dict[Hashable, int] = {}
        seconds: dict[str, float] = {}
        for step, alone in STEPS.items():
            left = [group for group in runs if group not in failed]
            began = time.monotonic()
            with ThreadPoolExecutor(1 if alone else at_once) as pool:
                codes = list(pool.map(partial(self._go, step), left, [runs[group] for group in left]))
            seconds[step] = time.monotonic() - began
            failed |= {group: code for group, code in zip(left, codes, strict=True) if code}
        return failed, seconds

    def _go(self, step: str, group: Hashable, run: Path) -> int:
        """Let the group's worker, a new one at first, go a step; its exit code. It is kept unless it failed."""
        if group not in self._waiting:
            try:
                self._waiting[group] = self._start(Path(f"{run}.log"))
            except (OSError, ValueError):  # no process to be had, or all is to stop: the run's turn will tell
                return 1
        answer = self._answer(self._waiting[group], run, step)
        if answer["code"]:
            self.end(group)
        return int(answer["code"])

    def carry_out(self, run: Path, group: Hashable) -> int:
        """Begin the run in a directory or go on with it; its exit code, or that of the process that died of it.

        Where memory is too short, the workers that wait are ended, and from then on fewer are kept; the run is then
        tried once more, by a process that has done nothing else.
        """
        worker = self._waiting.pop(group, None)
        used = worker is not None
        worker, answer = self._ask(worker, run)
        if answer["lacks_memory"] and (used or self._waiting):
            self._say(f"{run.name}: out of memory: ending {len(self._waiting)} waiting workers and trying once more")
            self._most = max(0, len(self._waiting) - 1)
            self._end(worker)
            self.close()
            worker, answer = self._ask(None, run)
        if answer["goes_on"] and len(self._waiting) < self._most:
            self._waiting[group] = worker
        else:
            self._end(worker)
        return int(answer["code"])

    def end(self, group: Hashable) -> None:
        """End the worker of a group, if one waits."""
        worker = self._waiting.pop(group, None)
        if worker is not None:
            self._end(worker)

    def close(self) -> None:
        """End all that wait."""
        for group in list(self._waiting):
            self.end(group)

    def _ask(self, worker: Child | None, run: Path) -> tuple[Child, dict[str, Any]]:
        """Let a worker, by default a new one, carry out a run; its answer, which is made up where it died."""
        if worker is None or worker.poll() is not None:
            if worker is not None:
                self._end(worker)  # it was killed while it waited
            worker = self._start(Path(f"{run}.log"))
        return worker, self._answer(worker, run)

    def _answer(self, worker: Child, run: Path, step: str | None = None) -> dict[str, Any]:
        """What a worker answers when it has carried out the run, or a step; made up where it died of it."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        with suppress(BrokenPipeError):  # it died: so there will be no answer
            worker.stdin.write((json.dumps({"run": str(run), "step": step}) + "\n").encode())
            worker.stdin.flush()
        line = worker.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        return {"code": worker.wait() or 1, "lacks_memory": False, "goes_on": False}

    def _end(self, worker: Child) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        with suppress(BrokenPipeError):
            worker.stdin.close()
        try:
            worker.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        worker.stdout.close()
        self._forget(worker)
