"""Quantise a matrix to FP8 in one pass over memory, written as it is, transposed, or both.

FP8 products want both operands with the summed axis contiguous, so the two backward products need transposed copies
of what the forward and the first backward product read plainly. Made apart, they would read everything once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.parts import ceil_div
from nanosprint.kernels.tuning import QUANTIZE


@triton.jit
def _quantize_kernel(
    X, OUT, TRANSPOSED, inverse, limit, rows, cols, padded_rows, x_row,
    PLAIN: tl.constexpr, TURN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.cdiv(cols, BLOCK_C)
    # 64 bits: logits of 49,152 tokens have more than 2^31 elements.
    r = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tl.program_id(0) % tiles_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    x = tl.load(X + r[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32) * inverse
    x = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    q = x.to(TRANSPOSED.dtype.element_ty)
    if PLAIN:
        tl.store(OUT + r[:, None] * cols + c[None, :], q, mask=inside)
    if TURN:
        fits = (c < cols)[:, None] & (r < padded_rows)[None, :]
        tl.store(TRANSPOSED + c[:, None] * padded_rows + r[None, :], tl.trans(q), mask=fits)


def quantize(x: Tensor, out: Tensor | None, transposed: Tensor | None, inverse: float, limit: float) -> None:
    """out (R, C) and transposed (C, R or more) <- clamp(x * inverse, -limit, limit) in their dtype.

    x (R, C), unit inner stride; out and transposed contiguous. Columns of transposed beyond R become zero. transposed
    needs an x of one or two bytes an element: from fp32 Triton 3.6 turns the result byte by byte through shared memory
    and misplaces a quarter or more of it (seen on an H200 for every tile tried; exact for bf16, fp16 and FP8 sources).
    """
    (rows, cols), target = x.shape, out if transposed is None else transposed
    assert target is not None
    assert transposed is None or x.element_size() <= 2 or not x.is_cuda, x.dtype
    if not x.numel():
        return
    block_r, block_c, warps = QUANTIZE
    padded = rows if transposed is None else transposed.shape[1]
    grid = (ceil_div(padded, block_r) * ceil_div(cols, block_c),)
    with torch.cuda.device_of(x):
        _quantize_kernel[grid](
            x, target if out is None else out, target, inverse, limit, rows, cols, padded, x.stride(0),
            PLAIN=out is not None, TURN=transposed is not None, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps,
        )  # fmt: skip
