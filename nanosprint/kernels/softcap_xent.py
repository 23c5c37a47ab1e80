"""Cross-entropy of soft-capped logits, its gradient included, in one launch.

One program takes one row of logits and goes over it twice: once for the log-sum-exp, once for the gradient. Several
programs of a multiprocessor hold a few hundred kilobytes between them, so most of the second reading comes out of L2.
The gradient is written as if there were no labels, and then the few columns that labels name are written again, each
with the sum of all weights that fall on it: two labels that agree write the same number twice.

Exponentials are the scarce resource: a capped logit costs one tanh and one power of two in each pass, nothing else.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.tuning import SOFTCAP_BOUND, SOFTCAP_XENT

_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _tanh(x, HARDWARE: tl.constexpr):
    """The hardware's tanh is one instruction with a relative error of 2^-11."""
    if HARDWARE:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        t = 2 / (1 + tl.exp(-2 * x)) - 1
    return t


@triton.jit
def _capped(z, amplitude2, slope, offset, CAPPED: tl.constexpr, HARDWARE: tl.constexpr):
    """(logit in units of ln 2, what its slope is proportional to)."""
    if CAPPED:
        t = _tanh(z * slope + offset, HARDWARE)
        result = (t * amplitude2, 1 - t * t)
    else:
        result = (z * amplitude2, 1.0)
    return result


@triton.jit
def _softcap_xent_kernel(
    Z, G, LOSSES, IDS, WEIGHTS, TOTALS, REST,
    amplitude2, slope, offset, factor, limit, valid, columns, z_row, g_row, num_labels,
    CAPPED: tl.constexpr, BOUNDED: tl.constexpr, CLAMP: tl.constexpr, HARDWARE: tl.constexpr,
    LABELS: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # 64 bits: logits of 49,152 tokens have more than 2^31 elements
    Z += row * z_row
    G += row * g_row
    lanes = tl.arange(0, BLOCK)
    j = tl.arange(0, LABELS)
    ids = tl.load(IDS + row * num_labels + j, mask=j < num_labels, other=-1)
    weights = tl.load(WEIGHTS + j, mask=j < num_labels, other=0.0)
    weights = tl.where(ids >= 0, weights, 0.0)
    total = tl.load(TOTALS + row)
    # Before any store: G may be Z.
    labelled = tl.load(Z + tl.maximum(ids, 0), mask=ids >= 0, other=0.0).to(tl.float32)
    l_labelled, bend_labelled = _capped(labelled, amplitude2, slope, offset, CAPPED, HARDWARE)

    sure, extra = 0, 0.0
    if SAMPLED:  # columns from `sure` on count more than once
        sure = tl.load(REST).to(tl.int32)
        extra = tl.load(REST + 1) * 1.4426950408889634
    # Each lane has a sum of its own. Capped logits lie below `bound`, others below a maximum that grows.
    bound = amplitude2 + extra
    sums = tl.zeros((BLOCK,), tl.float32)
    tops = tl.full((BLOCK,), -1e30, tl.float32)
    for start in range(0, valid, BLOCK):
        inside = start + lanes < valid
        z = tl.load(Z + start + lanes, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        l, _ = _capped(z, amplitude2, slope, offset, CAPPED, HARDWARE)
        if SAMPLED:
            l += tl.where(start + lanes < sure, 0.0, extra)
        if BOUNDED:
            sums += tl.where(inside, tl.exp2(l - bound), 0.0)
        else:
            l = tl.where(inside, l, -1e30)
            higher = tl.maximum(tops, l)
            sums = sums * tl.exp2(tops - higher) + tl.exp2(l - higher)
            tops = higher
    if BOUNDED:
        lse = bound + tl.log2(tl.sum(sums))
    else:
        top = tl.max(tops)
        lse = top + tl.log2(tl.sum(sums * tl.exp2(tops - top)))
    tl.store(LOSSES + row, tl.sum(weights * (lse - l_labelled)) * 0.6931471805599453)

    for start in range(0, columns, BLOCK):
        inside = start + lanes < valid
        z = tl.load(Z + start + lanes, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        l, bend = _capped(z, amplitude2, slope, offset, CAPPED, HARDWARE)
        if SAMPLED:
            l += tl.where(start + lanes < sure, 0.0, extra)
        g = tl.exp2(l - lse) * bend * (total * factor)
        if CLAMP:
            g = tl.clamp(g, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        g = tl.where(inside, g, 0.0)
        tl.store(G + start + lanes, g.to(G.dtype.element_ty), mask=start + lanes < columns)

    hits = tl.sum(tl.where(ids[:, None] == ids[None, :], weights[None, :], 0.0), axis=1)
    g = (tl.exp2(l_labelled - lse) * total - hits) * bend_labelled * factor
    if CLAMP:
        g = tl.clamp(g, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.debug_barrier()  # other threads wrote these columns just now
    tl.store(G + tl.maximum(ids, 0), g.to(G.dtype.element_ty), mask=ids >= 0)


def softcap_xent(
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    totals: Tensor,
    losses: Tensor,
    grad: Tensor,
    *,
    curve: tuple[float, float, float] | None,
    valid: int,
    inverse: float,
    rest: Tensor | None = None,
) -> None:
    """losses (T,) and grad (T, C) <- loss of each row, and its gradient in the logits times `inverse`.

    The arguments are those of `nanosprint.ops.softcap_xent.loss_and_grad`. Unit inner strides; grad may be logits
    itself. E5M2 gradients are clamped to its range. fp32 inside, whatever goes in.
    """
    rows, columns = logits.shape
    if not rows:
        return
    block, warps = SOFTCAP_XENT[grad.element_size()]
    amplitude, slope, offset = (1.0, 1.0, 0.0) if curve is None else curve
    fp8 = grad.element_size() == 1
    with torch.cuda.device_of(logits):
        _softcap_xent_kernel[(rows,)](
            logits, grad, losses, ids, weights, totals, totals if rest is None else rest.contiguous(),
            amplitude / math.log(2), slope, offset, amplitude * slope * inverse,
            torch.finfo(grad.dtype).max if fp8 else 0.0,
            valid, columns, logits.stride(0), grad.stride(0), ids.shape[1],
            CAPPED=curve is not None, BOUNDED=curve is not None and amplitude <= SOFTCAP_BOUND, CLAMP=fp8,
            HARDWARE=not _INTERPRETED,
            LABELS=triton.next_power_of_2(max(2, ids.shape[1])), BLOCK=min(block, triton.next_power_of_2(columns)),
            SAMPLED=rest is not None, num_warps=warps,
        )  # fmt: skip
