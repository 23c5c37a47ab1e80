"""Validation loss: the mean over exactly the targets that the recipe names."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from nanosprint.optim.sharding import sum_over_processes
from nanosprint.training.batch import ModelInput
from nanosprint.training.step import LossSum


class Validation(NamedTuple):
    """Mean cross-entropy in nats and the number of targets it is the mean of."""

    loss: float
    tokens: int


@torch.no_grad()
def evaluate(loss_sum: LossSum, batches: Iterable[ModelInput], device: torch.device) -> Validation:
    """Mean loss over this process's batches and all other processes'.

    batches: arguments of `loss_sum`, the targets second; those of -1 do not count. Sums are kept in fp64 (fp32 on MPS).
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    totals = torch.zeros(2, dtype=wide, device=device)
    for arguments in batches:
        totals[0] += loss_sum(*arguments)
        totals[1] += (arguments.targets >= 0).sum()
    loss, count = sum_over_processes(totals).tolist()
    if count == 0:
        raise ValueError("validation has no targets")
    return Validation(loss / count, int(count))
