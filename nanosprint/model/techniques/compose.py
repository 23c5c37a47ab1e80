"""Dynamically composed attention: every head also reads with a mixture of all heads' local attention maps.

    A(t, j)   = sum_h w1_h(t) p_h(t, j),                   w1 divided by its root mean square over heads
    y_h(t)   <- y_h(t) + w2_h(t) sum_j A(t, j) v_h(j)

p_h are the heads' maps over the last few keys of the document. That is the attention maps of a token multiplied by a
matrix of rank one, w2 w1ᵀ, of the token's own, after the softmax. With w2 = 0 nothing changes. Sources: DCMHA, Xiao et
al. 2024, arXiv:2405.08553; this light form: speedrun record #85.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.ops.attention import Documents, Scale
from nanosprint.ops.compose import composed_read

_EPS = 1e-6


def compose_attention(
    y_BSHK: Tensor,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    w1_BSH: Tensor,
    w2_BSH: Tensor,
    scale: Scale,
    window: int,
    documents: Documents | None = None,
) -> Tensor:
    """y plus the composed maps' reading of v: (B, S, H, K) in y's dtype.

    q, k, v: as the attention that made y had them. For the rest see `composed_read`, which takes w1 normalised.
    """
    wide = torch.promote_types(w1_BSH.dtype, torch.float32)
    w1 = F.rms_norm(w1_BSH.to(wide), (w1_BSH.size(-1),), eps=_EPS).to(w1_BSH.dtype)
    read = composed_read(q_BSHK, k_BSHK, v_BSHK, w1, w2_BSH, scale, window, documents)
    return (y_BSHK + read).to(y_BSHK.dtype)
