"""Muon's elementwise parts, each one pass over memory for all tensors of a shape in one launch.

Before the orthogonalisation comes `momentum_stack`; after it `variance_factors`, which reads the stack once for the
second moments of its rows or columns, and `apply_stack`, which does everything that is left: factors, decay, the
step, and the lower halves of bf16 parameters.

Each takes lists of tensors. A list of one, the bank that a sharded run keeps, is addressed directly. Several lie
wherever the allocator put them, so the kernel gets a table of their addresses: program (block, i) works on one block of
tensor i.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.parts import address_table, ceil_div

_BLOCK = 2048  # elements of a program: 8 a thread in 8 warps, two wide loads (H200: 4096 is as fast or slower)
_ROW_TILE, _COLUMN_TILE = (16, 256), (64, 64)  # (means, elements of each read at a time); not measured yet
_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int16: tl.int16}
_MOST = 2**31 - 2**16  # elements of a tensor: offsets are 32 bits wide

FLOOR = tl.constexpr(1e-10)  # of second moments, as in `optim.muon`
TINY = tl.constexpr(1e-30)  # of a row's mean square before the orthogonalisation, likewise
WIDEST = 8192  # columns of a matrix whose rows `momentum_stack` equalises: one program holds a row, 32 numbers a thread


@triton.jit
def _lerp(start, end, weight):
    """start + weight (end - start) by whichever of two equal forms rounds less, as torch.lerp does."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def _tensor(source, index, DTYPE: tl.constexpr, TABLE: tl.constexpr):
    """Where tensor `index` begins: by the addresses at `source`, or `source` itself where there is only one."""
    start = source
    if TABLE:
        start = tl.multiple_of(tl.load(source + index).to(tl.pointer_type(DTYPE)), 16)
    return start


