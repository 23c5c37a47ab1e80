"""E4M3 copies of weights, made anew after every update: all of a model's in two launches.

The scale of a copy is that of the weight's present values or, where it lags, of those one update ago. A learned factor
that multiplies the weight multiplies the scale instead, so that copies are of the weight alone and the factor costs
nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanosprint.ops.fp8 import E4M3, LEAST, has_kernel, quantize, scale_from


class Copy(NamedTuple):
    """A weight (R, C) and where its E4M3 codes go, as bytes: `codes` (R, C) and `turned` (C, R) or None.

    parts: the weight, or what stands one above the other in it. R of each and C are multiples of 16. scale: 0-D fp32,
    what a code of 1 stands for, `factor` (0-D) included. next_scale: the same for the next time, None where nothing
    lags; it becomes `headroom` times that of the present values. fresh: take the scale of the present values, although
    there is a next one.
    """

    parts: tuple[Tensor, ...]
    codes: Tensor
    turned: Tensor | None
    scale: Tensor
    factor: Tensor | None = None
    next_scale: Tensor | None = None
    headroom: float = 1.0
    fresh: bool = True

    @property
    def takes_next(self) -> bool:
        """Whether the codes are made with what was the next scale until now."""
        return self.next_scale is not None and not self.fresh


@torch.no_grad()
def renew(copies: Sequence[Copy]) -> None:
    """Quantise weights and set scales, in place.

    On a GPU two launches for all weights of a dtype: largest magnitudes, then codes in both layouts; a third where
    fp32 weights are turned. Weights are contiguous and begin at multiples of 16 bytes there.
    """
    if any(copy.factor is not None and copy.next_scale is not None for copy in copies):
        raise ValueError("a copy with a factor cannot lag: its next scale would be one of the product")
    if copies and all(has_kernel(part) and part.dtype != torch.float64 for copy in copies for part in copy.parts):
        from nanosprint.kernels.fp8_copies import renew as kernel

        kernel(copies, LEAST)
        return
    for copy in copies:
        renew_reference(copy)


def renew_reference(copy: Copy) -> None:
    """The formula of `renew`, on any device."""
    present = scale_from(torch.stack([part.abs().amax().float() for part in copy.parts]).amax())
    used = present
    if copy.next_scale is not None:
        used = copy.next_scale.clone() if copy.takes_next else present
        copy.next_scale.copy_(present * copy.headroom)
    copy.scale.copy_(used if copy.factor is None else used * copy.factor)
    copy.codes.copy_(torch.cat([quantize(part, used, E4M3).view(torch.uint8) for part in copy.parts]))
    if copy.turned is not None:
        copy.turned.copy_(copy.codes.mT)
