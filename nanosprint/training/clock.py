"""The timed region of a run: training steps and nothing else.

Warm-up and compilation happen before the first `start`, validation and checkpoints while the clock is stopped. A GPU
works behind the program's back, so the clock waits for it at both ends of every segment; whoever measures something
else over the same segments, such as energy, hangs a hook on the clock and sees the same two moments.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class SegmentHook(Protocol):
    """Called at both ends of every timed segment, with the device idle and just outside the counted time."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Clock:
    """Adds up the time of segments. Made stopped.

    `synchronize` waits until the device has done all that was asked of it. Misuse (starting a running clock, stopping
    or pausing a stopped one) raises RuntimeError, for it would make every later time wrong.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        *,
        hooks: Sequence[SegmentHook] = (),
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._hooks = tuple(hooks)
        self._now_ns = now_ns
        self._done_ns = 0  # of closed segments
        self._began_ns: int | None = None

    @property
    def running(self) -> bool:
        return self._began_ns is not None

    @property
    def train_ms(self) -> float:
        """Milliseconds counted so far, the open segment included. Does not wait for the device."""
        open_ns = 0 if self._began_ns is None else self._now_ns() - self._began_ns
        return (self._done_ns + open_ns) / 1e6

    def start(self) -> None:
        """Open a segment once the device is idle."""
        if self.running:
            raise RuntimeError("the clock is already running: stop it before it is started again")
        self._synchronize()
        for hook in self._hooks:
            hook.start()
        self._began_ns = self._now_ns()

    def stop(self) -> float:
        """Close the segment once the device is idle; `train_ms` so far."""
        if self._began_ns is None:
            raise RuntimeError("the clock is not running: start it before it is stopped")
        self._synchronize()
        self._done_ns += self._now_ns() - self._began_ns
        self._began_ns = None
        for hook in reversed(self._hooks):
            hook.stop()
        return self.train_ms

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Not counting within the block. After an exception the clock stays stopped: what follows is no training."""
        self.stop()
        yield
        self.start()

    def restore(self, train_ms: float) -> None:
        """Go on from the `train_ms` of a checkpoint, stopped. Raises ValueError for a time that cannot be one."""
        if self.running:
            raise RuntimeError("the clock is running: stop it before its time is restored")
        if not 0 <= train_ms < float("inf"):
            raise ValueError(f"train_ms={train_ms} cannot be restored: a time is a number of milliseconds from 0 on")
        self._done_ns = round(train_ms * 1e6)
