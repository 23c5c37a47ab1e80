"""Turn pairs of dimensions by an angle that depends on the position: the arithmetic of rotary positions.

    y_a = x_a * cos + x_b * sin
    y_b = x_b * cos - x_a * sin

A head's dimensions are paired as halves, (a, b) = (i, i + K/2), or as neighbours, (2i, 2i + 1), for i < K/2.

The plain formula is six passes over halves and one that joins them, and as many backward. On a CPU it is one product
over whole heads, cosines given twice, and one multiply-add into each half: at B 32, S 128, 4 heads of 64 on two cores,
fp32 forward, 0.31 ms against 0.67.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Pairs = Literal["halves", "neighbours"]


def rotate(x_BSHK: Tensor, cos_SP: Tensor, sin_SP: Tensor, pairs: Pairs = "halves") -> Tensor:
    """Turn the pairs of dimensions of each head of x (B, S, H, K) by the angle of its token; the dtype is kept.

    x: any float dtype and strides. cos, sin: (S, K/2), cast to x's dtype; they get no gradient on a CPU. On a CPU
    outside torch.compile the gradient can be taken once only. Raises ValueError for tables that do not fit x. Source:
    Su et al. 2021, arXiv:2104.09864, with neighbours as pairs; halves are those of GPT-NeoX.
    """
    expected = (x_BSHK.size(1), x_BSHK.size(3) // 2)
    if x_BSHK.size(3) % 2 or cos_SP.shape != expected or sin_SP.shape != expected:
        raise ValueError(
            f"x {tuple(x_BSHK.shape)} of (rows, tokens, heads, even head size) needs cos and sin of (tokens, half head "
            f"size), got {tuple(cos_SP.shape)} and {tuple(sin_SP.shape)}"
        )
    if x_BSHK.device.type == "cpu" and not torch.compiler.is_compiling():
        return _CpuRotate.apply(x_BSHK, cos_SP, sin_SP, pairs)
    cos, sin = (t[:, None, :].to(x_BSHK.dtype) for t in (cos_SP, sin_SP))
    xa, xb = split_pairs(x_BSHK, pairs)
    turned = xa * cos + xb * sin, xb * cos - xa * sin
    return torch.cat(turned, dim=-1) if pairs == "halves" else torch.stack(turned, dim=-1).flatten(-2)


def split_pairs(x: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """First and second of each pair along the last axis, two views (..., K/2) of x (..., K)."""
    first, second = x.chunk(2, dim=-1) if pairs == "halves" else x.unflatten(-1, (-1, 2)).unbind(-1)
    return first, second


def double(cos_SP: Tensor, sin_SP: Tensor, dtype: torch.dtype, pairs: Pairs = "halves") -> tuple[Tensor, Tensor]:
    """The tables as `turn` wants them: cosines (S, 1, K), each pair's twice, and sines (S, 1, K/2), in `dtype`."""
    cos, sin = cos_SP[:, None].to(dtype), sin_SP[:, None].to(dtype)
    return torch.cat((cos, cos), dim=-1) if pairs == "halves" else cos.repeat_interleave(2, dim=-1), sin


def turn(x_BSHK: Tensor, cos_S1K: Tensor, sin_S1P: Tensor, pairs: Pairs = "halves", *, back: bool = False) -> Tensor:
    """x turned, or turned back: three passes, one over whole heads and one over each half."""
    out = x_BSHK * cos_S1K
    xa, xb = split_pairs(x_BSHK, pairs)
    out_a, out_b = split_pairs(out, pairs)
    sign = -1 if back else 1
    out_a.addcmul_(xb, sin_S1P, value=sign)
    out_b.addcmul_(xa, sin_S1P, value=-sign)
    return out


class _CpuRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHK: Tensor, cos_SP: Tensor, sin_SP: Tensor, pairs: Pairs) -> Tensor:
        cos, sin = double(cos_SP, sin_SP, x_BSHK.dtype, pairs)
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return turn(x_BSHK, cos, sin, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHK: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grad_BSHK, cos, sin, ctx.pairs, back=True), None, None, None
