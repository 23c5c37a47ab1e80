"""E4M3 copies of weights, made anew after every update: all of a model's in a few launches.

The scale of a copy is that of the weight's present values. A learned factor that multiplies the weight multiplies the
scale instead, so that copies are of the weight alone and the factor costs nothing.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanosprint.ops.fp8 import E4M3, quantize_all, scale_from
from nanosprint.ops.fp8_projection import Copies


class Fp8Weight(nn.Module):
    """Copies of a matrix (E, D), and of its transpose where the input gradient is in FP8, too.

    Buffers of bytes: a module that is cast to another float dtype would cast FP8 buffers with it.
    """

    codes: Tensor
    turned: Tensor | None
    scale: Tensor

    def __init__(self, shape: tuple[int, int], device: torch.device, *, turned: bool) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(shape, dtype=torch.uint8, device=device))
        other = torch.zeros(shape[::-1], dtype=torch.uint8, device=device) if turned else None
        self.register_buffer("turned", other)
        self.register_buffer("scale", torch.ones((), device=device))

    def copies(self) -> Copies:
        """What the operator takes."""
        return Copies(self.codes, self.turned, self.scale)


class Source(NamedTuple):
    """What `copies` are of: `parts` one above the other, times a 0-D `factor` where there is one."""

    copies: Fp8Weight
    parts: tuple[Tensor, ...]
    factor: Tensor | None


@torch.no_grad()
def refresh(sources: Sequence[Source]) -> None:
    """Quantise weights anew. Either all copies have a transpose or none has."""
    if not sources:
        return
    scales = scale_from(_largest([source.parts for source in sources]))
    one = scales.new_ones(())
    factors = torch.stack([one if s.factor is None else s.factor.to(scales.dtype) for s in sources])
    torch._foreach_copy_([s.copies.scale for s in sources], list((scales * factors).unbind()))
    parts = [part for source in sources for part in source.parts]
    owners = [i for i, source in enumerate(sources) for _ in source.parts]
    if len(parts) > len(sources):
        scales = torch.cat([scales[i : i + 1] for i in owners])
    plain, turned = [], []
    for source in sources:
        sizes = [len(part) for part in source.parts]
        plain += source.copies.codes.view(E4M3).split(sizes)
        if source.copies.turned is not None:
            turned += source.copies.turned.view(E4M3).split(sizes, dim=1)
    quantize_all(parts, scales, plain, turned or None)


def _largest(matrices: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """(n,) fp32: the largest magnitude in all parts of each matrix. NaN stays NaN."""
    flat = [part for parts in matrices for part in parts]
    norms = iter(torch._foreach_norm(flat, float("inf"), dtype=torch.float32))
    rows = [list(islice(norms, len(parts))) for parts in matrices]
    most = max(map(len, rows))
    padded = [row[min(i, len(row) - 1)] for row in rows for i in range(most)]  # a part twice changes no maximum
    return torch.stack(padded).view(-1, most).amax(1)
