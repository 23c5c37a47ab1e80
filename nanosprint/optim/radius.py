"""Steps that steer the norm of a matrix, instead of leaving it to weight decay.

An orthogonalised update U is as large in every direction, so that a matrix grows with each step, most of all by the
step's own square, and a given rate moves it less and less. For each matrix W, with the update U (to be subtracted, the
factor of its shape included) and the rate r, in this order:

    U  <- U - (1 - outward) <U, W> / |W|^2 W      where <U, W> < 0, that is where the step would lengthen W
    u  <- max(1, floor |w| / |u|) u               for the weights w of each output
    W' =  W - r U
    W' <- rho / |W'| W',  rho = |W| - r <U, W> / |W|      the norm to first order: what r^2 adds is taken back
    W' <- (1 - decay) W'                          cautious decay: only where U W >= 0

A matrix that its step outweighs (rho <= 0), as one of zeros is, has no radius to keep and takes the step as it is.

Cost: no state. Some fifteen elementwise launches a bank in place of one, about 100 bytes of traffic a weight, and four
temporary copies of a bank in fp32. Nothing crosses matrices, so that it does not matter who owns which.

Source: see `RadiusControl`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanosprint.config.groups import RadiusControl

Steering = tuple[RadiusControl, Any, float]  # with the rate, and the factor of the shape, which belongs to the update

FLOOR = 1e-10  # of norms that are divided by


def steered(
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    shape: Sequence[int],
    steering: Steering,
    decay: Any,
    cautious: bool,
) -> list[Tensor]:
    """`step_at_radius` for each parameter, of matrices of `shape` one after the other: new tensors."""
    control, rate, factor = steering
    made = []
    for weight, update in zip(weights, updates, strict=True):
        matrices, steps = weight.reshape(-1, *shape), factor * update.reshape(-1, *shape)
        made.append(step_at_radius(matrices, steps, control, rate, decay, cautious).view(weight.shape))
    return made


def step_at_radius(
    weights: Tensor, updates: Tensor, control: RadiusControl, rate: Any, decay: Any, cautious: bool
) -> Tensor:
    """The new weights. weights, updates: (B, M, N) in fp32 or wider, not modified. rate, decay: numbers or 0-D tensors.

    decay: the part taken off, of all weights or, if cautious, of those that the update moves toward zero.
    """
    lengths = weights.norm(dim=(-2, -1), keepdim=True)
    along = (updates * weights).sum((-2, -1), keepdim=True)
    if control.outward < 1:
        excess = (1 - control.outward) * along.clamp(max=0) / lengths.square().clamp_min(FLOOR**2)
        updates = updates - excess * weights
    if control.floor:
        axis = -1 if control.outputs == "rows" else -2
        least = control.floor * weights.norm(dim=axis, keepdim=True)
        updates = updates * (least / updates.norm(dim=axis, keepdim=True).clamp_min(FLOOR)).clamp_min(1)
    moved = weights - rate * updates
    if control.pin:
        along = (updates * weights).sum((-2, -1), keepdim=True)
        radius = lengths - rate * along / lengths.clamp_min(FLOOR)
        scale = radius / moved.norm(dim=(-2, -1), keepdim=True).clamp_min(FLOOR)
        moved = moved * torch.where(radius > 0, scale, 1)
    if isinstance(decay, Tensor) or decay != 0:
        moved = moved - decay * moved * (updates * weights >= 0 if cautious else 1)
    return moved
