"""Where the time of a start-up goes, by phase.

The run's `start` event says it, and `benchmarks.bench_startup` shows it.

    import    from the command to the first line of this package that needs torch
    data      shards and tokenizer found, on several processes compared
    resolve   choices for this machine, the attention back end's measurement among them
    model     its initial weights on the device, its optimizers
    kernels   those that are not the compiler's, launched while others compile graphs
    ahead     waiting for the processes that compile graphs
    warm-up   a step of every kind, each graph found or compiled at its first
    budget    finding out how many steps fit
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by name, in the order of their beginning."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` more of the phase `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)
