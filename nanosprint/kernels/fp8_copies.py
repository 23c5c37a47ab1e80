"""E4M3 copies of weights with scales from their largest magnitudes, of all of a model's weights at once.

Weights are many and small: one by one they take some ten launches each, and the host longer than the GPU. Here the
first launch finds largest magnitudes and the second quantises, each with a grid over (block, weight); a table says
where weights lie, where codes and scales go, and which weights share a scale.

A scale that lags is set while no one reads it: what was next moves into its place in the first launch, and the new next
one is written in the second, which reads only the former.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.parts import FLOATS, ceil_div, larger, upload
from nanosprint.kernels.tuning import PEAKS, QUANTIZE, TURN_CODES

if TYPE_CHECKING:
    from nanosprint.ops.fp8_copies import Copy

LIMIT = tl.constexpr(448.0)  # of E4M3

# Columns of the table; a row is a part of a weight. Addresses, 0 for what there is not:
_WEIGHT, _CODES, _TURNED, _SCALE, _NEXT, _FACTOR = (tl.constexpr(i) for i in range(6))
# Sizes of the part, distances of rows of codes and of turned ones. Which magnitudes are its own and which its weight's:
# `_PARTS` of them, from number `_FIRST` on. The last two are a flag, and fp32 bits.
_ROWS, _COLS, _CODES_ROW, _TURNED_ROW, _OWN, _FIRST, _PARTS, _TAKES_NEXT, _HEADROOM = (
    tl.constexpr(i) for i in range(6, 15)
)
_WIDTH = tl.constexpr(16)


@triton.jit
def _entry(table, column: tl.constexpr):
    """The number in that column of this program's row."""
    return tl.load(table + tl.program_id(1) * _WIDTH + column)


