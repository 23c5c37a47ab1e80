"""Counts the graphs made while the clock runs. There should be none: the warm-up has met them all."""

import sys
from collections.abc import Callable


class GraphCounter:
    """Graphs that torch.compile makes over segments, and those of `recorded`; hang it on a Clock as a hook.

    `count` is that of this process, since it started or resumed the run. recorded: how many CUDA graphs there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self.recorded: Callable[[], int] = lambda: 0
        self._before = 0

    def start(self) -> None:
        """The clock starts."""
        self._before = self._made()

    def stop(self) -> None:
        """The clock has stopped."""
        self.count += self._made() - self._before

    def _made(self) -> int:
        return _graphs_compiled() + self.recorded()


def _graphs_compiled() -> int:
    """How many this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there as long as nothing was compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
