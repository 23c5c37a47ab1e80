"""Matrix products whose weights are stored in one format and used in another, and their initial values.

Matrices are uniform with a standard deviation of 3^-1/2 / sqrt(fan in), PyTorch's own, or another in its place, and
those that write into the residual stream may start at zero, so that every layer starts as the identity (speedrun
record #5), or scaled down with depth, as GPT-2 has it (Radford et al. 2019).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.config.model import InitSpec


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in), transposed, plus bias (out), in the dtype of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@torch.no_grad()
def init_linear(weight: Tensor, spec: InitSpec, generator: torch.Generator, scale: float = 1.0) -> None:
    """Fill a (out, in) matrix as the recipe says; the standard deviation is multiplied by `scale`."""
    if spec.linear == "normal":
        weight.normal_(0.0, spec.linear_std * scale, generator=generator)
    else:
        bound = math.sqrt(3) * spec.linear_std * scale / math.sqrt(weight.size(-1))
        weight.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def init_projection(
    weight: Tensor, spec: InitSpec, generator: torch.Generator, num_layers: int, kind: str | None = None
) -> None:
    """Fill a (out, in) matrix that writes into the residual stream: zero, as any other, or smaller with depth.

    "scaled" divides by sqrt(2 * num_layers), so that the stream's variance at the end does not grow with depth
    (Radford et al. 2019). "as_up" is as the matrix that this one follows, whose fan-in is this one's fan-out. `kind`
    takes the place of `spec.projections`.
    """
    kind = spec.projections if kind is None else kind
    if kind == "zero":
        weight.zero_()
    elif kind == "as_up":
        fan_out, fan_in = weight.shape
        init_linear(weight, spec, generator, 1.0 if spec.linear == "normal" else math.sqrt(fan_in / fan_out))
    else:
        init_linear(weight, spec, generator, (2 * num_layers) ** -0.5 if kind == "scaled" else 1.0)
