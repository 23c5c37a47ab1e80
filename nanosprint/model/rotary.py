"""Rotary positions (Su et al. 2021, arXiv:2104.09864): each pair of dimensions turns by an angle that grows with the
position, so that a query and a key see only their distance.

A pair is dimensions i and i + K/2 of a head of size K, or 2i and 2i + 1. With `fraction` below 1 the slowest
frequencies stand still (half-truncated rotary: those dimensions carry no position). Positions count from the start of
a row, whatever documents it holds.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from nanosprint.config.model import RotarySpec
from nanosprint.ops.rotary import rotate

# Of Peng et al. 2023: frequencies that turn less than once in the old window are stretched with it, those that turn
# more than 32 times are left alone.
_SLOW_TURNS, _FAST_TURNS = 1, 32
_SCALE_GROWTH = 0.2  # of the softmax scale; YaRN has 0.1


def turning_pairs(spec: RotarySpec, head_dim: int) -> int:
    """How many of a head's pairs turn: the first ones."""
    return round(head_dim // 2 * spec.fraction)


def frequencies(spec: RotarySpec, head_dim: int) -> Tensor:
    """Angle per position of each of a head's pairs, (head_dim / 2,) float64, in radians."""
    pairs, turning = head_dim // 2, turning_pairs(spec, head_dim)
    # Half-truncated rotary spreads the frequencies that are left over the whole range, both ends included.
    steps = pairs if spec.fraction == 1 else max(1, turning - 1)
    pair = torch.arange(pairs, dtype=torch.float64, device="cpu")
    return torch.where(pair < turning, spec.base ** -(pair / steps), 0.0)


def extended(frequency_P: Tensor, windows: tuple[int, ...]) -> tuple[Tensor, float]:
    """Frequencies after the window took these values (tokens) one after the other, and the softmax scale's factor.

        r = W_old f / 2 pi,  q = clamp((r - 1) / 31, 0, 1)
        f <- f (W_old / W_new + q (1 - W_old / W_new)),  factor <- factor (1 + 0.2 ln(W_new / W_old))

    Each change starts from the frequencies that the one before left. Source: YaRN, Peng et al. 2023, arXiv:2309.00071;
    for windows, speedrun record #31. Raises ValueError for a window below 1.
    """
    if any(window < 1 for window in windows):
        raise ValueError(f"rotary windows {windows} must be at least 1 token each")
    factor = 1.0
    for old, new in pairwise(windows):
        turns = old * frequency_P / (2 * math.pi)
        kept = ((turns - _SLOW_TURNS) / (_FAST_TURNS - _SLOW_TURNS)).clamp(0, 1)
        frequency_P = frequency_P * (old / new + kept * (1 - old / new))
        factor *= 1 + _SCALE_GROWTH * math.log(new / old)
    return frequency_P, factor


class Rotary(nn.Module):
    """Tables of cosines and sines, in fp32, or in fp64 where the model is, grown when a longer sequence comes.

    They hold `places` positions a token, 2 where some layers' heads alternate between positions 2t and 2t + 1.
    """

    cos_SP: Tensor
    sin_SP: Tensor

    def __init__(self, spec: RotarySpec, head_dim: int, seq_len: int, places: int = 1) -> None:
        super().__init__()
        self.spec, self.head_dim, self.places = spec, head_dim, places
        self.turning = turning_pairs(spec, head_dim)
        self._windows: tuple[int, ...] = ()
        device = torch.empty(0).device  # honours `with torch.device("meta")`
        for name in ("cos_SP", "sin_SP"):
            self.register_buffer(name, torch.empty(seq_len * places, head_dim // 2, device=device), persistent=False)
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        """Write the tables where they stand, from angles in fp64."""
        if self.cos_SP.is_meta:
            return
        # A quarter of a million positions take a second on a CPU. Some other devices have no fp64.
        device = self.cos_SP.device if self.cos_SP.is_cuda else torch.device("cpu")
        frequency, _ = extended(frequencies(self.spec, self.head_dim), self._windows)
        position = torch.arange(self.cos_SP.size(0), dtype=torch.float64, device=device)
        angle = torch.outer(position, frequency.to(device))
        self.cos_SP.copy_(angle.cos())
        self.sin_SP.copy_(angle.sin())

    def _apply(self, fn, recurse=True):
        """To another device or dtype: never narrower than fp32, and as exact as that dtype allows."""
        before = self.cos_SP
        super()._apply(fn, recurse)
        if self.cos_SP is not before:  # every layer holds this module and passes the call on
            dtype = torch.promote_types(self.cos_SP.dtype, torch.float32)
            self.cos_SP, self.sin_SP = self.cos_SP.to(dtype), self.sin_SP.to(dtype)
            self._fill()
        return self

    def extend(self, seq_len: int) -> None:
        """Make the tables reach `seq_len` tokens. Call it outside compiled code."""
        rows = seq_len * self.places
        if rows > self.cos_SP.size(0):
            self.cos_SP, self.sin_SP = (t.new_empty(rows, t.size(1)) for t in (self.cos_SP, self.sin_SP))
            self._fill()

    def set_windows(self, windows: tuple[int, ...]) -> float:
        """Follow the long window through the values it has had, in tokens; returns the softmax scale's factor.

        The tables are rewritten where they stand, so that compiled code that holds them sees the new ones. From scratch
        each time: the same windows give the same tables. Call it outside compiled code. Raises ValueError where the
        recipe has no model.rotary.yarn.
        """
        if len(windows) > 1 and not self.spec.yarn:
            raise ValueError(f"rotary positions follow windows {windows} with model.rotary.yarn=true only")
        _, factor = extended(frequencies(self.spec, self.head_dim), windows)
        if windows != self._windows:
            self._windows = windows
            self._fill()
        return factor

    def forward(self, x_BSHK: Tensor, start: int = 0, places: int = 1) -> Tensor:
        """Rotate queries or keys whose first token stands at position `start`; the dtype is kept. See `tables`."""
        B, S, H, K = x_BSHK.shape
        x = x_BSHK.reshape(B, S, H // places, places * K)
        return rotate(x, *self.tables(start, S, places), self.spec.pairs).view(B, S, H, K)

    def tables(self, start: int, length: int, places: int = 1) -> tuple[Tensor, Tensor]:
        """Cosines and sines (length, places * K / 2) of the tokens from `start` on.

        With `places` n, token t's row holds positions n t .. n t + n - 1 side by side, for n heads in turn. Raises
        ValueError for tokens beyond the tables.
        """
        rows = slice(start * places, (start + length) * places)
        if rows.stop > self.cos_SP.size(0):  # the half of what two places need would look like all that one needs
            raise ValueError(
                f"rotary positions end at {self.cos_SP.size(0)} and token {start + length} needs {rows.stop}: call "
                "extend() with the longest row first"
            )
        return self.cos_SP[rows].view(length, -1), self.sin_SP[rows].view(length, -1)
