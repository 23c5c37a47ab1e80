"""Causal self-attention behind one signature; the backend is chosen when a model is built, never inside forward.

Shape letters: B rows, S tokens of a row, H heads, K head size. Rows never see each other. `window` is the number of
tokens to the left that a query sees besides itself; None means all of them.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class Attention(Protocol):
    """q, k, v: (B, S, H, K), any float dtype; returns (B, S, H, K) of the same dtype."""

    def __call__(self, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: float, window: int | None) -> Tensor: ...


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """(num_queries, num_keys) mask, True where a query may look; the last query stands at the last key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (query - key <= window)


def reference(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: float, window: int | None) -> Tensor:
    """The formula, written out: softmax(scale q kᵀ) v over the visible keys (Vaswani et al. 2017, arXiv:1706.03762).

    Slow and quadratic in memory. Scores and softmax are in fp32 at least.
    """
    compute = torch.promote_types(q_BSHK.dtype, torch.float32)
    scores = torch.einsum("bqhk,bshk->bhqs", q_BSHK.to(compute), k_BSHK.to(compute)) * scale
    mask = visible(q_BSHK.size(1), k_BSHK.size(1), window, q_BSHK.device)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhqs,bshk->bqhk", weights, v_BSHK.to(compute)).to(q_BSHK.dtype)


def sdpa(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: float, window: int | None) -> Tensor:
    """PyTorch's scaled_dot_product_attention: FlashAttention where it exists, on CPU too."""
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BSHK, v_BSHK))
    square = q.size(2) == k.size(2)
    if square and (window is None or window >= k.size(2) - 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    mask = visible(q.size(2), k.size(2), window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def _with_kernel(kernel: SDPBackend) -> Attention:
    def attend(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: float, window: int | None) -> Tensor:
        with sdpa_kernel(kernel):
            return sdpa(q_BSHK, k_BSHK, v_BSHK, scale, window)

    return attend


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "sdpa": sdpa,
    "cudnn": _with_kernel(SDPBackend.CUDNN_ATTENTION),
    "flash": _with_kernel(SDPBackend.FLASH_ATTENTION),
    "reference": reference,
}


def backend(name: str) -> Attention:
    """The attention function called `name`. Raises ValueError for an unknown one."""
    if name not in BACKENDS:
        raise ValueError(f"exec.attention={name!r}: known backends are {', '.join(BACKENDS)}")
    return BACKENDS[name]
