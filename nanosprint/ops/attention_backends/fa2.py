"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) as PyTorch itself ships it, variable-length, with window and scale.

`torch.nn.attention.varlen` has this signature from 2.12 on and a narrower one before; the ATen operators beneath it
take window and scale in every release that we support, so they are what we call, after a look at their schemas.
"""

import functools

import torch
from torch import Tensor

from nanosprint.ops.attention_backends import varlen
from nanosprint.ops.attention_backends.contract import Attention

_NEEDED = {"cum_seq_q", "max_q", "scale", "window_size_left", "window_size_right"}


def missing() -> str | None:
    """Why this torch cannot do it, or None."""
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            return f"needs aten::{name}, which torch {torch.__version__} has not"
        lacks = _NEEDED - {argument.name for argument in packet.default._schema.arguments}
        if lacks:
            return f"needs {', '.join(sorted(lacks))} in aten::{name}, which torch {torch.__version__} has not"
    return None


@functools.cache
def load() -> Attention:
    """The back end; ImportError says why there is none."""
    reason = missing()
    if reason is not None:
        raise ImportError(reason)
    return varlen.build("fa2", _forward, _backward)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seq_len: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seq_len,
        max_seq_len,
        0.0,  # dropout
        window < 0,  # is_causal: with a window, (window, 0) says it
        False,  # return_debug_mask
        scale=scale,
        window_size_left=window,
        window_size_right=0,
    )
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seq_len: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of a generator that is never used
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        cu_seqlens,
        max_seq_len,
        max_seq_len,
        0.0,
        window < 0,
        no_dropout,
        torch.empty(0, device=q.device),
        scale=scale,
        window_size_left=window,
        window_size_right=0,
    )
    return dq, dk, dv
