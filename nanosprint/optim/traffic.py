"""How many bytes a step sends, counted from the banks that the engine would cut for N processes.

What a process sends in the ring algorithms that NCCL and gloo use for large messages, of a storage of S bytes:

    reduce-scatter, all-gather   (N - 1) / N * S each
    all-reduce                   2 (N - 1) / N * S

and it receives as much. S has a bank's padding in it. Latency, and the few numbers of clipping and of log lines, are
not counted. Sources: Thakur et al. 2005, "Optimization of collective communication operations in MPICH"; for the
sharding Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanosprint.optim.parts import BankPart, Part


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one part sends. Bytes by one process and on average by step: a part with `every=n` sends every n-th time."""

    role: str
    numbers: int  # of the bank, padding included
    messages: float  # collectives a step
    reduce_scatter: float = 0.0
    all_gather: float = 0.0
    all_reduce: float = 0.0
    at_most: bool = False  # sparse rows: how many there are is up to the data, and this is what all of them take

    @property
    def sent(self) -> float:
        """Of all kinds together."""
        return self.reduce_scatter + self.all_gather + self.all_reduce


def traffic(parts: Iterable[Part], size: int) -> list[Traffic]:
    """What each part sends among `size` processes; `parts` are those of `build_parts(..., size=size)`.

    Raises ValueError for a table with sparse gradients, whose messages are as long as the look-ups of a step.
    """
    return [_of_part(part, size) for part in parts]


def _of_part(part: Part, size: int) -> Traffic:
    if not isinstance(part, BankPart):
        raise ValueError(f"what {part.group.role} sends depends on the data: its gradients are sparse look-ups")
    bank, every = part.bank, part.group.every
    share = bank.grad.nbytes * (size - 1) / size / every
    common: dict[str, Any] = {"role": part.group.role, "numbers": bank.grad.numel()}
    if size == 1:
        return Traffic(**common, messages=0)
    if bank.shards == 1:
        return Traffic(**common, messages=1 / every, all_reduce=2 * share)
    sparse = part.group.comm == "shard_sparse"
    return Traffic(**common, messages=2 / every, reduce_scatter=share, all_gather=share, at_most=sparse)
