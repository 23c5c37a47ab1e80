"""Norm, rotary positions and key offset of the merged projection in one pass, and their gradient in another.

A program takes some tokens and one of the 3 H heads side by side in the projection: a query, a key, or a value, which
is only copied. The backward pass reads the projection again rather than what was made of it, and writes the merged
gradient, values included, as the product behind it wants it. All arithmetic is in fp32, rounded once. Where that
product is in FP8, the same pass writes codes of the rounded gradient beside it: one byte, against three of a pass that
reads the gradient again.

The pairs that stand still are never looked up: their cosine is one.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.tuning import QK_NORM_ROTARY


@triton.jit
def _load(X, at, inside, K: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """First and second dimension of each pair, (N, K / 2) each in fp32, of heads that start at `at` (N,)."""
    N: tl.constexpr = at.shape[0]
    if NEIGHBOURS:
        x = tl.load(X + at[:, None] + tl.arange(0, K)[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (N, K // 2, 2)))
    else:
        half = at[:, None] + tl.arange(0, K // 2)[None, :]
        a = tl.load(X + half, mask=inside[:, None], other=0.0).to(tl.float32)
        b = tl.load(X + half + K // 2, mask=inside[:, None], other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store(X, at, inside, a, b, K: tl.constexpr, NEIGHBOURS: tl.constexpr):
    N: tl.constexpr = at.shape[0]
    if NEIGHBOURS:
        x = tl.reshape(tl.join(a, b), (N, K))
        tl.store(X + at[:, None] + tl.arange(0, K)[None, :], x.to(X.dtype.element_ty), mask=inside[:, None])
    else:
        half = at[:, None] + tl.arange(0, K // 2)[None, :]
        tl.store(X + half, a.to(X.dtype.element_ty), mask=inside[:, None])
        tl.store(X + half + K // 2, b.to(X.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _angles(COS, SIN, place, head, together, turning, inside, P: tl.constexpr):
    """Cosines and sines (N, P) of the tokens' places in their rows."""
    j = tl.arange(0, P)
    at = place[:, None] * (together * P) + (head % together) * P + j[None, :]
    turns = inside[:, None] & (j < turning)[None, :]
    return tl.load(COS + at, mask=turns, other=1.0), tl.load(SIN + at, mask=turns, other=0.0)


@triton.jit
def _inverse_length(a, b, eps, K: tl.constexpr):
    return tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / K + eps)


