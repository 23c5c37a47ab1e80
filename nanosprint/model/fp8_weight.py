"""E4M3 copies of weights, made anew after every update: see `ops.fp8_copies`."""

import torch
from torch import Tensor, nn

from nanosprint.ops.fp8_copies import Copy
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

    def copy_of(self, parts: tuple[Tensor, ...], factor: Tensor | None = None) -> Copy:
        """What is to be renewed: the copy of `parts`, one above the other, times a 0-D `factor` where there is one."""
        return Copy(parts, self.codes, self.turned, self.scale, factor)
