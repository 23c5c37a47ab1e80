"""Quantise a matrix to FP8 in one pass over memory, written as it is, transposed, or both.

FP8 products want both operands with the summed axis contiguous, so the two backward products need transposed copies
of what the forward and the first backward product read plainly. Made apart, they would read everything once more.

Weights are many and small: `quantize_all` takes all of a model's in one launch, each with a scale given, and
`requantize` with scales from their largest magnitudes: apart, these are some ten launches a weight, which take the host
longer than the GPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.parts import FLOATS, address_table, larger, upload
from nanosprint.kernels.tuning import QUANTIZE, REQUANTIZE, TURN_CODES


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
    grid = (triton.cdiv(padded, block_r) * triton.cdiv(cols, block_c),)
    with torch.cuda.device_of(x):
        _quantize_kernel[grid](
            x, target if out is None else out, target, inverse, limit, rows, cols, padded, x.stride(0),
            PLAIN=out is not None, TURN=transposed is not None, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _quantize_all_kernel(
    table, inverses, limit, SOURCE: tl.constexpr, TARGET: tl.constexpr, SCALE: tl.constexpr, PLAIN: tl.constexpr,
    TURN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (tile, i) works on one tile of matrix i, whose row of the table says where it lies and goes.

    All addresses are multiples of 16 bytes, all sizes and strides of 16 elements.
    """
    table += tl.program_id(1) * 8
    rows, cols = tl.multiple_of(tl.load(table + 3), 16), tl.multiple_of(tl.load(table + 4), 16)
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = tl.program_id(0) // tiles_c * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]  # nothing at all, where other matrices have more tiles
    source = tl.multiple_of(tl.load(table).to(tl.pointer_type(SOURCE)), 16)
    source_row = tl.multiple_of(tl.load(table + 5), 16)
    x = tl.load(source + r[:, None] * source_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        x *= tl.load(inverses + tl.program_id(1))
    q = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(TARGET)
    if PLAIN:
        plain = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(TARGET)), 16)
        plain_row = tl.multiple_of(tl.load(table + 6), 16)
        tl.store(plain + r[:, None] * plain_row + c[None, :], q, mask=inside)
    if TURN:
        turned = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(TARGET)), 16)
        turned_row = tl.multiple_of(tl.load(table + 7), 16)
        fits = (c < cols)[:, None] & (r < rows)[None, :]
        tl.store(turned + c[:, None] * turned_row + r[None, :], tl.trans(q), mask=fits)


def quantize_all(
    sources: Sequence[Tensor],
    inverses: Tensor,
    limit: float,
    plain: Sequence[Tensor],
    turned: Sequence[Tensor] | None = None,
) -> None:
    """plain[i] (R, C) and turned[i] (C, R) <- clamp(sources[i] * inverses[i], -limit, limit) in their dtype.

    Unit inner strides, sizes and other strides multiples of 16, one dtype of all results. inverses: (n,) fp32. See
    `quantize` about fp32 sources: they are turned by a second launch, which reads what the first has written.
    """
    assert inverses.is_contiguous()
    assert inverses.dtype == torch.float32
    for dtype in dict.fromkeys(t.dtype for t in sources):
        at = [i for i, t in enumerate(sources) if t.dtype == dtype]
        chosen = inverses if len(at) == len(sources) else inverses[upload(tuple(at), inverses.device)]
        columns = [sources[i] for i in at], [plain[i] for i in at], [turned[i] for i in at] if turned else None
        if turned is None or dtype.itemsize <= 2:
            _launch(*columns, chosen, limit)
        else:
            _launch(*columns[:2], None, chosen, limit)
            _launch(columns[1], None, columns[2], None, limit)


def _launch(
    sources: Sequence[Tensor],
    plain: Sequence[Tensor] | None,
    turned: Sequence[Tensor] | None,
    inverses: Tensor | None,
    limit: float,
) -> None:
    """One launch; without inverses, of codes that are there already."""
    results = plain if turned is None else turned
    assert results is not None
    table: list[int] = []
    for i, source in enumerate(sources):
        targets = [source if many is None else many[i] for many in (plain, turned)]  # what is not written: any address
        numbers = [*source.shape, source.stride(0), *(t.stride(0) for t in targets)]
        tensors = (source, *targets)
        assert all(n % 16 == 0 for n in numbers), numbers
        assert all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0 for t in tensors)
        table += [*(t.data_ptr() for t in tensors), *numbers]
    block_r, block_c, warps = QUANTIZE
    tiles = max(triton.cdiv(t.shape[0], block_r) * triton.cdiv(t.shape[1], block_c) for t in sources)
    dtypes = (FLOATS[t.dtype] for t in (sources[0], results[0]))
    with torch.cuda.device_of(sources[0]):
        addresses = upload(tuple(table), sources[0].device)
        _quantize_all_kernel[(tiles, len(sources))](
            addresses, addresses if inverses is None else inverses, limit, *dtypes, SCALE=inverses is not None,
            PLAIN=plain is not None, TURN=turned is not None, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps,
        )  # fmt: skip


