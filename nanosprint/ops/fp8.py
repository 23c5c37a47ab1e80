"""A linear layer in FP8, for the output head: half the bytes and up to twice the rate of bf16.

FP8 has two formats. E4M3 has three bits of fraction and ends at 448: activations and weights. E5M2 has two and ends at
57,344: gradients, which spread over more octaves. A tensor is divided by a scale, clamped to the format's range and
rounded; the product is multiplied by both scales:

    q = round(clamp(x / s)),  x ~ q s;    y = (q_x q_w^T) s_x s_w

The scales here are static: constants of the recipe, chosen so that nothing that matters is clamped. The clamp is not
optional: before torch 2.12 a cast turns what is too large into NaN. Dividing is multiplying by 1 / s, rounded to fp32,
on every device, so that all agree bit for bit on q.

Tokens T, input dim D, output dim (vocabulary) V. The weight is (V, D), as in nn.Linear. An FP8 product wants the
summed axis contiguous in both operands, so each operand exists in two layouts over forward and backward:

    y  = x W^T    sums over D    x8 (T, D)      w8 (V, D)      e4m3, fast accumulation
    dx = g W      sums over V    g8 (T, V)      w8_t (D, V)    e5m2 x e4m3, precise, bf16
    dW = g^T x    sums over T    g8_t (V, T)    x8_t (D, T)    e5m2 x e4m3, precise, fp32

Fast accumulation keeps partial sums in the tensor core's reduced precision: fit for sums over D, not over T or V.
"""

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

from nanosprint.kernels import has_triton

_log = logging.getLogger(__name__)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_UNIT = 16  # FP8 products take summed and output axes in multiples of this


def supports_fp8(device: torch.device | str) -> bool:
    """Whether `fp8_linear` runs on this device: NVIDIA since Ada and Hopper, or a CPU, which emulates it, slowly."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    return device.type == "cpu"


def has_fp8(device: torch.device | str) -> bool:
    """`supports_fp8`, and where the answer is no, one line in the log. To be called when a model is built."""
    if not supports_fp8(device):
        _warn_without_fp8(str(torch.device(device)))
        return False
    return True


def fp8_linear(
    x: Tensor, weight: Tensor, x_s: float, w_s: float, g_s: float, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x W^T with operands in FP8, differentiable in both.

    x (..., D) and weight (V, D), any float dtype; returns (..., V) in out_dtype (bf16 or fp32). x_s, w_s, g_s: the
    scales of x, of the weight (both E4M3: what exceeds 448 s is clamped to it) and of the gradient that arrives at y
    (E5M2, 57,344 s). The gradient of x leaves the product as bf16, that of the weight as fp32, before autograd casts
    each to its tensor's dtype.

    Copies: x and the weight in FP8, once plain and once transposed (kept for the backward pass, which needs nothing
    else), and the gradient in FP8 likewise, each pair made in one pass over its source (an fp32 source: in two, of
    which the second reads FP8). What is not contiguous is copied first. Under torch.compile the gradient's plain copy
    is ordinary code, which the compiler merges into the loss; a pass over that makes the transposed one.

    Raises ValueError for shapes that do not fit, D or V not a multiple of 16 (T is padded by itself), scales that are
    not positive, and a GPU without FP8 (`has_fp8` tells). Source: Micikevicius et al. 2022,
    arXiv:2209.05433; static scales: the speedrun's records 19-21.
    """
    _check(x, weight, (x_s, w_s, g_s), out_dtype)
    merge = torch.compiler.is_compiling()
    y, _, _ = _forward(x.reshape(-1, x.shape[-1]), weight, x_s, w_s, g_s, out_dtype, merge)
    return y.view(*x.shape[:-1], weight.shape[0])


def quantize(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in FP8 `dtype` (E4M3 or E5M2), clamped to its range first: the formula. NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-limit, limit).to(dtype)


def fp8_linear_grads(
    g: Tensor, x8_t: Tensor, w8_t: Tensor, x_s: float, w_s: float, g_s: float
) -> tuple[Tensor, Tensor]:
    """(dx bf16 (T, D), dW fp32 (V, D)) from the gradient g (T, V) of y, contiguous.

    g: a float dtype, or E5M2 holding g / g_s already, as a fused loss may produce it. x8_t (D, T rounded up to a
    multiple of 16, zeros beyond T) and w8_t (D, V): transposed E4M3 copies, as such or as bytes (uint8).
    """
    return _backward(g, x8_t, w8_t, x_s, w_s, g_s)


