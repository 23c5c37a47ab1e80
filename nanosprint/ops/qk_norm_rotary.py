"""From the merged projection to queries, keys and values: RMS norm of each query and key, then rotary positions.

One function, because on a CPU the time goes into passes over memory. Here the widening, the split, the merging of the
gradients and the move of heads in front of tokens, which batched products want, ride along with passes that are needed
anyway. Forward and backward of one layer at B 32, S 128, 2 heads of 64, bf16 in and out, one core: 4.6 ms against 8.9
as plain formulas and 5.7 as `rms_norm` and `rotate` one after the other.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanosprint.ops.rms_norm import lengths, norm_backward
from nanosprint.ops.rotary import Pairs, double, rotate, turn


def qk_norm_rotary(
    qkv_BSE: Tensor,
    num_heads: int,
    cos_SP: Tensor,
    sin_SP: Tensor,
    eps: float,
    dtype: torch.dtype,
    pairs: Pairs = "halves",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and turned queries and keys, and values, (B, S, H, K) each and in the dtype of qkv.

    qkv: (B, S, 3 H K), any float dtype and strides: queries, keys and values one after the other. cos, sin: (S, K/2),
    without gradient; see `rotate`. Tables n times as wide turn n heads side by side by angles of their own, which only
    neighbours as pairs allow, and n must divide H. `dtype` is that of norm and rotation, on a CPU widened to fp32 at
    least. Memory of the results is ordered (B, H, S, K) on a CPU outside torch.compile, where the gradient can be taken
    once only. Raises ValueError for sizes that do not fit. Sources: Henry et al. 2020, arXiv:2010.04245; see
    `rms_norm`, `rotate`.
    """
    B, S, E = qkv_BSE.shape
    K = E // (3 * num_heads)
    together = 2 * cos_SP.size(-1) // max(1, K)  # heads that one row of the tables turns
    fits = 3 * num_heads * K == E and cos_SP.shape == sin_SP.shape == (S, together * K // 2)
    if not fits or not together or num_heads % together or (together > 1 and pairs == "halves"):
        raise ValueError(
            f"qkv {tuple(qkv_BSE.shape)} of {num_heads} heads does not fit cos and sin of shapes "
            f"{tuple(cos_SP.shape)} and {tuple(sin_SP.shape)}: they must be (tokens, half head size), or with "
            "neighbours as pairs some heads' side by side"
        )
    if qkv_BSE.device.type == "cpu" and not torch.compiler.is_compiling():
        wide = torch.promote_types(dtype, torch.float32)
        return _CpuQKNormRotary.apply(qkv_BSE, num_heads, cos_SP, sin_SP, eps, wide, pairs)
    qk, v = qkv_BSE.split((2 * num_heads * K, num_heads * K), dim=-1)
    qk = F.rms_norm(qk.view(B, S, 2 * num_heads, K).to(dtype), (K,), eps=eps)
    qk = rotate(qk.view(B, S, -1, together * K), cos_SP, sin_SP, pairs).view(B, S, 2 * num_heads, K)
    q, k = qk.to(qkv_BSE.dtype).chunk(2, dim=2)
    return q, k, v.view(B, S, num_heads, K)


class _CpuQKNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BSE: Tensor,
        H: int,
        cos_SP: Tensor,
        sin_SP: Tensor,
        eps: float,
        dtype: torch.dtype,
        pairs: Pairs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        B, S, E = qkv_BSE.shape
        K = E // (3 * H)
        split = qkv_BSE.view(B, S, 3, H, K)
        x = torch.empty((B, S, 2, H, K), dtype=dtype).copy_(split[:, :, :2])
        scale = lengths(x, eps).reciprocal_().mul_(math.sqrt(K))
        x.mul_(scale)
        cos, sin = double(cos_SP, sin_SP, dtype, pairs)
        ctx.save_for_backward(x, scale, cos, sin)
        ctx.pairs = pairs
        out = torch.empty((3, B, H, S, K), dtype=qkv_BSE.dtype)
        out[:2].copy_(turn(x.view(B, S, -1, cos.size(-1)), cos, sin, pairs).view(x.shape).permute(2, 0, 3, 1, 4))
        out[2].copy_(split[:, :, 2].transpose(1, 2))
        q, k, v = (t.transpose(1, 2) for t in out.unbind(0))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSHK: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, cos, sin = ctx.saved_tensors
        B, S, _, H, K = x.shape
        gq, gk, gv = grads_BSHK
        grad = torch.empty_like(x)
        grad[:, :, 0].copy_(gq)
        grad[:, :, 1].copy_(gk)
        grad = turn(grad.view(B, S, -1, cos.size(-1)), cos, sin, ctx.pairs, back=True).view(x.shape)
        # x is already normed: y = x * s with sum(y^2) = K but for eps, so that the length in the formula is sqrt(K).
        root = math.sqrt(K)
        out = torch.empty((B, S, 3, H, K), dtype=gq.dtype)
        out[:, :, :2].copy_(norm_backward(grad, x, scale.mul(root), torch.full_like(scale, root)))
        out[:, :, 2].copy_(gv)
        return out.view(B, S, 3 * H * K), None, None, None, None, None, None