@triton.jit
def _pointer(table, column: tl.constexpr, DTYPE: tl.constexpr):
    """The address in that column, of numbers that begin at a multiple of 16 bytes."""
    return tl.multiple_of(_entry(table, column).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _length(table, column: tl.constexpr):
    """A size or a distance, a multiple of 16."""
    return tl.multiple_of(_entry(table, column).to(tl.int32), 16)


@triton.jit
def _scalar(table, column: tl.constexpr):
    """The address in that column, of a single number."""
    return _entry(table, column).to(tl.pointer_type(tl.float32))


@triton.jit
def _peak_kernel(table, peaks, SOURCE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest magnitudes of BLOCKS pieces of each part; and scales that lag become what was next."""
    weight, size = _pointer(table, _WEIGHT, SOURCE), tl.multiple_of(_length(table, _ROWS) * _length(table, _COLS), 16)
    peak = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32))
        peak = tl.maximum(peak, x, propagate_nan=tl.PropagateNan.ALL)
    tl.store(peaks + _entry(table, _OWN) * BLOCKS + tl.program_id(0), tl.reduce(peak, 0, larger))
    if (tl.program_id(0) == 0) & (_entry(table, _TAKES_NEXT) != 0):
        tl.store(_scalar(table, _SCALE), tl.load(_scalar(table, _NEXT)))


@triton.jit
def _renew_kernel(
    table, peaks, least, unit, SOURCE: tl.constexpr, TURN: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tile of codes a program. TURN: write the transposed ones, too, where they are wanted."""
    first = _entry(table, _FIRST)
    peak = tl.zeros([BLOCKS], tl.float32)
    for part in range(first.to(tl.int32), (first + _entry(table, _PARTS)).to(tl.int32)):
        others = tl.load(peaks + part * BLOCKS + tl.arange(0, BLOCKS))
        peak = tl.maximum(peak, others, propagate_nan=tl.PropagateNan.ALL)
    present = tl.maximum(tl.reduce(peak, 0, larger), least, propagate_nan=tl.PropagateNan.ALL) * unit
    lags = _entry(table, _TAKES_NEXT) != 0
    scale = tl.where(lags, tl.load(_scalar(table, _SCALE), mask=lags, other=1.0), present)
    inverse = tl.div_rn(1.0, scale)

    rows, cols = _length(table, _ROWS), _length(table, _COLS)
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = tl.program_id(0) // tiles_c * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]  # nothing at all, where other weights have more tiles
    x = tl.load(_pointer(table, _WEIGHT, SOURCE) + r[:, None] * cols + c[None, :], mask=inside, other=0.0)
    x = tl.clamp(x.to(tl.float32) * inverse, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    q = x.to(tl.float8e4nv)
    codes_row = _length(table, _CODES_ROW)
    tl.store(_pointer(table, _CODES, tl.float8e4nv) + r[:, None] * codes_row + c[None, :], q, mask=inside)
    if TURN:  # noqa: SIM102 (known when this is compiled, and the other is not)
        if _entry(table, _TURNED) != 0:
            turned_row = _length(table, _TURNED_ROW)
            turned = _pointer(table, _TURNED, tl.float8e4nv) + c[:, None] * turned_row + r[None, :]
            tl.store(turned, tl.trans(q), mask=(c < cols)[:, None] & (r < rows)[None, :])

    if (tl.program_id(0) == 0) & (_entry(table, _OWN) == first):
        if _entry(table, _TAKES_NEXT) == 0:
            has_factor = _entry(table, _FACTOR) != 0
            factor = tl.load(_scalar(table, _FACTOR), mask=has_factor, other=1.0)
            tl.store(_scalar(table, _SCALE), present * factor)
        if _entry(table, _NEXT) != 0:
            headroom = _entry(table, _HEADROOM).to(tl.int32).to(tl.float32, bitcast=True)
            tl.store(_scalar(table, _NEXT), present * headroom)


@triton.jit
def _turn_kernel(table, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Codes to their transpose, as bytes: see `kernels.fp8` about turning fp32 while it is quantised."""
    rows, cols = _length(table, _ROWS), _length(table, _COLS)
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = tl.program_id(0) // tiles_c * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    codes_row = _length(table, _CODES_ROW)
    turned_row = _length(table, _TURNED_ROW)
    if _entry(table, _TURNED) != 0:
        x = tl.load(_pointer(table, _CODES, tl.uint8) + r[:, None] * codes_row + c[None, :], mask=inside, other=0)
        turned = _pointer(table, _TURNED, tl.uint8) + c[:, None] * turned_row + r[None, :]
        tl.store(turned, tl.trans(x), mask=tl.trans(inside))


def renew(copies: "Sequence[Copy]", least: float) -> None:
    """`ops.fp8_copies.renew` for weights on a GPU; largest magnitudes count as `least` at least."""
    factors = [None if copy.factor is None else copy.factor.float() for copy in copies]  # held until it is launched
    tables: dict[torch.dtype, list[list[int]]] = {}
    own = 0
    for copy, factor in zip(copies, factors, strict=True):
        for part, row in _rows(copy, factor, own):
            tables.setdefault(part.dtype, []).append(row)
            own += 1
    device = copies[0].codes.device
    blocks, block, peak_warps = PEAKS
    with torch.cuda.device_of(copies[0].codes):
        peaks = torch.empty(own, blocks, dtype=torch.float32, device=device)
        uploaded = {dtype: upload(tuple(chain.from_iterable(rows)), device) for dtype, rows in tables.items()}
        for dtype, table in uploaded.items():
            grid = (blocks, len(tables[dtype]))
            _peak_kernel[grid](table, peaks, SOURCE=FLOATS[dtype], BLOCKS=blocks, BLOCK=block, num_warps=peak_warps)
        for dtype, table in uploaded.items():
            _quantize(tables[dtype], table, peaks, dtype, least)


def _quantize(rows: list[list[int]], table: Tensor, peaks: Tensor, dtype: torch.dtype, least: float) -> None:
    """Codes of all weights of a dtype, and of fp32 ones their transpose by another launch."""
    turns, at_once = any(row[_TURNED.value] for row in rows), dtype.itemsize <= 2
    block_r, block_c, warps = QUANTIZE
    _renew_kernel[_grid(rows, block_r, block_c)](
        table, peaks, least, 1 / LIMIT.value, SOURCE=FLOATS[dtype], TURN=turns and at_once, BLOCKS=peaks.shape[1],
        BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    if turns and not at_once:
        block_r, block_c, warps = TURN_CODES
        _turn_kernel[_grid(rows, block_r, block_c)](table, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps)


def _grid(rows: list[list[int]], block_r: int, block_c: int) -> tuple[int, int]:
    """As many tiles as the largest weight has, for each."""
    tiles = max(ceil_div(row[_ROWS.value], block_r) * ceil_div(row[_COLS.value], block_c) for row in rows)
    return tiles, len(rows)


def _rows(copy: "Copy", factor: Tensor | None, first: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Each part of a weight with its row of the table; `first` is the number of the first of them."""
    codes, turned = copy.codes, copy.turned
    height, width = codes.shape
    codes_at, turned_at = codes.data_ptr(), 0 if turned is None else turned.data_ptr()
    assert codes.is_contiguous()
    assert turned is None or turned.is_contiguous()
    scalars = [0 if t is None else t.data_ptr() for t in (copy.scale, copy.next_scale, factor)]
    (headroom,) = struct.unpack("<i", struct.pack("<f", copy.headroom))
    above = 0
    for i, part in enumerate(copy.parts):
        rows, cols = part.shape
        row = [
            part.data_ptr(), codes_at + above * width, turned_at and turned_at + above, *scalars, rows, cols, width,
            height, first + i, first, len(copy.parts), int(copy.takes_next), headroom, 0,
        ]  # fmt: skip
        assert len(row) == _WIDTH.value
        assert cols == width
        assert part.is_contiguous()
        assert all(number % 16 == 0 for number in (*row[:3], rows, cols, height)), row
        yield part, row
        above += rows
    assert above == height
