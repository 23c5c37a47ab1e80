"""From the merged projection to queries, keys and values: RMS norm of each query and key, then rotary positions.

One function, because on a CPU the time goes into passes over memory. Here the widening, the split, the merging of the
gradients and the move of heads in front of tokens, which batched products want, ride along with passes that are needed
anyway. Forward and backward of one layer at B 32, S 128, 2 heads of 64, bf16 in and out, one core: 4.6 ms against 8.9
as plain formulas and 5.7 as `rms_norm` and `rotate` one after the other.

On a GPU one Triton kernel does it all in either direction. What the compiler makes of the formulas took 65 ms of a
627 ms step of the record on an H200, whose copy rate allows 20: neighbours as pairs cost it passes of their own. The
compiler cannot append to that kernel, so it quantises the gradient, too, where `ops.fp8_qkv` asks for it.
"""

import functools
import logging
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanosprint.kernels import has_triton
from nanosprint.ops.fp8 import E5M2
from nanosprint.ops.key_offset import offset_keys
from nanosprint.ops.rms_norm import lengths, norm_backward
from nanosprint.ops.rotary import Pairs, double, rotate, turn
from nanosprint.ops.tracing import constant_in_graphs

_log = logging.getLogger(__name__)
_HEADS = (16, 32, 64, 128, 256)  # sizes that the kernel takes
Ranges = tuple[tuple[int, int], ...]


class NormRotary(NamedTuple):
    """What `qk_norm_rotary` is told behind the projection; see there."""

    num_heads: int
    cos_SP: Tensor
    sin_SP: Tensor
    eps: float
    dtype: torch.dtype
    pairs: Pairs = "halves"
    key_offset: Ranges = ()
    turning: int | None = None


