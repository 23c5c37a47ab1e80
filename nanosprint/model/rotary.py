"""Rotary positions (Su et al. 2021, arXiv:2104.09864): each pair of dimensions turns by an angle that grows with the
position, so that a query and a key see only their distance.

Dimension i is paired with i + K/2 of a head of size K. With `fraction` below 1 the slowest frequencies stand still
(half-truncated rotary: those heads' dimensions carry no position).
"""

import torch
from torch import Tensor, nn

from nanosprint.config.model import RotarySpec
from nanosprint.ops.rotary import rotate


class Rotary(nn.Module):
    """Tables of cosines and sines for positions 0 .. seq_len - 1, grown when a longer sequence comes."""

    cos_SP: Tensor
    sin_SP: Tensor

    def __init__(self, spec: RotarySpec, head_dim: int, seq_len: int) -> None:
        super().__init__()
        self.spec, self.head_dim = spec, head_dim
        self._fill(seq_len)

    def _fill(self, seq_len: int, device: torch.device | None = None) -> None:
        pairs = self.head_dim // 2
        turning = round(pairs * self.spec.fraction)
        # Half-truncated rotary spreads the frequencies that are left over the whole range, both ends included.
        exponent = torch.arange(turning, dtype=torch.float64) / (
            pairs if self.spec.fraction == 1 else max(1, turning - 1)
        )
        frequency = torch.cat([self.spec.base**-exponent, torch.zeros(pairs - turning, dtype=torch.float64)])
        angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequency)
        device = device or torch.empty(0).device  # honours `with torch.device("meta")`
        self.register_buffer("cos_SP", angle.cos().to(device=device, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_SP", angle.sin().to(device=device, dtype=torch.float32), persistent=False)

    def extend(self, seq_len: int) -> None:
        """Make the tables reach `seq_len` positions. Call it outside compiled code."""
        if seq_len > self.cos_SP.size(0):
            dtype = self.cos_SP.dtype
            self._fill(seq_len, self.cos_SP.device)
            self.cos_SP, self.sin_SP = self.cos_SP.to(dtype), self.sin_SP.to(dtype)

    def forward(self, x_BSHK: Tensor, start: int = 0) -> Tensor:
        """Rotate queries or keys whose first token stands at position `start`; the dtype is kept."""
        return rotate(x_BSHK, *self.tables(start, x_BSHK.size(1)))

    def tables(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (length, K / 2) of the positions from `start` on."""
        return self.cos_SP[start : start + length], self.sin_SP[start : start + length]
