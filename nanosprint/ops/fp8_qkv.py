"""The projection of queries, keys and values in FP8 with norm and rotary positions behind it, one node of autograd.

The compiler merges casts into kernels of its own, but not into one that it is given. The gradient of the projection
comes out of such a kernel (`ops.qk_norm_rotary`), so a cast behind it reads 2 bytes of each of its 3 D numbers a token
once more. Here the kernel writes the codes itself, next to the gradient, which the weight's gradient needs. They are
the same, bit for bit: both round to the dtype of the gradient first, then to E5M2.

Where norm and rotary positions are formulas, or the input gradient is not in FP8, the two are one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from nanosprint.ops.fp8_projection import Copies, fp8_projection, input_gradient, product
from nanosprint.ops.qk_norm_rotary import NormRotary, fused, fused_backward, kernel_arguments, qk_norm_rotary


def fp8_qkv(
    x_BSD: Tensor, weight: Tensor, copies: Copies, x_scale: Tensor, g_scale: Tensor, how: NormRotary
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rotary(fp8_projection(x, weight, copies, x_scale, g_scale), *how)`; see both."""
    shape, arguments = torch.Size((*x_BSD.shape[:-1], weight.shape[0])), None
    if copies.turned is not None:
        arguments = kernel_arguments(shape, x_BSD.dtype, x_BSD.device, how)
    if arguments is None:
        return qk_norm_rotary(fp8_projection(x_BSD, weight, copies, x_scale, g_scale), *how)
    q, k, v = _Fp8QKV.apply(x_BSD, weight, *copies, x_scale, g_scale, *arguments)
    return q, k, v


class _Fp8QKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: Tensor,
        weight: Tensor,
        codes: Tensor,
        turned: Tensor,
        w_scale: Tensor,
        x_scale: Tensor,
        g_scale: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        num_heads: int,
        *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = product(x_BSD.flatten(0, 1), codes, x_scale, w_scale).unflatten(0, x_BSD.shape[:2])
        ctx.save_for_backward(x_BSD, qkv, cos_SP, sin_SP, turned, w_scale, g_scale)
        ctx.options, ctx.weight_dtype = options, weight.dtype
        q, k, v = fused(qkv, cos_SP, sin_SP, num_heads, *options)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads_BSHK: Tensor) -> tuple[Tensor | None, ...]:
        x, qkv, cos, sin, turned, w_scale, g_scale = ctx.saved_tensors
        g, g8 = (t.flatten(0, 1) for t in fused_backward(*grads_BSHK, qkv, cos, sin, g_scale, *ctx.options))
        dx = input_gradient(g8, turned, g_scale, w_scale, x.dtype).view(x.shape)
        return dx, (g.mT @ x.flatten(0, 1)).to(ctx.weight_dtype), *(None,) * 12
