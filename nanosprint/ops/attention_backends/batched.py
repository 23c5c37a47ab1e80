"""Attention as two batched matrix products and a softmax: the fastest form for short rows on a CPU.

Scores of all heads exist at once, (B, H, S, S), so this is for rows of a few hundred tokens. Measured on two cores
with bf16 products at B 32, S 128, H 2, K 64, whole blocks forward and backward: 39.5 ms against 60.3 ms with
scaled_dot_product_attention, whose CPU kernel converts bf16 back and forth.
"""

import torch
from torch import Tensor

_HIDDEN = -1e9  # finite, so that no row of the mask can make NaN; exp of it is 0 in every format


def batched(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: float, window: int | None) -> Tensor:
    """softmax(scale q kᵀ + mask) v, in the inputs' dtype throughout; fewer queries than keys stand at the end."""
    B, S, H, K = q_BSHK.shape
    q, k, v = (t.transpose(1, 2).reshape(B * H, t.size(1), K) for t in (q_BSHK, k_BSHK, v_BSHK))
    mask = _mask(S, k.size(1), window, q.dtype, q.device)
    weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(dim=-1)
    return torch.bmm(weights, v).view(B, H, S, K).transpose(1, 2)


def _mask(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(1, num_queries, num_keys): 0 where a query may look, else far below any score."""
    hidden = torch.full((num_queries, num_keys), _HIDDEN, dtype=dtype, device=device)
    mask = hidden.triu(num_keys - num_queries + 1)
    if window is not None:
        mask = mask + hidden.tril(num_keys - num_queries - window - 1)
    return mask[None]
