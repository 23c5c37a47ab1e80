"""Back end "triton": kernels of our own for packed documents and windows, `nanosprint.kernels.attention`.

They cut tiles from the packed axis, so neither the longest document nor the number of documents costs anything, and the
window is a number that the kernels read: nothing is compiled anew when it changes.
"""

import functools

import torch
from torch import Tensor

from nanosprint.kernels import has_gluon, has_triton, tuning
from nanosprint.ops.attention_backends import varlen
from nanosprint.ops.attention_backends.contract import Attention

HEAD_DIMS = (16, 32, 64, 128)


def missing() -> str | None:
    """Why it cannot be loaded, or None."""
    return None if has_triton() else "needs the package triton: pip install triton"


def refuses_heads(head_dim: int) -> str | None:
    """Why heads of this size do not fit the kernels' blocks, in a clause, or None."""
    known = ", ".join(map(str, HEAD_DIMS))
    return None if head_dim in HEAD_DIMS else f"takes heads of {known}, not {head_dim}"


@functools.cache
def load() -> Attention:
    """The back end; ImportError says why there is none."""
    reason = missing()
    if reason is not None:
        raise ImportError(reason)
    return varlen.build("triton", _forward, _backward)


@functools.cache
def _tiles(device: torch.device) -> tuple[tuning.AttentionTile, tuning.AttentionTile, tuning.AttentionTile]:
    return tuning.attention_tiles(torch.cuda.get_device_capability(device), has_gluon)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seq_len: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    from nanosprint.kernels import attention

    _check(q, scale)
    return attention.forward(q, k, v, cu_seqlens, window, scale, _tiles(q.device)[0])


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
    from nanosprint.kernels import attention

    _, over_queries, over_keys = _tiles(q.device)
    dq, norms = attention.gradient_q(grad, q, k, v, out, lse, cu_seqlens, window, scale, over_queries)
    dk, dv = attention.gradient_kv(grad, q, k, v, norms, cu_seqlens, window, scale, over_keys)
    return dq, dk, dv


def _check(q: Tensor, scale: float) -> None:
    """What the kernels cannot take, and `check_inputs` and `require` let through."""
    if refuses_heads(q.size(2)):
        raise ValueError(f"exec.attention=triton {refuses_heads(q.size(2))}: choose another back end")
    if scale <= 0:
        raise ValueError(f"exec.attention=triton wants a scale above 0, got {scale}: choose another back end")
