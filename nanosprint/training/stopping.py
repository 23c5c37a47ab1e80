"""Turns SIGINT and SIGTERM into a request that the loop answers at the end of a step, with its state saved."""

import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While active, `signum` holds the first signal received, or None.

    A second SIGINT interrupts at once, unless `patient`: among several processes, the terminal and the launcher both
    send one.
    """

    def __init__(self, patient: bool = False) -> None:
        self.signum: int | None = None
        self.patient = patient
        self._previous: dict[int, Any] = {}

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.signum = signum

    def __enter__(self) -> "StopRequest":
        for signum in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[signum] = signal.signal(signum, self._receive)
            except ValueError:  # not the main thread: whoever runs us there handles its own signals
                break
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
