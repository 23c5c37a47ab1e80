"""Time on a GPU in which intervals overlap: how much of the communication hides behind computing."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nanosprint.training.profile import Span, group_of

Interval = tuple[float, float]  # from, to


class Communication(NamedTuple):
    """Of one process, ms a step: with a kernel of communication running, and with no other kernel beside it."""

    total: float
    exposed: float


def communication(spans: Sequence[Span], steps: int) -> Communication | None:
    """From all runs of kernels in `steps` steps; None where no kernel communicates, as on a CPU.

    A kernel of communication runs from when this process came to it until all have: a wait for others is in it.
    """
    sending = [span[1:] for span in spans if group_of(span.name) == "communication"]
    if not sending:
        return None
    computing = [span[1:] for span in spans if group_of(span.name) != "communication"]
    exposed = length([*sending, *computing]) - length(computing)
    return Communication(length(sending) / steps, exposed / steps)


def length(intervals: Iterable[Interval]) -> float:
    """Of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
