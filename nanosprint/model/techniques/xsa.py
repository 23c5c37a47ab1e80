"""Exclusive self-attention with a gate: part of what a head says of its own token is taken away.

    y <- y - tanh(g) (y · v) / max(|v|², 1e-8) v          per token and head

v is the token's own value. With g = 0 nothing changes; towards 1 the output keeps only what is at right angles to v,
which the residual stream does not already carry. Sources: arXiv:2603.09078; speedrun records #82 and #86.
"""

from typing import Any

import torch
from torch import Tensor

_SMALLEST_SQUARE = 1e-8


def without_own_value(y_BSHK: Tensor, v_BSHK: Tensor, gate_BSH: Tensor) -> Tensor:
    """Outputs (B, S, H, K) less tanh(gate) of their parts along v; in fp32 or wider, rounded to y's dtype once."""
    out: Tensor = _WithoutOwnValue.apply(y_BSHK, v_BSHK, gate_BSH)
    return out


class _WithoutOwnValue(torch.autograd.Function):
    """The gradients written out, so that y and v are kept as they are, which attention does anyway.

    A compiler that derives them keeps v in fp32: four bytes a number written, and read by each of two kernels, in place
    of two read. With share = tanh(gate), along = (y · v) / |v|² and k = -share (dz · v) / |v|²:

        dy = dz + k v,   dv = -share along dz + k y - 2 k along v,   dgate = -(1 - share²) along (dz · v)
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        square = v.to(wide).square().sum(-1).clamp_min(_SMALLEST_SQUARE)
        along = (y.to(wide) * v.to(wide)).sum(-1) / square
        ctx.save_for_backward(y, v, gate, along, square)
        z = y.to(wide) - (gate.to(wide).tanh() * along).unsqueeze(-1) * v.to(wide)
        return z if z.dtype == y.dtype else z.to(y.dtype)  # no cast to its own dtype at the end: see docs/traps.md

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, v, gate, along, square = ctx.saved_tensors
        wide = along.dtype
        share, minus_dz_v = gate.to(wide).tanh(), -(dz.to(wide) * v).sum(-1)
        k = share * minus_dz_v / square
        # y and v are in their own dtype here, and the factors wide: an operand cast by itself would be kept wide.
        dy = dz + k.unsqueeze(-1) * v
        by_length = torch.where(square > _SMALLEST_SQUARE, 2 * k * along, 0.0)
        dv = k.unsqueeze(-1) * y - (share * along).unsqueeze(-1) * dz - by_length.unsqueeze(-1) * v
        return dy.to(y.dtype), dv.to(v.dtype), ((1 - share.square()) * along * minus_dz_v).to(gate.dtype)