@triton.jit
def _direction(
    grads, averages, index, at, inside, momentum, NESTEROV: tl.constexpr, GRAD: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """Move the averages at `at` of tensor `index`; the update's direction there, 0 outside."""
    grad = tl.load(_tensor(grads, index, GRAD, TABLE) + at, mask=inside, other=0.0).to(tl.float32)
    averages = _tensor(averages, index, tl.float32, TABLE) + at
    average = _lerp(tl.load(averages, mask=inside, other=0.0), grad, 1.0 - momentum)
    tl.store(averages, average, mask=inside)
    return _lerp(grad, average, momentum) if NESTEROV else average


@triton.jit
def _momentum_kernel(
    grads, averages, stack, size, momentum, NESTEROV: tl.constexpr, GRAD: tl.constexpr, TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    direction = _direction(grads, averages, index, at, inside, momentum, NESTEROV, GRAD, TABLE)
    tl.store(stack + index.to(tl.int64) * size + at, direction.to(stack.dtype.element_ty), mask=inside)


@triton.jit
def _equal_rows_kernel(
    grads, averages, stack, rows, cols, momentum, NESTEROV: tl.constexpr, GRAD: tl.constexpr, TABLE: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`_momentum_kernel` for TILE whole rows, which leave with RMS 1. WIDTH: a power of two, at least `cols`."""
    index = tl.program_id(1)
    row, col = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row[:, None] * cols + col[None, :]
    direction = _direction(grads, averages, index, at, inside, momentum, NESTEROV, GRAD, TABLE)
    square = tl.sum(direction * direction, 1) / cols
    direction = direction / tl.sqrt(tl.maximum(square, TINY))[:, None]
    place = index.to(tl.int64) * rows * cols + at
    tl.store(stack + place, direction.to(stack.dtype.element_ty), mask=inside)


@triton.jit
def _moment_kernel(
    X, moments, squares, kept, reduced, kept_stride, reduced_stride, beta, KEPT: tl.constexpr, REDUCED: tl.constexpr
):  # fmt: skip
    """KEPT mean squares of one matrix, and the running means moved toward them."""
    matrix = tl.program_id(1).to(tl.int64)
    mine = tl.program_id(0) * KEPT + tl.arange(0, KEPT)
    X += matrix * kept * reduced
    sums = tl.zeros([KEPT, REDUCED], tl.float32)
    for begin in range(0, reduced, REDUCED):
        along = begin + tl.arange(0, REDUCED)
        inside = (mine < kept)[:, None] & (along < reduced)[None, :]
        x = tl.load(X + mine[:, None] * kept_stride + along[None, :] * reduced_stride, mask=inside, other=0.0)
        sums += x.to(tl.float32) * x.to(tl.float32)
    square = tl.sum(sums, 1) / reduced
    at, inside = matrix * kept + mine, mine < kept
    moment = _lerp(tl.load(moments + at, mask=inside, other=0.0), square, 1.0 - beta)
    tl.store(moments + at, moment, mask=inside)
    tl.store(squares + at, square, mask=inside)


@triton.jit
def _factor_kernel(moments, squares, factors, kept, reduced, BLOCK: tl.constexpr):
    """1 / sqrt(moment) of one matrix, scaled so that its Frobenius norm stays."""
    first = tl.program_id(0).to(tl.int64) * kept
    before, after = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, kept, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        square = tl.load(squares + first + at, mask=at < kept, other=0.0)
        before += square
        after += square / tl.maximum(tl.load(moments + first + at, mask=at < kept, other=1.0), FLOOR)
    norm, changed = tl.sqrt(tl.sum(before, 0) * reduced), tl.sqrt(tl.sum(after, 0) * reduced)
    scale = norm / tl.maximum(changed, FLOOR)
    for begin in range(0, kept, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        moment = tl.maximum(tl.load(moments + first + at, mask=at < kept, other=1.0), FLOOR)
        tl.store(factors + first + at, (scale / tl.sqrt(moment)).to(factors.dtype.element_ty), mask=at < kept)


@triton.jit
def _join(high, low):
    """See `optim.mantissa.join`."""
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _apply_kernel(
    weights, lows, stack, factors, size, step_size, decay,
    COLS: tl.constexpr, MATRIX: tl.constexpr, FACTORS: tl.constexpr, CAUTIOUS: tl.constexpr, PARAM: tl.constexpr,
    LOWS: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """COLS and MATRIX: columns and elements of a matrix. FACTORS: "rows", "columns" or "none"."""
    index = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    update = tl.load(stack + index.to(tl.int64) * size + at, mask=inside, other=0.0)
    if FACTORS != "none":
        if FACTORS == "rows":
            place = index * (size // COLS) + at // COLS
        else:
            place = (index * (size // MATRIX) + at // MATRIX) * COLS + at % COLS
        factor = tl.load(factors + place, mask=inside, other=0.0)
        update = (update.to(tl.float32) * factor.to(tl.float32)).to(stack.dtype.element_ty)
    update = update.to(tl.float32)
    weights = _tensor(weights, index, PARAM, TABLE) + at
    weight = tl.load(weights, mask=inside, other=0.0)
    if LOWS:
        lows = _tensor(lows, index, tl.int16, TABLE) + at
        weight = _join(weight, tl.load(lows, mask=inside, other=0))
    weight = weight.to(tl.float32)
    shrink = decay * weight
    if CAUTIOUS:
        shrink = tl.where(update * weight >= 0.0, shrink, 0.0)
    weight = weight - shrink - step_size * update
    if LOWS:
        bits = weight.to(tl.int32, bitcast=True)
        tl.store(weights, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(lows, bits.to(tl.int16), mask=inside)
    else:
        tl.store(weights, weight.to(PARAM), mask=inside)


def momentum_stack(
    averages: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum: float,
    nesterov: bool,
    stack: Tensor,
    equal_cols: int | None = None,
) -> None:
    """averages += (1 - momentum) (grads - averages); writes the directions into `stack` (k, *shape), rounded once.

    averages fp32, grads fp32, bf16 or fp16, all of one shape and as `can_fuse` wants them; stack contiguous.
    equal_cols: entries of a row, WIDEST at most, where `optim.muon.equal_rows` is wanted on top.
    """
    size = averages[0].numel()
    if not size:
        return
    sources = _source(grads), _source(averages), stack
    options: dict[str, Any] = {
        "NESTEROV": nesterov, "GRAD": _TRITON[grads[0].dtype], "TABLE": len(grads) > 1, "num_warps": 8,
    }  # fmt: skip
    with torch.cuda.device_of(stack):
        if equal_cols is None:
            blocks = ceil_div(size, _BLOCK), len(averages)
            _momentum_kernel[blocks](*sources, size, float(momentum), BLOCK=_BLOCK, **options)
        else:
            rows, width = size // equal_cols, triton.next_power_of_2(equal_cols)
            tile = max(1, _BLOCK // width)
            blocks = ceil_div(rows, tile), len(averages)
            _equal_rows_kernel[blocks](*sources, rows, equal_cols, float(momentum), TILE=tile, WIDTH=width, **options)


def variance_factors(X: Tensor, moments: Tensor, beta: float) -> Tensor:
    """`optim.muon.variance_factors` in two launches. X (B, M, N) and moments fp32, both contiguous."""
    batch, rows, cols = X.shape
    by_row = rows >= cols
    kept, reduced = (rows, cols) if by_row else (cols, rows)
    strides = (cols, 1) if by_row else (1, cols)
    kept_tile, reduced_tile = _ROW_TILE if by_row else _COLUMN_TILE
    squares, factors = torch.empty_like(moments), torch.empty_like(moments, dtype=X.dtype)
    if X.numel():
        with torch.cuda.device_of(X):
            _moment_kernel[(ceil_div(kept, kept_tile), batch)](
                X, moments, squares, kept, reduced, *strides, float(beta), KEPT=kept_tile, REDUCED=reduced_tile
            )
            _factor_kernel[(batch,)](moments, squares, factors, kept, reduced, BLOCK=1024)
    return factors


def apply_stack(
    params: Sequence[Tensor],
    stack: Tensor,
    step_size: float,
    decay: float,
    *,
    cautious: bool = False,
    factors: Tensor | None = None,
    lows: Sequence[Tensor] | None = None,
) -> None:
    """params <- params - decay params - step_size updates, computed in fp32 and rounded once.

    stack (B, rows, cols), or any shape if there are no factors, contiguous: the updates of all params. factors
    (B, rows, 1) or (B, 1, cols), in stack's dtype, multiply it first, with a rounding to that dtype. cautious: decay
    only where update * weight >= 0. lows: int16, the lower halves of bf16 params, updated too.
    """
    size, (rows, cols) = params[0].numel(), stack.shape[-2:]
    kind = "none" if factors is None else "rows" if rows >= cols else "columns"
    if size:
        with torch.cuda.device_of(stack):
            _apply_kernel[(ceil_div(size, _BLOCK), len(params))](
                _source(params), None if lows is None else _source(lows), stack, factors, size, float(step_size),
                float(decay), COLS=cols, MATRIX=rows * cols, FACTORS=kind, CAUTIOUS=cautious,
                PARAM=_TRITON[params[0].dtype], LOWS=lows is not None, TABLE=len(params) > 1,
                BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
    torch.autograd.graph.increment_version(params)  # autograd did not see the change


def can_fuse(*columns: Sequence[Tensor]) -> bool:
    """Whether the kernels take these: contiguous, at multiples of 16 bytes, each column of one dtype that they know."""
    return all(
        t.dtype == column[0].dtype
        and t.dtype in _TRITON
        and t.is_contiguous()
        and t.data_ptr() % 16 == 0
        and t.numel() <= _MOST
        for column in columns
        for t in column
    )


def _source(tensors: Sequence[Tensor]) -> Any:
    """What `_tensor` starts from: the only tensor, or a table of addresses on their device."""
    if len(tensors) == 1:
        return tensors[0]
    return address_table(tensors, tensors[0].device)
