"""Validation loss: the mean over exactly the targets that the recipe names."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nanosprint.training import distributed


class Validation(NamedTuple):
    """Mean cross-entropy in nats and the number of targets it is the mean of."""

    loss: float
    tokens: int


@torch.no_grad()
def evaluate(
    loss_sum: Callable[[Tensor, Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> Validation:
    """Mean loss over this process's batches and all other processes'.

    batches: (tokens, targets) pairs, (B, S) each; targets of -1 do not count. Sums are kept in fp64 (fp32 on MPS).
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    totals = torch.zeros(2, dtype=wide, device=device)
    for tokens, targets in batches:
        totals[0] += loss_sum(tokens, targets)
        totals[1] += (targets >= 0).sum()
    loss, count = distributed.sum_(totals).tolist()
    if count == 0:
        raise ValueError("validation has no targets")
    return Validation(loss / count, int(count))