@torch.library.custom_op("nanosprint::fp8_linear", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, x_s: float, w_s: float, g_s: float, out_dtype: torch.dtype, merge: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x8_t, w8_t), the last two as bytes: autograd ignores integers. g_s and merge are for backward."""
    if not supports_fp8(x.device):
        raise ValueError(f"{x.device} has no FP8 (Ada and Hopper have): use bf16")
    (x8, x8_t), (w8, w8_t) = quantize_pair(x, x_s, E4M3), quantize_pair(weight, w_s, E4M3)
    y = scaled_product(x8, w8, x_s, w_s, out_dtype, fast=True)
    return y, x8_t.view(torch.uint8), w8_t.view(torch.uint8)


@torch.library.custom_op("nanosprint::fp8_linear_backward", mutates_args=())
def _backward(g: Tensor, x8_t: Tensor, w8_t: Tensor, x_s: float, w_s: float, g_s: float) -> tuple[Tensor, Tensor]:
    g8, g8_t = quantize_pair(g, g_s, E5M2)
    dx = scaled_product(g8, w8_t.view(E4M3), g_s, w_s, torch.bfloat16)
    return dx, scaled_product(g8_t, x8_t.view(E4M3), g_s, x_s, torch.float32)


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, x_s: float, w_s: float, g_s: float, out_dtype: torch.dtype, merge: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (T, D), V = x.shape, weight.shape[0]
    y = x.new_empty(T, V, dtype=out_dtype)
    return y, x.new_empty(D, _padded(T), dtype=torch.uint8), x.new_empty(D, V, dtype=torch.uint8)


@_backward.register_fake
def _(g: Tensor, x8_t: Tensor, w8_t: Tensor, x_s: float, w_s: float, g_s: float) -> tuple[Tensor, Tensor]:
    (T, V), D = g.shape, x8_t.shape[0]
    return g.new_empty(T, D, dtype=torch.bfloat16), g.new_empty(V, D, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.x_s, ctx.w_s, ctx.g_s, _, ctx.merge = inputs[2:]
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 7
    if ctx.merge:
        g = quantize(g, ctx.g_s, E5M2)
    dx, dw = _backward(g.contiguous(), *ctx.saved_tensors, ctx.x_s, ctx.w_s, ctx.g_s)
    return dx, dw, None, None, None, None, None


_forward.register_autograd(_derive, setup_context=_setup_context)


def quantize_pair(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (R, C) in FP8, plain and transposed (C, R padded with zeros). An x of that dtype already is only transposed."""
    x = x.contiguous()
    if not (x.is_cuda and (has_triton() or _without_triton())):
        q = x if x.dtype == dtype else quantize(x, scale, dtype)
        return q, _turned(q)
    from nanosprint.kernels.fp8 import quantize as kernel

    limit = torch.finfo(dtype).max
    turned = x.new_empty(x.shape[1], _padded(x.shape[0]), dtype=dtype)
    plain = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    if plain is not x and x.element_size() == 2:
        kernel(x, plain, turned, 1 / scale, limit)
        return plain, turned
    if plain is not x:  # four bytes: see the kernel about turning those
        kernel(x, plain, None, 1 / scale, limit)
    kernel(plain, None, turned, 1.0, limit)
    return plain, turned


def scaled_product(
    A: Tensor, B: Tensor, a_s: float | Tensor, b_s: float | Tensor, out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """A (M, K) times B (N, K) transposed, times a_s b_s: two FP8 matrices with the summed axis contiguous.

    Scales are numbers or 0-D fp32 tensors, each a tensor of its own: cuBLAS wants them at multiples of 16 bytes, which
    a view into a vector is not. `fast` sums in the tensor core's reduced precision. Off a GPU: an emulation in fp32.
    """
    if not A.is_cuda:
        return ((A.float() @ B.float().mT) * (a_s * b_s)).to(out_dtype)
    scale_a, scale_b = (
        s if isinstance(s, Tensor) else torch.full((), s, dtype=torch.float32, device=A.device) for s in (a_s, b_s)
    )
    return torch._scaled_mm(A, B.mT, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)


def _turned(q: Tensor) -> Tensor:
    """q^T, contiguous, its columns padded with zeros to a multiple of 16."""
    rows, cols = q.shape
    turned = torch.zeros(cols, _padded(rows), dtype=q.dtype, device=q.device)
    turned[:, :rows] = q.mT
    return turned


def _padded(size: Any) -> Any:
    return (size + _UNIT - 1) // _UNIT * _UNIT


def _check(x: Tensor, weight: Tensor, scales: tuple[float, ...], out_dtype: torch.dtype) -> None:
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: expected (..., D) and (V, D)"
        )
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}: expected float tensors")
    if weight.shape[0] % _UNIT or weight.shape[1] % _UNIT:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: FP8 products need both sizes to be multiples of {_UNIT}, so pad "
            "it with zero rows (and mask the logits that they make)"
        )
    if not all(s > 0 and math.isfinite(s) for s in scales):
        raise ValueError(f"scales x_s, w_s, g_s = {scales} must be positive")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype={out_dtype} must be torch.bfloat16 or torch.float32")


@functools.cache
def _warn_without_fp8(device: str) -> None:
    _log.warning("%s has no FP8: products meant for it run in bf16", device)


@functools.cache
def _without_triton() -> bool:
    _log.warning("Triton is not installed: FP8 copies are made by several passes over memory instead of one")
    return False