@triton.jit
def _normed_and_turned(
    QKV, COS, SIN, at, place, head, together, turning, eps, inside, K: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    a, b = _load(QKV, at, inside, K, NEIGHBOURS)
    scale = _inverse_length(a, b, eps, K)[:, None]
    cos, sin = _angles(COS, SIN, place, head, together, turning, inside, K // 2)
    a, b = a * scale, b * scale
    return a * cos + b * sin, b * cos - a * sin


@triton.jit
def _late(
    START0: tl.constexpr, STOP0: tl.constexpr, START1: tl.constexpr, STOP1: tl.constexpr,
    K: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Which first and which second dimensions of the pairs come from the token before."""
    j = tl.arange(0, K // 2)
    if NEIGHBOURS:
        a, b = 2 * j, 2 * j + 1
    else:
        a, b = j, j + K // 2
    late_a = ((a >= START0) & (a < STOP0)) | ((a >= START1) & (a < STOP1))
    late_b = ((b >= START0) & (b < STOP0)) | ((b >= START1) & (b < STOP1))
    return late_a[None, :], late_b[None, :]


@triton.jit
def _copy(X, Y, x_at, y_at, inside, K: tl.constexpr):
    """What it copied is returned, (N, K)."""
    lanes = tl.arange(0, K)[None, :]
    x = tl.load(X + x_at[:, None] + lanes, mask=inside[:, None])
    tl.store(Y + y_at[:, None] + lanes, x, mask=inside[:, None])
    return x


@triton.jit
def _within(x, inverse, LIMIT: tl.constexpr):
    """`ops.fp8.quantize` but for the cast: NaN stays NaN."""
    return tl.clamp(x.to(tl.float32) * inverse, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _qk_norm_rotary_kernel(
    COS, SIN, QKV, Q, KEYS, V, tokens, seq_len, H, together, turning, eps,
    START0: tl.constexpr, STOP0: tl.constexpr, START1: tl.constexpr, STOP1: tl.constexpr,
    K: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, place = token < tokens, token % seq_len
    head = slot % H
    at, out = (token * (3 * H) + slot) * K, (token * H + head) * K
    if slot >= 2 * H:
        _copy(QKV, V, at, out, inside, K)
    else:
        a, b = _normed_and_turned(
            QKV, COS, SIN, at, place, head, together, turning, eps, inside, K, NEIGHBOURS
        )  # fmt: skip
        if slot < H:
            _store(Q, out, inside, a, b, K, NEIGHBOURS)
        else:
            if STOP0 > START0:
                back = (place > 0).to(tl.int64)
                earlier_a, earlier_b = _normed_and_turned(
                    QKV, COS, SIN, at - back * (3 * H * K), place - back, head, together, turning, eps, inside,
                    K, NEIGHBOURS,
                )  # fmt: skip
                late_a, late_b = _late(START0, STOP0, START1, STOP1, K, NEIGHBOURS)
                a, b = tl.where(late_a, earlier_a, a), tl.where(late_b, earlier_b, b)
            _store(KEYS, out, inside, a, b, K, NEIGHBOURS)


@triton.jit
def _qk_norm_rotary_backward_kernel(
    COS, SIN, DQ, DK, DV, QKV, DQKV, CODES, code_scale, tokens, seq_len, H, together, turning, eps,
    START0: tl.constexpr, STOP0: tl.constexpr, START1: tl.constexpr, STOP1: tl.constexpr,
    K: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr, EMIT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, place = token < tokens, token % seq_len
    head = slot % H
    at, out = (token * (3 * H) + slot) * K, (token * H + head) * K
    inverse = tl.div_rn(1.0, tl.load(code_scale)) if EMIT else 1.0  # rounded as torch rounds it
    if slot >= 2 * H:
        v = _copy(DV, DQKV, out, at, inside, K)
        if EMIT:
            codes = _within(v, inverse, LIMIT).to(CODES.dtype.element_ty)
            tl.store(CODES + at[:, None] + tl.arange(0, K)[None, :], codes, mask=inside[:, None])
    else:
        if slot < H:
            ga, gb = _load(DQ, out, inside, K, NEIGHBOURS)
        else:
            ga, gb = _load(DK, out, inside, K, NEIGHBOURS)
            if STOP0 > START0:
                # The token behind used these dimensions, and the row's first one its own.
                next_a, next_b = _load(DK, out + H * K, inside & (place + 1 < seq_len), K, NEIGHBOURS)
                late_a, late_b = _late(START0, STOP0, START1, STOP1, K, NEIGHBOURS)
                first = (place == 0)[:, None]
                ga = tl.where(late_a, next_a + tl.where(first, ga, 0.0), ga)
                gb = tl.where(late_b, next_b + tl.where(first, gb, 0.0), gb)
        cos, sin = _angles(COS, SIN, place, head, together, turning, inside, K // 2)
        ga, gb = ga * cos - gb * sin, ga * sin + gb * cos
        a, b = _load(QKV, at, inside, K, NEIGHBOURS)
        scale = _inverse_length(a, b, eps, K)[:, None]
        a, b = a * scale, b * scale
        along = ((tl.sum(ga * a, axis=1) + tl.sum(gb * b, axis=1)) / K)[:, None]
        a, b = (ga - a * along) * scale, (gb - b * along) * scale
        _store(DQKV, at, inside, a, b, K, NEIGHBOURS)
        if EMIT:
            a, b = a.to(DQKV.dtype.element_ty), b.to(DQKV.dtype.element_ty)
            _store(CODES, at, inside, _within(a, inverse, LIMIT), _within(b, inverse, LIMIT), K, NEIGHBOURS)


def forward(qkv_BSE: Tensor, cos: Tensor, sin: Tensor, out: tuple[Tensor, Tensor, Tensor], **options: Any) -> None:
    """out <- queries, keys and values (B, S, H, K) of qkv (B, S, 3 H K); all contiguous. Options: see `_launch`."""
    _launch(_qk_norm_rotary_kernel, cos, sin, (qkv_BSE, *out), out[0].shape, {}, **options)


def backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_BSE: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    codes: Tensor | None = None,
    code_scale: Tensor | None = None,
    **options: Any,
) -> None:
    """out <- gradient of qkv, of the same shape, from those of queries, keys and values; all contiguous.

    codes, of that shape too <- out / code_scale in their dtype, clamped. code_scale: 0-D fp32.
    """
    assert (codes is None) == (code_scale is None)
    tensors = *grads, qkv_BSE, out, codes, code_scale
    emit = {"EMIT": codes is not None, "LIMIT": 0.0 if codes is None else torch.finfo(codes.dtype).max}
    _launch(_qk_norm_rotary_backward_kernel, cos, sin, tensors, grads[0].shape, emit, **options)


def _launch(
    kernel: Any,
    cos: Tensor,
    sin: Tensor,
    tensors: tuple[Tensor | None, ...],
    shape: torch.Size,
    constants: Mapping[str, Any],
    *,
    turning: int,
    eps: float,
    neighbours: bool,
    key_offset: tuple[tuple[int, int], ...] = (),
) -> None:
    """turning: how many pairs of a head do turn, the first ones. key_offset: at most two ranges of dimensions."""
    B, S, H, K = shape
    if not B * S:
        return
    block, warps = QK_NORM_ROTARY
    first, second, *_ = (*key_offset, (0, 0), (0, 0))
    with torch.cuda.device_of(cos):
        kernel[(3 * H, triton.cdiv(B * S, block))](
            cos, sin, *tensors, B * S, S, H, 2 * cos.size(-1) // K, turning, eps, *first, *second,
            K=K, NEIGHBOURS=neighbours, BLOCK=block, num_warps=warps, **constants,
        )  # fmt: skip