LIMIT = tl.constexpr(448.0)  # of E4M3


@triton.jit
def _at(table, column: tl.constexpr, width: tl.constexpr, DTYPE: tl.constexpr):
    """The address in that column of this program's row, as a pointer."""
    return tl.multiple_of(tl.load(table + tl.program_id(1) * width + column).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _peak_kernel(
    table, peaks, size, WIDTH: tl.constexpr, DTYPE: tl.constexpr, TAKE_NEXT: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest magnitudes of BLOCKS parts of each weight; and the scale becomes what was next, while no one reads it."""
    weight = _at(table, 0, WIDTH, DTYPE)
    peak = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32))
        peak = tl.maximum(peak, x, propagate_nan=tl.PropagateNan.ALL)
    tl.store(peaks + tl.program_id(1) * BLOCKS + tl.program_id(0), tl.reduce(peak, 0, larger))
    if TAKE_NEXT:
        following = tl.load(_at(table, 4, WIDTH, tl.float32))
        tl.store(_at(table, 3, WIDTH, tl.float32), following, mask=tl.program_id(0) == 0)


@triton.jit
def _requantize_kernel(
    table, peaks, size, least, unit, headroom, WIDTH: tl.constexpr, DTYPE: tl.constexpr, LAGS: tl.constexpr,
    TAKE_NEXT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    weight, codes = _at(table, 0, WIDTH, DTYPE), _at(table, 1, WIDTH, tl.float8e4nv)
    peak = tl.reduce(tl.load(peaks + tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)), 0, larger)
    present = tl.maximum(peak, least, propagate_nan=tl.PropagateNan.ALL) * unit
    scale = tl.load(_at(table, 3, WIDTH, tl.float32)) if TAKE_NEXT else present
    inverse = tl.div_rn(1.0, scale)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32) * inverse
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes + at, x.to(tl.float8e4nv), mask=at < size)
    if tl.program_id(0) == 0:  # what is written here no other program reads
        if not TAKE_NEXT:
            tl.store(_at(table, 3, WIDTH, tl.float32), present)
        if LAGS:
            tl.store(_at(table, 4, WIDTH, tl.float32), present * headroom)


@triton.jit
def _turn_kernel(table, rows, cols, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Bytes of `codes` to `turned`: see `quantize` about turning while quantising."""
    tiles_c = tl.cdiv(cols, BLOCK_C)
    r = tl.program_id(0) // tiles_c * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    x = tl.load(_at(table, 1, WIDTH, tl.uint8) + r[:, None] * cols + c[None, :], mask=inside, other=0)
    tl.store(_at(table, 2, WIDTH, tl.uint8) + c[:, None] * rows + r[None, :], tl.trans(x), mask=tl.trans(inside))


_Copy = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]  # `ops.fp8_mlp.Copy`; a row of addresses


def requantize(copies: Sequence[_Copy], fresh: bool, headroom: float, least: float) -> None:
    """`ops.fp8_mlp.requantize` for weights of one shape and dtype, whose copies agree in what is None: three launches.

    Every buffer at a multiple of 16 bytes.
    """
    weight, _, turned, _, next_scale = copies[0]
    assert all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for c in copies for t in c)
    blocks, block, warps = REQUANTIZE
    rows, cols = weight.shape
    size, lags, width = weight.numel(), next_scale is not None, len(copies[0])
    table = address_table([t for c in copies for t in c], weight.device)
    common = {"WIDTH": width, "DTYPE": FLOATS[weight.dtype], "TAKE_NEXT": lags and not fresh, "BLOCKS": blocks}
    with torch.cuda.device_of(weight):
        peaks = torch.empty(len(copies), blocks, dtype=torch.float32, device=weight.device)
        grid = (blocks, len(copies))
        _peak_kernel[grid](table, peaks, size, **common, BLOCK=block, num_warps=warps)
        _requantize_kernel[grid](
            table, peaks, size, least, 1 / LIMIT.value, headroom, LAGS=lags, **common, BLOCK=block, num_warps=warps
        )
        if turned is not None:
            block_r, block_c, warps = TURN_CODES
            tiles = triton.cdiv(rows, block_r) * triton.cdiv(cols, block_c)
            _turn_kernel[(tiles, len(copies))](
                table, rows, cols, WIDTH=width, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=warps
            )
