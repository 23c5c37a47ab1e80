"""The workers of a GPU: processes that carry out one run after the other (nanosprint/worker.py), seen from outside.

Runs that can share compiled graphs, such as seeds of a recipe, are a group. Each group has a worker, which waits while
those of other groups train, so that recipes can take turns. A waiting worker has given its weights back and holds a
CUDA context and the host's memory of a process that compiles, gigabytes of it; so only so many are kept.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "nanosprint.worker")
MOST = 8  # waiting workers of a GPU; runs of further groups get a worker that ends with them
_PATIENCE_S = 60.0  # for a worker that has nothing to do any more
Child = subprocess.Popen[bytes]


class Workers:
    """For one thread. `start(log)` starts a worker's process, `forget` is told of each that has ended."""

    def __init__(
        self, start: Callable[[Path], Child], forget: Callable[[Child], None], say: Callable[[str], None]
    ) -> None:
        self._start, self._forget, self._say = start, forget, say
        self._waiting: dict[Hashable, Child] = {}  # the least recently used first
        self._most = MOST

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
        assert worker.stdin is not None
        assert worker.stdout is not None
        with suppress(BrokenPipeError):  # it died: so there will be no answer
            worker.stdin.write(f"{run}\n".encode())
            worker.stdin.flush()
        line = worker.stdout.readline()
        if line:
            return worker, json.loads(line)
        return worker, {"code": worker.wait() or 1, "lacks_memory": False, "goes_on": False}

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
