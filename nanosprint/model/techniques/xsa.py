"""Exclusive self-attention with a gate: part of what a head says of its own token is taken away.

    y <- y - tanh(g) (y · v) / max(|v|², 1e-8) v          per token and head

v is the token's own value. With g = 0 nothing changes; towards 1 the output keeps only what is at right angles to v,
which the residual stream does not already carry. Sources: arXiv:2603.09078; speedrun records #82 and #86.
"""

import torch
from torch import Tensor

_SMALLEST_SQUARE = 1e-8


def without_own_value(y_BSHK: Tensor, v_BSHK: Tensor, gate_BSH: Tensor) -> Tensor:
    """Outputs (B, S, H, K) less tanh(gate) of their parts along v; in fp32 or wider, rounded to y's dtype once."""
    wide = torch.promote_types(y_BSHK.dtype, torch.float32)
    y, v, gate = y_BSHK.to(wide), v_BSHK.to(wide), gate_BSH.to(wide)
    along = (y * v).sum(-1) / v.square().sum(-1).clamp_min(_SMALLEST_SQUARE)
    return (y - (gate.tanh() * along).unsqueeze(-1) * v).to(y_BSHK.dtype)
