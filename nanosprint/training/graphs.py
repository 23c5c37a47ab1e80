"""Counts the graphs compiled while the clock runs. There should be none: the warm-up has met them all."""

import sys


class GraphCounter:
    """Graphs that torch.compile makes over segments; hang it on a Clock as a hook.

    `count` is that of this process, since it started or resumed the run.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before = 0

    def start(self) -> None:
        """The clock starts."""
        self._before = _graphs_compiled()

    def stop(self) -> None:
        """The clock has stopped."""
        self.count += _graphs_compiled() - self._before


def _graphs_compiled() -> int:
    """How many this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there as long as nothing was compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
