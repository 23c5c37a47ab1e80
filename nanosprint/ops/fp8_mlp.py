"""A squared-ReLU MLP in FP8: its forward products, and where it is asked for two or all of its four backward products.

    post = relu(x W_up^T)^2        x and W_up in E4M3, each by its own scale
    y    = post W_down             post and W_down in E4M3, by scales given beforehand; or in the dtype of x

Gradients are those of the unquantised products (straight through), from x, post and the weights as they are:

    dW_down = post^T g,   dpre = 2 sqrt(post) (g W_down^T),   dW_up = dpre^T x,   dx = dpre W_up

With turned copies of the weights, dpre and dx come from FP8 products too, the gradients in E5M2. g is scaled by its
largest magnitude. dpre is quantised in the same kernel that computes it, before its largest magnitude can be known.
But no sum over the width D exceeds D times the largest terms, so

    |dpre| <= 2 sqrt(max post) D max|g| max|W_down|

is a scale that nothing exceeds, known beforehand, and needs no state. It is generous by some ten octaves, of which
E5M2 has thirty-two: two bits of fraction are left of anything that counts. E4M3, with eighteen, has no such room.

Gradients of the weights sum over tokens. An FP8 product wants both its operands transposed for that, so what makes post
and dpre writes their codes twice, once transposed, and nothing else: post's root comes from its codes. The codes of x
and of g, a quarter as many, are turned by a pass of their own. Sums that long are precise, not "fast".

Otherwise post is all that is kept: its root is relu(pre), and where pre is negative both are zero. T tokens, width D, F
hidden units. The scale of x is that of the whole tensor of a call, unless it is given; so a call with more rows has a
coarser one where rows differ. The order of roundings is the same on a CPU, which emulates the products in fp32.

Quantising x and g is left to the compiler, which merges it into what makes them. The rest is one node each way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanosprint.kernels import tuning
from nanosprint.ops.fp8 import E4M3, E5M2, LARGEST, largest, padded, quantize, scale_of, scaled_product, turn
from nanosprint.ops.linear_relu2 import (
    check_shapes,
    relu2_grad,
    relu2_grad_turned,
    relu2_mlp_grads,
    up_relu2,
    up_relu2_turned,
)

_LARGEST_GRADIENT = 57_344.0  # of E5M2
_LEAST_GRADIENT = (
    1e-30  # what `fp8.LEAST` is for others, of gradients, which a loss averaged over many tokens makes small
)


class Fp8Weights(NamedTuple):
    """E4M3 copies of the weights, as bytes, and 0-D fp32 tensors that say what a code of 1 stands for.

    up (F, D), down (D, F): summed axis last. post_scale: the scale to use for post in this call. `down` is None where
    the second product is not in FP8. x_scale: that of x; None has it measured. up_turned (D, F) and down_turned (F, D):
    the same codes, for a backward pass in FP8; both or neither.
    """

    up: Tensor
    up_scale: Tensor
    down: Tensor | None
    down_scale: Tensor
    post_scale: Tensor
    x_scale: Tensor | None = None
    up_turned: Tensor | None = None
    down_turned: Tensor | None = None


def fp8_mlp(
    x: Tensor, up: Tensor, down: Tensor, copies: Fp8Weights, *, in_out: bool = False, weights: bool = False
) -> tuple[Tensor, Tensor]:
    """(y (..., D), the largest post, 0-D fp32) of x (..., D), up (F, D), down (D, F) or, with `in_out`, (F, D).

    y has the dtype of x and is differentiable in x, up and down. Weights are read in the backward pass, and in the
    forward pass if `copies.down` is None. Values of post beyond 448 scales are clamped, and so are those of x beyond
    448 of a scale that is given. `weights`: gradients of the weights from FP8, too, which takes all of `copies`. Raises
    ValueError for shapes that do not fit, or copies that are missing. Source: the speedrun's records #59, #84, #87 and
    #89, and its pull request 344 for the backward pass; So et al. 2021, arXiv:2109.08668.
    """
    check_shapes(x, up, down, in_out)
    flat = x.reshape(-1, x.shape[-1])
    x_scale = scale_of(flat) if copies.x_scale is None else copies.x_scale
    x8 = quantize(flat.detach(), x_scale, E4M3)
    up8, up_scale, down8, down_scale, post_scale, _, *turned = copies
    if weights:
        if down8 is None or copies.up_turned is None or copies.down_turned is None:
            raise ValueError("gradients of the weights in FP8 need the codes of both weights, turned ones, too")
        y, _, _, _, peaks = _forward_in_codes(
            flat, up, down, x8, x_scale, up8, up_scale, down8, down_scale, post_scale, *turned, in_out
        )
        return y.view(x.shape), peaks.amax()
    y, _, peaks = _forward(flat, up, down, x8, x_scale, up8, up_scale, down8, down_scale, post_scale, *turned, in_out)
    return y.view(x.shape), peaks.amax()


@torch.library.custom_op("nanosprint::fp8_mlp", mutates_args=())
def _forward(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    up8: Tensor,
    up_scale: Tensor,
    down8: Tensor | None,
    down_scale: Tensor,
    post_scale: Tensor,
    up_turned: Tensor | None,
    down_turned: Tensor | None,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, post, maxima of post's parts)."""
    scales, code_scale = (x_scale, up_scale), None if down8 is None else post_scale
    post, post8, peaks = up_relu2(x8.contiguous(), up8.view(E4M3), x.dtype, scales, code_scale, want_peaks=True)
    assert peaks is not None
    if post8 is None or down8 is None:
        return post @ (down if in_out else down.mT).to(x.dtype), post, peaks
    y = scaled_product(post8, down8.view(E4M3), post_scale, down_scale, x.dtype, fast=True)
    return y, post, peaks


