"""A squared-ReLU MLP whose forward products are in FP8 and whose backward pass is in the dtype of x.

    post = relu(x W_up^T)^2        x and W_up in E4M3, each by its own scale
    y    = post W_down             post and W_down in E4M3, by scales given beforehand; or in the dtype of x

Gradients are those of the unquantised products (straight through), from x, post and the weights as they are:

    dW_down = post^T g,   dpre = 2 sqrt(post) (g W_down^T),   dW_up = dpre^T x,   dx = dpre W_up

post is all that is kept: its root is relu(pre), and where pre is negative both are zero. T tokens, width D, F hidden
units. The scale of x is that of the whole tensor of a call, so a call with more rows has a coarser one where rows
differ. The order of roundings is the same on a CPU, which emulates the products in fp32.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.ops.fp8 import E4M3, scaled_product

LARGEST = 448.0  # of E4M3
_LEAST = 1e-12  # a maximum counts as this at least, so that no scale is zero


class Fp8Weights(NamedTuple):
    """E4M3 copies of the weights, as bytes, and 0-D fp32 tensors that say what a code of 1 stands for.

    up (F, D), down (D, F): summed axis last. post_scale: the scale to use for post in this call. `down` is None where
    the second product is not in FP8.
    """

    up: Tensor
    up_scale: Tensor
    down: Tensor | None
    down_scale: Tensor
    post_scale: Tensor


def fp8_mlp(x: Tensor, up: Tensor, down: Tensor, copies: Fp8Weights, *, in_out: bool = False) -> tuple[Tensor, Tensor]:
    """(y (..., D), the largest post, 0-D fp32) of x (..., D), up (F, D), down (D, F) or, with `in_out`, (F, D).

    y has the dtype of x and is differentiable in x, up and down. Weights are read in the backward pass, and in the
    forward pass if `copies.down` is None. Values of post beyond 448 scales are clamped. Source: the speedrun's records
    #59, #84, #87 and #89; So et al. 2021, arXiv:2109.08668.
    """
    flat = x.reshape(-1, x.shape[-1])
    y, peak = _Fp8MLP.apply(flat, up, down, in_out, *copies)
    return y.view(x.shape), peak


def scale_of(x: Tensor, headroom: float = 1.0) -> Tensor:
    """The scale, 0-D fp32, with which `headroom` times the largest magnitude of x just fits E4M3."""
    return scale_from(x.detach().abs().amax(), headroom)


def scale_from(peak: Tensor, headroom: float = 1.0) -> Tensor:
    """The same from the largest magnitude. NaN stays NaN."""
    return peak.float().clamp(min=_LEAST) * (headroom / LARGEST)


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in E4M3, clamped to its range first."""
    return (x.float() * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(E4M3)


class _Fp8MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        down: Tensor,
        in_out: bool,
        up8: Tensor,
        up_scale: Tensor,
        down8: Tensor | None,
        down_scale: Tensor,
        post_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x_scale = scale_of(x)
        # bf16, as the products leave FP8; wider where a run computes wider
        pre = scaled_product(to_e4m3(x, x_scale), up8.view(E4M3), x_scale, up_scale, x.dtype, fast=True)
        post = F.relu(pre).square()
        if down8 is None:
            y = post @ (down if in_out else down.mT).to(x.dtype)
        else:
            post8 = to_e4m3(post, post_scale)
            y = scaled_product(post8, down8.view(E4M3), post_scale, down_scale, x.dtype, fast=True)
        ctx.save_for_backward(x, post, up, down)
        ctx.in_out = in_out
        peak = post.amax().float()
        ctx.mark_non_differentiable(peak)
        return y, peak

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, post, up, down = ctx.saved_tensors
        g = g.contiguous()
        down_FD = (down if ctx.in_out else down.mT).to(x.dtype)
        grad_down = post.mT @ g if ctx.in_out else g.mT @ post
        grad_pre = 2 * post.sqrt() * (g @ down_FD.mT)
        return (
            grad_pre @ up.to(x.dtype),
            (grad_pre.mT @ x).to(up.dtype),
            grad_down.to(down.dtype),
            *(None,) * 6,
        )
