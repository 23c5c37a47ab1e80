"""A linear layer whose forward product and input gradient are in FP8, its weight gradient in the dtype of x.

    y  = x W^T       x, W in E4M3, fast accumulation
    dx = g W         g in E5M2, W in E4M3, fast accumulation; or in the dtype of x
    dW = g^T x       in the dtype of x, from x and g as they are: in FP8 both would have to be turned, which costs more
                     than the product gains

Every scale is known before the tensor that it divides. So each cast is an ordinary formula that the compiler appends
to whatever makes the tensor: one byte more is written per element, and nothing is read again. A scale measured on the
tensor itself would need all of it first: for g of 3 D a token, 6 D bytes read for the maximum and 9 D for the cast,
against 3 D. At 393,216 tokens, D = 768 and 4.3 TB/s the difference is 0.8 ms, of 0.9 that the product gains. Where g
comes out of a kernel that the compiler cannot append to, `ops.fp8_qkv` has that kernel write the codes.

Tokens T, input width D, output width E. The order of roundings is the same on a CPU, which emulates products in fp32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanosprint.ops.fp8 import E4M3, E5M2, quantize, scaled_product


class Copies(NamedTuple):
    """E4M3 copies of the weight, as bytes: codes (E, D), turned (D, E) or None; scale, 0-D fp32, is what 1 stands for.

    Without `turned` the input gradient is not in FP8.
    """

    codes: Tensor
    turned: Tensor | None
    scale: Tensor


def fp8_projection(x: Tensor, weight: Tensor, copies: Copies, x_scale: Tensor, g_scale: Tensor) -> Tensor:
    """x (..., D) times weight (E, D), transposed, in the dtype of x; differentiable in both.

    y is made from the copies alone. `weight` says where the gradient goes, which is that of the unquantised product
    (straight through): a weight that is itself a product or a concatenation passes it on to its factors. Its values
    are read only where `copies.turned` is None. x_scale, g_scale: 0-D fp32 tensors, what a code of 1 stands for in x
    (clamped at 448) and in the gradient of y (clamped at 57,344). D and E: multiples of 16.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; delayed and static scales: the speedrun's records #19, #84.
    """
    y: Tensor = _Fp8Projection.apply(x.reshape(-1, x.shape[-1]), weight, *copies, x_scale, g_scale)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Fp8Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        codes: Tensor,
        turned: Tensor | None,
        w_scale: Tensor,
        x_scale: Tensor,
        g_scale: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight if turned is None else turned, w_scale, g_scale)
        ctx.in_fp8, ctx.weight_dtype = turned is not None, weight.dtype
        return product(x, codes, x_scale, w_scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w_scale, g_scale = ctx.saved_tensors
        g = g.contiguous()
        if ctx.in_fp8:
            dx = input_gradient(quantize(g, g_scale, E5M2), weight, g_scale, w_scale, x.dtype)
        else:
            dx = g @ weight.to(x.dtype)
        return dx, (g.mT @ x).to(ctx.weight_dtype), *(None,) * 5


def product(x: Tensor, codes: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """y (T, E) of x (T, D), in its dtype: bf16, as the products leave FP8; wider where a run computes wider."""
    return scaled_product(quantize(x, x_scale, E4M3), codes.view(E4M3), x_scale, w_scale, x.dtype, fast=True)


def input_gradient(g8: Tensor, turned: Tensor, g_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """dx (T, D) in `dtype` of the codes (T, E) of g and the turned ones of the weight."""
    return scaled_product(g8, turned.view(E4M3), g_scale, w_scale, dtype, fast=True)
