"""PyTorch's scaled_dot_product_attention: the default on CPU, and three names for dense rows on a GPU.

Rows without documents or window go to the fused causal kernel. Otherwise a boolean mask says what is visible. A mask
of S² entries a row would be 2.4 GB for one row of 49,152 tokens, and each entry is worked on; so rows are cut into
chunks (`bands.py`), whose mask is 2 S C.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanosprint.ops.attention_backends.bands import band_mask, chunked, with_chunk_before
from nanosprint.ops.attention_backends.contract import (
    Attention,
    Documents,
    Limit,
    Scale,
    check_inputs,
    first_key,
    on_host,
    reach,
)

_CHUNK_UNIT = 64  # a narrower one would make many tiny products; CUDA copies masks that are no multiple of 8 wide


def sdpa(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    scale: Scale,
    window: Limit | None,
    documents: Documents | None = None,
) -> Tensor:
    """Attention by F.scaled_dot_product_attention; any float dtype, CPU and GPU, fewer queries than keys allowed.

    With documents or a window: 2 S C bytes of mask a row (and, in some kernels, as many floats), C as above, or S² if
    that is less. Limits decide on shapes, so a compiled graph takes them as ints only.
    """
    check_inputs(q_BSHK, k_BSHK, v_BSHK, window, documents)
    scale, window, documents = on_host(scale, window, documents)
    seq_len = k_BSHK.size(1)
    if q_BSHK.size(1) != seq_len:
        return _last_queries(q_BSHK, k_BSHK, v_BSHK, scale, window)
    far = reach(seq_len, window, None if documents is None else int(documents.max_seq_len))
    if documents is None and far == seq_len - 1:
        return _call(q_BSHK, k_BSHK, v_BSHK, scale, None)
    chunk = max(1, -(-far // _CHUNK_UNIT)) * _CHUNK_UNIT
    if 2 * chunk * chunk * -(-seq_len // chunk) >= seq_len * seq_len:
        chunk = seq_len
    return _chunked(q_BSHK, k_BSHK, v_BSHK, scale, window, documents, chunk)


def _call(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """mask: bool, broadcast to (B, H, queries, keys), or None for causal."""
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BSHK, v_BSHK))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return y.transpose(1, 2)


def _last_queries(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scale: float, window: int | None) -> Tensor:
    """Queries that stand at the end of the keys, as in generation from a cache."""
    num_queries, num_keys, device = q_BSHK.size(1), k_BSHK.size(1), q_BSHK.device
    first_Q = first_key(1, num_keys, window, None, device)[0, num_keys - num_queries :]
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    return _call(q_BSHK, k_BSHK, v_BSHK, scale, (first_Q[:, None] <= key) & (key <= query))


def _chunked(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    scale: float,
    window: int | None,
    documents: Documents | None,
    chunk: int,
) -> Tensor:
    """Chunks become rows of `chunk` queries that see 2 `chunk` keys; one chunk a row sees only itself."""
    B, S, H, K = q_BSHK.shape
    mask = band_mask(B, S, window, documents, chunk, q_BSHK.device)
    num_chunks = mask.size(1)
    q, k, v = (chunked(t, chunk) for t in (q_BSHK, k_BSHK, v_BSHK))
    if num_chunks > 1:
        k, v = with_chunk_before(k), with_chunk_before(v)
    mask = mask.expand(B, -1, -1, -1).reshape(B * num_chunks, 1, chunk, -1)
    y = _call(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale, mask)
    return y.reshape(B, num_chunks * chunk, H, K)[:, :S]


def _dense_only(name: str, kernel: SDPBackend) -> Attention:
    """`sdpa` held to one of its kernels, for causal rows and nothing else."""

    def attend(
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        scale: Scale,
        window: Limit | None,
        documents: Documents | None = None,
    ) -> Tensor:
        scale, window, documents = on_host(scale, window, documents)
        if q_BSHK.size(1) != k_BSHK.size(1):  # generation from a cache: a few queries, no matter by which kernel
            return sdpa(q_BSHK, k_BSHK, v_BSHK, scale, window, documents)
        if documents is not None or reach(k_BSHK.size(1), window, None) < k_BSHK.size(1) - 1:
            others = "triton, fa2, fa3, fa4, flex or sdpa"
            raise ValueError(f"exec.attention={name} has no documents and no window: use {others}")
        with sdpa_kernel(kernel):
            return sdpa(q_BSHK, k_BSHK, v_BSHK, scale, None)

    return attend


cudnn = _dense_only("cudnn", SDPBackend.CUDNN_ATTENTION)
flash = _dense_only("flash", SDPBackend.FLASH_ATTENTION)
