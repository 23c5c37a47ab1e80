"""Dynamically composed attention: every head also reads with a mixture of all heads' local attention maps.

    p_h(t, j) = softmax over j of scale q_h(t) · k_h(j),   0 <= t - j < window, in the token's document
    A(t, j)   = sum_h w1_h(t) p_h(t, j),                   w1 divided by its root mean square over heads
    y_h(t)   <- y_h(t) + w2_h(t) sum_j A(t, j) v_h(j)

That is the attention maps of a token multiplied by a matrix of rank one, w2 w1ᵀ, of the token's own, after the softmax.
With w2 = 0 nothing changes. The maps are those of a narrow window of their own, so that all heads' fit beside each
other. Sources: DCMHA, Xiao et al. 2024, arXiv:2405.08553; this light form: speedrun record #85.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.ops.attention import Documents
from nanosprint.ops.attention_backends.bands import band_mask, chunked, with_chunk_before

_EPS = 1e-6
_CHUNK_UNIT = 16  # products on a GPU want sizes that are multiples of it


def compose_attention(
    y_BSHK: Tensor,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    w1_BSH: Tensor,
    w2_BSH: Tensor,
    scale: float,
    window: int,
    documents: Documents | None = None,
) -> Tensor:
    """y plus the composed maps' reading of v: (B, S, H, K) in y's dtype.

    q, k, v: as the attention that made y had them; with fewer queries than keys, the queries stand at the end and
    `documents` must be None. w1, w2: (B, S, H). `window` counts keys, the token itself included, and is at least 1.
    Scores, softmax and A are in fp32 at least; A is rounded to v's dtype for its product with the values.

    Memory: 2 C H scores a token, C the window rounded up to a multiple of 16, and each key and value twice; for 49,152
    tokens of 6 heads and a window of 112 that is 0.26 GB a tensor of scores. Raises ValueError for a window below 1.
    """
    if window < 1:
        raise ValueError(f"composed attention with window={window}: it counts the token itself and is at least 1")
    S = q_BSHK.size(1)
    if k_BSHK.size(1) > S:
        assert documents is None, "with a cache there are no documents"
        return _last_queries(y_BSHK, q_BSHK, k_BSHK, v_BSHK, w1_BSH, w2_BSH, scale, window)
    wide = torch.promote_types(y_BSHK.dtype, torch.float32)
    w1 = F.rms_norm(w1_BSH.to(wide), (w1_BSH.size(-1),), eps=_EPS).to(w1_BSH.dtype)
    chunk = min(-(-window // _CHUNK_UNIT) * _CHUNK_UNIT, S)
    mask = band_mask(q_BSHK.size(0), S, window - 1, documents, chunk, q_BSHK.device)
    q, k, v, w1 = (chunked(t, chunk) for t in (q_BSHK, k_BSHK, v_BSHK, w1))
    if mask.size(1) > 1:
        k, v = with_chunk_before(k), with_chunk_before(v)
    scores = torch.einsum("bnqhk,bnshk->bnhqs", q.to(wide), k.to(wide)) * scale
    maps = scores.masked_fill(~mask.unsqueeze(2), float("-inf")).softmax(-1)
    mixed = (w1.to(wide).transpose(-1, -2).unsqueeze(-1) * maps).sum(2)
    # One map for all heads: their values lie side by side and are read by one product.
    read = (mixed.to(v.dtype) @ v.flatten(-2)).flatten(1, 2)[:, :S].view(y_BSHK.shape)
    return (y_BSHK.to(wide) + w2_BSH.to(wide).unsqueeze(-1) * read.to(wide)).to(y_BSHK.dtype)


def _last_queries(
    y_BSHK: Tensor,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    w1_BSH: Tensor,
    w2_BSH: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """As in generation from a cache: the keys in sight, and in front of the queries as many empty ones."""
    S = q_BSHK.size(1)
    sight = min(k_BSHK.size(1), S + window - 1)
    y, q, w1, w2 = (F.pad(t, (0, 0) * (t.ndim - 2) + (sight - S, 0)) for t in (y_BSHK, q_BSHK, w1_BSH, w2_BSH))
    k, v = k_BSHK[:, -sight:], v_BSHK[:, -sight:]
    return compose_attention(y, q, k, v, w1, w2, scale, window)[:, -S:]