def qk_norm_rotary(
    qkv_BSE: Tensor,
    num_heads: int,
    cos_SP: Tensor,
    sin_SP: Tensor,
    eps: float,
    dtype: torch.dtype,
    pairs: Pairs = "halves",
    key_offset: Ranges = (),
    turning: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and turned queries and keys, and values, (B, S, H, K) each and in the dtype of qkv.

    qkv: (B, S, 3 H K), any float dtype and strides: queries, keys and values one after the other. cos, sin: (S, K/2),
    without gradient; see `rotate`. Tables n times as wide turn n heads side by side by angles of their own, which only
    neighbours as pairs allow, and n must divide H. `dtype` is that of norm and rotation: on a CPU widened to fp32 at
    least, in the GPU's kernel fp32 always. key_offset: ranges of dimensions of a key that come from the token before;
    see `offset_keys`. turning: the pairs of a head from this number on have angles of zero, as the tables say, too;
    None: nobody knows. Memory of the results is ordered (B, H, S, K) on a CPU outside torch.compile, where the gradient
    can be taken once only. Raises ValueError for sizes that do not fit. Sources: Henry et al. 2020, arXiv:2010.04245;
    see `rms_norm`, `rotate`, `offset_keys`.
    """
    how = NormRotary(num_heads, cos_SP, sin_SP, eps, dtype, pairs, key_offset, turning)
    arguments = kernel_arguments(qkv_BSE.shape, qkv_BSE.dtype, qkv_BSE.device, how)
    if arguments is not None:
        return fused(qkv_BSE.contiguous(), *arguments)
    q, k, v = _plain(qkv_BSE, num_heads, cos_SP, sin_SP, eps, dtype, pairs)
    return q, offset_keys(k, key_offset) if key_offset else k, v


def kernel_arguments(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, how: NormRotary
) -> tuple[Any, ...] | None:
    """Those of `fused` behind a projection like this, None where formulas serve. ValueError for what does not fit."""
    num_heads, cos_SP, sin_SP, eps, _, pairs, key_offset, turning = how
    S, E = shape[1:]
    K = E // (3 * num_heads)
    together = 2 * cos_SP.size(-1) // max(1, K)  # heads that one row of the tables turns
    fits = 3 * num_heads * K == E and cos_SP.shape == sin_SP.shape == (S, together * K // 2)
    if not fits or not together or num_heads % together or (together > 1 and pairs == "halves"):
        raise ValueError(
            f"qkv {tuple(shape)} of {num_heads} heads does not fit cos and sin of shapes "
            f"{tuple(cos_SP.shape)} and {tuple(sin_SP.shape)}: they must be (tokens, half head size), or with "
            "neighbours as pairs some heads' side by side"
        )
    if device.type != "cuda" or not _kernel_serves(dtype, K, len(key_offset)):
        return None
    ranges = [bound for bounds in key_offset for bound in bounds]
    turning = K // 2 if turning is None else turning
    return cos_SP.contiguous(), sin_SP.contiguous(), num_heads, turning, eps, pairs == "neighbours", ranges


def _plain(
    qkv_BSE: Tensor, num_heads: int, cos_SP: Tensor, sin_SP: Tensor, eps: float, dtype: torch.dtype, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything but the key offset, from formulas."""
    if qkv_BSE.device.type == "cpu" and not torch.compiler.is_compiling():
        wide = torch.promote_types(dtype, torch.float32)
        return _CpuQKNormRotary.apply(qkv_BSE, num_heads, cos_SP, sin_SP, eps, wide, pairs)
    B, S, E = qkv_BSE.shape
    K = E // (3 * num_heads)
    together = 2 * cos_SP.size(-1) // K
    qk, v = qkv_BSE.split((2 * num_heads * K, num_heads * K), dim=-1)
    qk = F.rms_norm(qk.view(B, S, 2 * num_heads, K).to(dtype), (K,), eps=eps)
    qk = rotate(qk.view(B, S, -1, together * K), cos_SP, sin_SP, pairs).view(B, S, 2 * num_heads, K)
    q, k = qk.to(qkv_BSE.dtype).chunk(2, dim=2)
    return q, k, v.view(B, S, num_heads, K)


@constant_in_graphs
def _kernel_serves(dtype: torch.dtype, head_dim: int, num_ranges: int) -> bool:
    """Whether the Triton kernel can take this on a CUDA device. Each reason why not is logged once."""
    reason = None
    if not has_triton():
        reason = "Triton is not installed"
    elif dtype == torch.float64:
        reason = "the kernel computes in fp32, which is too narrow for fp64"
    elif head_dim not in _HEADS:
        reason = f"the kernel takes heads of {', '.join(map(str, _HEADS))}, not {head_dim}"
    elif num_ranges > 2:
        reason = f"the kernel takes two ranges of model.layers.N.mixer.key_offset, not {num_ranges}"
    if reason is not None:
        _tell(reason)
    return reason is None


@functools.cache
def _tell(reason: str) -> None:
    _log.warning("norm and rotary positions take several passes over queries and keys: %s", reason)


@torch.library.custom_op("nanosprint::qk_norm_rotary", mutates_args=(), device_types="cuda")
def fused(
    qkv_BSE: Tensor,
    cos_SP: Tensor,
    sin_SP: Tensor,
    num_heads: int,
    turning: int,
    eps: float,
    neighbours: bool,
    key_offset: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel as an operator; all contiguous. key_offset: starts and stops in turn."""
    from nanosprint.kernels import qk_norm_rotary as kernels

    B, S, E = qkv_BSE.shape
    q, k, v = (qkv_BSE.new_empty(B, S, num_heads, E // (3 * num_heads)) for _ in range(3))
    options = _options(turning, eps, neighbours, key_offset)
    kernels.forward(qkv_BSE, cos_SP, sin_SP, (q, k, v), **options)
    return q, k, v


@torch.library.custom_op("nanosprint::qk_norm_rotary_backward", mutates_args=(), device_types="cuda")
def fused_backward(
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    qkv_BSE: Tensor,
    cos_SP: Tensor,
    sin_SP: Tensor,
    code_scale: Tensor | None,
    turning: int,
    eps: float,
    neighbours: bool,
    key_offset: list[int],
) -> list[Tensor]:
    """The gradient of qkv and, where there is a `code_scale`, its E5M2 codes: `quantize` of the rounded gradient."""
    from nanosprint.kernels import qk_norm_rotary as kernels

    out = _gradient_and_codes(qkv_BSE, code_scale)
    grads, codes = (gq.contiguous(), gk.contiguous(), gv.contiguous()), out[1] if len(out) > 1 else None
    options = _options(turning, eps, neighbours, key_offset)
    kernels.backward(grads, qkv_BSE, cos_SP, sin_SP, out[0], codes, code_scale, **options)
    return out


def _gradient_and_codes(qkv_BSE: Tensor, code_scale: Tensor | None) -> list[Tensor]:
    """Room for what `fused_backward` writes."""
    gradient = torch.empty_like(qkv_BSE)
    return [gradient] if code_scale is None else [gradient, torch.empty_like(qkv_BSE, dtype=E5M2)]


def _options(turning: int, eps: float, neighbours: bool, key_offset: list[int]) -> dict[str, Any]:
    ranges = tuple(zip(key_offset[::2], key_offset[1::2], strict=True))
    return {"turning": turning, "eps": eps, "neighbours": neighbours, "key_offset": ranges}


@fused.register_fake
def _(qkv_BSE: Tensor, cos_SP: Tensor, sin_SP: Tensor, num_heads: int, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    B, S, E = qkv_BSE.shape
    q, k, v = (qkv_BSE.new_empty(B, S, num_heads, E // (3 * num_heads)) for _ in range(3))
    return q, k, v


@fused_backward.register_fake
def _(
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    qkv_BSE: Tensor,
    cos_SP: Tensor,
    sin_SP: Tensor,
    code_scale: Tensor | None,
    *_: object,
) -> list[Tensor]:
    return _gradient_and_codes(qkv_BSE, code_scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[4:]


def _derive(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    (gradient,) = fused_backward(*grads, *ctx.saved_tensors, None, *ctx.options)
    return gradient, *(None,) * 7


fused.register_autograd(_derive, setup_context=_setup_context)


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