@_forward.register_fake
def _(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    up8: Tensor,
    up_scale: Tensor,
    down8: Tensor | None,
    down_scale: Tensor,
    post_scale: Tensor,
    up_turned: Tensor | None,
    down_turned: Tensor | None,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    peaks = x.new_empty(tuning.RELU2_PEAKS, dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], up.shape[0]), peaks


@torch.library.custom_op("nanosprint::fp8_mlp_backward", mutates_args=())
def _backward(
    g: Tensor,
    g8: Tensor,
    g_scale: Tensor,
    x: Tensor,
    post: Tensor,
    up_turned: Tensor,
    up_scale: Tensor,
    down_turned: Tensor,
    down_scale: Tensor,
    pre_scale: Tensor,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, up and down in the dtype of x, those of the weights from what is not quantised.

    g (T, D) and its codes g8; pre_scale: that of dpre.
    """
    d_down = post.mT @ g if in_out else g.mT @ post
    d_pre, d_pre8 = relu2_grad(g8.contiguous(), down_turned.view(E4M3).mT, post, (g_scale, down_scale), pre_scale)
    assert d_pre8 is not None
    dx = scaled_product(d_pre8, up_turned.view(E4M3), pre_scale, up_scale, x.dtype)
    return dx, d_pre.mT @ x, d_down


@_backward.register_fake
def _(
    g: Tensor,
    g8: Tensor,
    g_scale: Tensor,
    x: Tensor,
    post: Tensor,
    up_turned: Tensor,
    up_scale: Tensor,
    down_turned: Tensor,
    down_scale: Tensor,
    pre_scale: Tensor,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (T, D), F = x.shape, post.shape[1]
    return x.new_empty(T, D), x.new_empty(F, D), x.new_empty((F, D) if in_out else (D, F))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, up, down, _, _, _, up_scale, _, down_scale, _, up_turned, down_turned, ctx.in_out = inputs
    _, post, peaks = output
    ctx.save_for_backward(x, post, up, down)
    ctx.in_fp8 = up_turned is not None
    if ctx.in_fp8:
        ctx.save_for_backward(x, post, up, down, peaks, up_turned, up_scale, down_turned, down_scale)
    ctx.mark_non_differentiable(post, peaks)
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 13
    x, post, up, down, *rest = ctx.saved_tensors
    g = g.contiguous()
    if ctx.in_fp8:
        dx, d_up, d_down = _fp8_grads(g, x, post, rest[0], rest[1:], ctx.in_out)
    else:
        dx, d_up, d_down = relu2_mlp_grads(g, x, post, up.to(x.dtype), down.to(x.dtype), ctx.in_out)
    return dx, d_up.to(up.dtype), d_down.to(down.dtype), *(None,) * 10


_forward.register_autograd(_derive, setup_context=_setup_context)


def _fp8_grads(
    g: Tensor, x: Tensor, post: Tensor, peaks: Tensor, copies: Sequence[Tensor], in_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of the gradients, the codes of g, and then the operator."""
    up_turned, up_scale, down_turned, down_scale = copies
    g8, g_scale, pre_scale = _gradient_codes(g, peaks, down_scale)
    return _backward(g, g8, g_scale, x, post, up_turned, up_scale, down_turned, down_scale, pre_scale, in_out)


def _gradient_codes(g: Tensor, peaks: Tensor, down_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes of g (T, D), their scale, that of dpre)."""
    g_scale = largest(g).float().clamp(min=_LEAST_GRADIENT) / _LARGEST_GRADIENT
    g8 = quantize(g, g_scale, E5M2)
    # max|g| is 57,344 of its scale and no code of W_down is larger than 448; dpre's bound is 57,344 of its own.
    bound = 2 * peaks.amax().sqrt() * g.shape[1] * (g_scale * _LARGEST_GRADIENT) * (down_scale * LARGEST)
    return g8, g_scale, bound.clamp(min=_LEAST_GRADIENT) / _LARGEST_GRADIENT


# The same with gradients of the weights in FP8.


@torch.library.custom_op("nanosprint::fp8_mlp_in_codes", mutates_args=())
def _forward_in_codes(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    up8: Tensor,
    up_scale: Tensor,
    down8: Tensor,
    down_scale: Tensor,
    post_scale: Tensor,
    up_turned: Tensor,
    down_turned: Tensor,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, codes of post, the same transposed, their scale, maxima of post's parts).

    The scale is a copy: the caller moves on to the next one before the backward pass.
    """
    scales = (x_scale, up_scale)
    post8, post_turned, peaks = up_relu2_turned(x8.contiguous(), up8.view(E4M3), scales, post_scale)
    y = scaled_product(post8, down8.view(E4M3), post_scale, down_scale, x.dtype, fast=True)
    return y, post8, post_turned, post_scale.clone(), peaks


@_forward_in_codes.register_fake
def _(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    up8: Tensor,
    up_scale: Tensor,
    down8: Tensor,
    down_scale: Tensor,
    post_scale: Tensor,
    up_turned: Tensor,
    down_turned: Tensor,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, F = x.shape[0], up.shape[0]
    post8, post_turned = x.new_empty(T, F, dtype=E4M3), x.new_empty(F, padded(T), dtype=E4M3)
    peaks = x.new_empty(tuning.RELU2_PEAKS, dtype=torch.float32)
    return x.new_empty(x.shape), post8, post_turned, torch.empty_like(post_scale), peaks


@torch.library.custom_op("nanosprint::fp8_mlp_backward_in_codes", mutates_args=())
def _backward_in_codes(
    g8: Tensor,
    g_scale: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    post8: Tensor,
    post_turned: Tensor,
    post_scale: Tensor,
    up_turned: Tensor,
    up_scale: Tensor,
    down_turned: Tensor,
    down_scale: Tensor,
    pre_scale: Tensor,
    dtype: torch.dtype,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, up and down in `dtype`."""
    g8, scales = g8.contiguous(), (g_scale, down_scale)
    d_pre8, d_pre_turned = relu2_grad_turned(g8, down_turned.view(E4M3).mT, post8, post_scale, scales, pre_scale)
    dx = scaled_product(d_pre8, up_turned.view(E4M3), pre_scale, up_scale, dtype)
    d_up = scaled_product(d_pre_turned, turn(x8), pre_scale, x_scale, dtype)
    factors = (post_turned, post_scale), (turn(g8), g_scale)
    (left, left_scale), (right, right_scale) = factors if in_out else factors[::-1]
    return dx, d_up, scaled_product(left, right, left_scale, right_scale, dtype)


@_backward_in_codes.register_fake
def _(
    g8: Tensor,
    g_scale: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    post8: Tensor,
    post_turned: Tensor,
    post_scale: Tensor,
    up_turned: Tensor,
    up_scale: Tensor,
    down_turned: Tensor,
    down_scale: Tensor,
    pre_scale: Tensor,
    dtype: torch.dtype,
    in_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (T, D), F = x8.shape, post8.shape[1]
    shapes = (T, D), (F, D), (F, D) if in_out else (D, F)
    dx, d_up, d_down = (x8.new_empty(shape, dtype=dtype) for shape in shapes)
    return dx, d_up, d_down


def _setup_in_codes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, up, down, x8, x_scale, _, up_scale, _, down_scale, _, up_turned, down_turned, ctx.in_out = inputs
    _, post8, post_turned, post_scale, peaks = output
    kept = x8, x_scale, post8, post_turned, post_scale, up_turned, up_scale, down_turned, down_scale, peaks
    ctx.save_for_backward(*kept)
    ctx.dtypes = up.dtype, down.dtype
    ctx.mark_non_differentiable(post8, post_turned, post_scale, peaks)
    ctx.set_materialize_grads(False)


def _derive_in_codes(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 13
    *kept, peaks = ctx.saved_tensors
    g8, g_scale, pre_scale = _gradient_codes(g, peaks, kept[-1])
    dx, d_up, d_down = _backward_in_codes(g8, g_scale, *kept, pre_scale, g.dtype, ctx.in_out)
    return dx, d_up.to(ctx.dtypes[0]), d_down.to(ctx.dtypes[1]), *(None,) * 10


_forward_in_codes.register_autograd(_derive_in_codes, setup_context=_setup_in_codes)
