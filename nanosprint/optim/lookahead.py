"""Weights that stand ahead of themselves, so that gradients are those of where their drift leads (EMA-Nesterov).

    W = P + a d                      where the gradient is taken: a drifts d ahead of the position P
    P' = W + step                    the rule's step is taken from there
    d' = kept d + (1 - kept) (P' - P)
    W' = P' + a' d'                  for the next step; a' = 0 ends it

Momentum looks ahead by a step or so, in the direction of gradients; this looks ahead by tens of steps, in the direction
in which weights have in fact moved, decay and all. `LookAhead` says when and how much, and where it is from.

The move comes right after the update, before the weights are sent out and FP8 copies renewed, so that it costs no
message and no second copy: a few passes over what a process owns. The drift belongs to the optimizer's state, like the
lower halves of bf16 weights, and P need not be kept, since P' - P = W' - W of the rule's own step, plus a d.
"""

import torch
from torch import Tensor

from nanosprint.config.schedule import Ahead
from nanosprint.optim.mantissa import exact, overwrite

DRIFT = "drift"  # the key in the optimizers' state


@torch.no_grad()
def step_ahead(optimizer: torch.optim.Optimizer, now: Ahead | None) -> None:
    """The optimizer's step; then move its parameters ahead as `now` says, None for not at all."""
    if now is None:
        optimizer.step()
        return
    tensors: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    before = [exact(p, optimizer.state.get(p, {})) for p in tensors]
    optimizer.step()
    for tensor, start in zip(tensors, before, strict=True):
        state = optimizer.state[tensor]
        position = exact(tensor, state)
        moved = position - start
        drift = moved.mul_(1 - now.kept)
        if DRIFT in state:
            drift.add_(state[DRIFT], alpha=now.kept + (1 - now.kept) * now.here)
        if now.next:
            state[DRIFT] = drift
            overwrite(tensor, state, position.add_(drift, alpha=now.next))
        else:
            state.pop(DRIFT, None)
