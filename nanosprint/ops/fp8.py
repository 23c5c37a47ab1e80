"""Products in FP8: half the bytes and up to twice the rate of bf16.

FP8 has two formats. E4M3 has three bits of fraction and ends at 448: activations and weights. E5M2 has two and ends at
57,344: gradients, which spread over more octaves. A tensor is divided by a scale, clamped to the format's range and
rounded; the product is multiplied by both scales:

    q = round(clamp(x / s)),  x ~ q s;    y = (q_x q_w^T) s_x s_w

The clamp is not optional: before torch 2.12 a cast turns what is too large into NaN. Dividing is multiplying by 1 / s,
rounded to fp32, on every device, so that all agree bit for bit on q.

Where scales come from is the caller's affair: constants (`ops.head_loss`), the values at hand, or those of a step ago
(`ops.fp8_mlp`, `ops.fp8_projection`). The relative error of a rounding does not depend on the scale, as long as a value
is neither clamped nor so small that it loses bits: E4M3 leaves 15 octaves for that, E5M2 30.

A product wants the summed axis contiguous in both operands, so an operand of two products exists in two layouts:

    y  = x W^T    sums over D    x8 (T, D)      w8 (V, D)
    dx = g W      sums over V    g8 (T, V)      w8_t (D, V)
    dW = g^T x    sums over T    g8_t (V, T)    x8_t (D, T)

Fast accumulation keeps partial sums in the tensor core's reduced precision: fit for sums over a few thousand numbers,
not over the tokens of a batch or the vocabulary.

Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from nanosprint.kernels import has_triton

_log = logging.getLogger(__name__)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = 448.0  # of E4M3
LEAST = 1e-12  # a maximum counts as this at least, so that no scale is zero
_UNIT = 16  # FP8 products take summed and output axes in multiples of this


def supports_fp8(device: torch.device | str) -> bool:
    """Whether FP8 products run on this device: NVIDIA since Ada and Hopper, or a CPU, which emulates it, slowly."""
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


def scale_of(x: Tensor, headroom: float = 1.0) -> Tensor:
    """The scale, 0-D fp32, with which `headroom` times the largest magnitude of x just fits E4M3."""
    return scale_from(largest(x.detach()), headroom)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in x, 0-D in its dtype, by rows first. NaN if any is.

    Rows' maxima the compiler (torch 2.11) finds in the kernel that makes x, if its rows are those of x: give heads as
    (..., H, K). Of a plain amax it makes a pass over x; or behind a sum over rows it leaves the maxima of all of them,
    589,824 of 98,304 tokens, to a single block.
    """
    return x.abs().amax(dim=-1).amax()


def scale_from(peak: Tensor, headroom: float = 1.0) -> Tensor:
    """The same from the largest magnitude. NaN stays NaN."""
    return peak.float().clamp(min=LEAST) * (headroom / LARGEST)


def has_kernel(x: Tensor) -> bool:
    """Whether x is for the Triton kernels that quantise. A GPU without Triton is logged once."""
    return x.is_cuda and (has_triton() or _without_triton())


def quantize(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in FP8 `dtype` (E4M3 or E5M2), clamped to its range first: the formula. NaN stays NaN."""
    limit = torch.finfo(dtype).max
    inverse = scale.reciprocal() if isinstance(scale, Tensor) else 1 / scale
    return (x.float() * inverse).clamp(-limit, limit).to(dtype)


def quantize_pair(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (R, C) in FP8, plain and transposed (C, R padded with zeros). An x of that dtype already is only transposed."""
    x = x.contiguous()
    if not has_kernel(x):
        q = x if x.dtype == dtype else quantize(x, scale, dtype)
        return q, _turned(q)
    from nanosprint.kernels.fp8 import quantize as kernel

    limit = torch.finfo(dtype).max
    turned = x.new_empty(x.shape[1], padded(x.shape[0]), dtype=dtype)
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


def turn(codes: Tensor) -> Tensor:
    """FP8 codes (R, C) transposed, (C, R up to a multiple of 16), the rest zeros."""
    return quantize_pair(codes, 1.0, codes.dtype)[1]


def _turned(q: Tensor) -> Tensor:
    """q^T, contiguous, its columns padded with zeros to a multiple of 16."""
    rows, cols = q.shape
    turned = torch.zeros(cols, padded(rows), dtype=q.dtype, device=q.device)
    turned[:, :rows] = q.mT
    return turned


def padded(size: Any) -> Any:
    """The multiple of 16 that FP8 products want of a summed axis: `size` or the next."""
    return (size + _UNIT - 1) // _UNIT * _UNIT


@functools.cache
def _warn_without_fp8(device: str) -> None:
    _log.warning("%s has no FP8: products meant for it run in bf16", device)


@functools.cache
def _without_triton() -> bool:
    _log.warning("Triton is not installed: FP8 copies are made by several passes over memory instead of one")
    return False
