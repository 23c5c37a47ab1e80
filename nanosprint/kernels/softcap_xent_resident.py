"""The kernel of `softcap_xent` with a row at rest: a logit is read once, and has one tanh and one power of two.

`softcap_xent` goes over a row twice, because a gradient needs the sum of all powers. Both passes take a tanh and a
power of two: four of an instruction of which a multiprocessor has 16 a clock, on an H200 2.7 ms for 49,152 rows of
50,304, where the bytes take 1.75. Here the first pass leaves in shared memory what a gradient is but for a factor of
the row,

    q_v = 2^(l_v) (1 - tanh^2)         d / d z_v = (A a S / sum 2^l) q_v, less what labels take

so that the second only multiplies and stores. Capped logits are bounded, so no maximum is needed. q is rounded to bf16:
two roundings in a bf16 gradient, 0.26 % where one is 0.17, and nothing beside E5M2's.

A row of 50,304 takes 98 KiB, so two blocks share a multiprocessor, and one computes while the other writes. They stay
and take row after row: the next row's first logits are on their way while this one's gradient is written. A thread
handles words of two neighbouring logits. It reads what it wrote itself, but where the compiler cannot tell two places
in shared memory apart it has all threads wait: so chunk c lies in an array by its number modulo AHEAD, and once in so
many chunks they wait.

In Gluon, which has no interpreter; `tests/ops/gluon_on_cpu.py` stands in for it. Hopper's instructions only.
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanosprint.kernels.parts import ceil_div, multiprocessors
from nanosprint.kernels.tuning import HeldRow


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2(x):
    """In one instruction: results below 2^-126, which capped logits do not have, would be zero."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _bf16_pairs(low, high):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _e5m2_pairs(low, high):
    """Clamped; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $3, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $2; "
        "mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f", [low, high], dtype=gl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _halves(words):
    """Both numbers of words of two bf16, as fp32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _powers(z, shift, curve):
    """2^(capped z + shift), and that times 1 - tanh^2."""
    amplitude2, slope, offset = curve
    t = _tanh(z * slope + offset)
    power = _exp2(t * amplitude2 + shift)
    return power, power * (1 - t * t)


@gluon.jit
def _keep(words, held, sums, column, curve, sure, extra, valid, MASKED: gl.constexpr, SAMPLED: gl.constexpr):
    """q of a chunk of logits into `held`, and the sums with its powers. `column`: of each word's first logit."""
    low, high = _halves(words)
    low_shift, high_shift = 0.0, 0.0
    if SAMPLED:
        low_shift = gl.where(column < sure, 0.0, extra)
        high_shift = gl.where(column + 1 < sure, 0.0, extra)
    low_power, low_q = _powers(low, low_shift, curve)
    high_power, high_q = _powers(high, high_shift, curve)
    if MASKED:
        low_power, low_q = gl.where(column < valid, low_power, 0.0), gl.where(column < valid, low_q, 0.0)
        high_power, high_q = gl.where(column + 1 < valid, high_power, 0.0), gl.where(column + 1 < valid, high_q, 0.0)
    held.store(_bf16_pairs(low_q, high_q))
    return sums + (low_power + high_power)


@gluon.jit
def _give(GG, held, scale, left, LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    """The gradient of a chunk to GG, or of its first `left` words."""
    low, high = _halves(held.load(LAYOUT))
    lane = gl.arange(0, held.shape[0], LAYOUT)
    if GG.dtype.element_ty == gl.int16:
        pairs = _e5m2_pairs(low * scale, high * scale)
    else:
        pairs = _bf16_pairs(low * scale, high * scale)
    if MASKED:
        gl.store(GG + lane, pairs, mask=lane < left)
    else:
        gl.store(GG + lane, pairs)


@gluon.jit
def _ask(ZZ, left, CHUNK: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    """A chunk at ZZ, or its first `left` words and anything behind them."""
    lane = gl.arange(0, CHUNK, LAYOUT)
    return gl.load(ZZ + lane, mask=lane < left) if MASKED else gl.load(ZZ + lane)


@gluon.jit
def _announce(ZZ, words):
    """Have L2 fetch so many words from ZZ on. One thread asks for all."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [ZZ, 4 * words], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _room(CHUNKS: gl.constexpr, CHUNK: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [CHUNKS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _at_labels(z, weights, hits, norm, total, curve, factor, there):
    """The loss of a row from the logits of its labels, and these columns' gradients. hits: what weighs on each."""
    amplitude2, slope, offset = curve
    t = _tanh(z.to(gl.float32) * slope + offset)
    losses = gl.where(there, weights, 0.0) * (gl.log2(norm) - t * amplitude2)
    g = (_exp2(t * amplitude2) / norm * total - hits) * (1 - t * t) * factor
    return gl.sum(losses, 0) * 0.6931471805599453, g


@gluon.jit
def _ids(IDS, row, num_labels, label):
    return gl.load(IDS + row.to(gl.int64) * num_labels + label, mask=label < num_labels, other=-1)


@gluon.jit(do_not_specialize=["rows"])
def _softcap_xent_resident_kernel(
    Z, ZZ, G, GG, LOSSES, IDS, WEIGHTS, TOTALS, REST,
    amplitude2, slope, offset, factor, rows, valid, width, zz_row, gg_row, num_labels,
    LABELS: gl.constexpr, WHOLE: gl.constexpr, FULL: gl.constexpr, CHUNKS: gl.constexpr, AHEAD: gl.constexpr,
    SOON: gl.constexpr, SAMPLED: gl.constexpr,
):  # fmt: skip
    """Z and ZZ are the same logits, one by one and in words, likewise G and GG; a row of both has `width` words.

    WHOLE: how many of a row's CHUNKS are whole, FULL: how many have no column from `valid` on. AHEAD: how many chunks
    are on their way, of this row or of the next; groups of so many are announced to L2 SOON groups beforehand.
    """
    WARPS: gl.constexpr = gl.num_warps()
    CHUNK: gl.constexpr = 128 * WARPS  # words: 16 bytes a thread
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, LABELS], [32, 1], [WARPS, 1], [1, 0])
    GROUPS: gl.constexpr = FULL // AHEAD  # of AHEAD chunks each; TAIL chunks follow
    TAIL: gl.constexpr = CHUNKS - GROUPS * AHEAD
    PART: gl.constexpr = CHUNKS - 1 if WHOLE < CHUNKS else CHUNKS  # the chunk that is not whole
    lane = gl.arange(0, CHUNK, LINE)
    label = gl.arange(0, LABELS, gl.SliceLayout(1, SQUARE))
    other = gl.arange(0, LABELS, gl.SliceLayout(0, SQUARE))
    label_weights = gl.load(WEIGHTS + label, mask=label < num_labels, other=0.0)
    other_weights = gl.load(WEIGHTS + other, mask=other < num_labels, other=0.0)
    curve = (amplitude2, slope, offset)
    sure, extra = valid, 0.0
    if SAMPLED:  # columns from `sure` on count more than once
        sure = gl.load(REST).to(gl.int32)
        extra = gl.load(REST + 1) * 1.4426950408889634
    part_width = width - (CHUNKS - 1) * CHUNK

    first = gl.program_id(0)
    line = ZZ + first.to(gl.int64) * zz_row
    held, coming = gl.tuple(()), gl.tuple(())
    for k in gl.static_range(AHEAD):
        held = held + (_room((CHUNKS - k + AHEAD - 1) // AHEAD, CHUNK),)  # noqa: RUF005  no star in Gluon
        coming = coming + (_ask(line + k * CHUNK, part_width, CHUNK, LINE, k == PART),)  # noqa: RUF005
    ids = _ids(IDS, first, num_labels, label)
    total = gl.load(TOTALS + first)
    for turn in range(gl.cdiv(rows - first, gl.num_programs(0))):
        row = first + turn * gl.num_programs(0)
        after = gl.minimum(row + gl.num_programs(0), rows - 1)
        line = ZZ + row.to(gl.int64) * zz_row
        next_line = ZZ + after.to(gl.int64) * zz_row
        # What the row's end needs, and the next one's beginning.
        labelled = gl.load(Z + row.to(gl.int64) * (2 * zz_row) + gl.maximum(ids, 0), mask=ids >= 0, other=0.0)
        other_ids = _ids(IDS, row, num_labels, other)
        next_ids = _ids(IDS, after, num_labels, label)
        next_total = gl.load(TOTALS + after)

        sums = gl.zeros([CHUNK], gl.float32, LINE)
        for group in range(GROUPS):
            begin = group * (AHEAD * CHUNK)
            here = line + begin + AHEAD * CHUNK
            if SOON > 0:  # the group that is SOON later; a row's last one goes on to the row's end
                later = group + SOON
                whose = gl.where(later < GROUPS, line, next_line)
                later = gl.where(later < GROUPS, later, later - GROUPS)
                start = later * (AHEAD * CHUNK)
                _announce(whose + start, gl.where(later < GROUPS - 1, AHEAD * CHUNK, width - start))
            there = here if TAIL >= AHEAD else gl.where(group < GROUPS - 1, here, next_line - TAIL * CHUNK)
            for k in gl.static_range(AHEAD):
                words = coming[k]
                ask = (here if k < TAIL else there) + k * CHUNK
                left = gl.where(group < GROUPS - 1, CHUNK, part_width)  # of the row's last chunk, if this asks for it
                asked = _ask(ask, left, CHUNK, LINE, GROUPS * AHEAD + k == PART)
                coming = coming[:k] + (asked,) + coming[k + 1 :]  # noqa: RUF005
                column = 2 * (begin + k * CHUNK + lane)
                sums = _keep(words, held[k].index(group), sums, column, curve, sure, extra, valid, False, SAMPLED)
        for c in gl.static_range(GROUPS * AHEAD, CHUNKS):
            words = coming[0]
            ask = (line if c + AHEAD < CHUNKS else next_line) + (c + AHEAD) % CHUNKS * CHUNK
            coming = coming[1:] + (_ask(ask, part_width, CHUNK, LINE, (c + AHEAD) % CHUNKS == PART),)  # noqa: RUF005
            place = held[c % AHEAD].index(c // AHEAD)
            column = 2 * (c * CHUNK + lane)
            sums = _keep(words, place, sums, column, curve, sure, extra, valid, c >= FULL, SAMPLED)
        norm = gl.sum(sums, 0)

        scale = total * factor / norm
        to = row.to(gl.int64) * gg_row
        for group in range(GROUPS):
            for k in gl.static_range(AHEAD):
                begin = group * (AHEAD * CHUNK) + k * CHUNK
                _give(GG + to + begin, held[k].index(group), scale, CHUNK, LINE, False)
        for c in gl.static_range(GROUPS * AHEAD, CHUNKS):
            place = held[c % AHEAD].index(c // AHEAD)
            _give(GG + to + c * CHUNK, place, scale, part_width, LINE, c == PART)

        hits = gl.where(ids[:, None] == other_ids[None, :], other_weights[None, :], 0.0)
        loss, g = _at_labels(labelled, label_weights, gl.sum(hits, 1), norm, total, curve, factor, ids >= 0)
        gl.store(LOSSES + row, loss)
        gl.thread_barrier()  # other threads wrote these columns just now
        at = G + 2 * to + gl.maximum(ids, 0)
        if GG.dtype.element_ty == gl.int16:
            gl.store(at, _e5m2_pairs(g, g).to(gl.uint8), mask=ids >= 0)
        else:
            gl.store(at, g.to(gl.bfloat16), mask=ids >= 0)
        ids, total = next_ids, next_total


def softcap_xent_resident(
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    totals: Tensor,
    losses: Tensor,
    grad: Tensor,
    tile: HeldRow,
    *,
    curve: tuple[float, float, float],
    valid: int,
    inverse: float,
    rest: Tensor | None = None,
) -> None:
    """As `softcap_xent.softcap_xent`, for what `HeldRow.fits`: bf16 logits, grad in bf16 or E5M2, a bounded cap."""
    rows, columns = logits.shape
    if not rows:
        return
    chunk = 256 * tile.warps
    chunks = ceil_div(columns, chunk)
    ahead = min(tile.ahead, chunks)
    amplitude, slope, offset = curve
    fp8 = grad.element_size() == 1
    with torch.cuda.device_of(logits):
        _softcap_xent_resident_kernel[(min(rows, 2 * multiprocessors(logits.device)),)](
            logits, logits.view(torch.int32), grad.view(torch.uint8) if fp8 else grad,
            grad.view(torch.int16 if fp8 else torch.int32), losses, ids, weights, totals,
            totals if rest is None else rest.contiguous(),
            amplitude / math.log(2), slope, offset, amplitude * slope * inverse,
            rows, valid, columns // 2, logits.stride(0) // 2, grad.stride(0) // 2, ids.shape[1],
            LABELS=1 << max(1, (ids.shape[1] - 1).bit_length()), WHOLE=columns // chunk,
            FULL=valid // chunk, CHUNKS=chunks, AHEAD=ahead, SOON=min(tile.soon, valid // chunk // ahead),
            SAMPLED=rest is not None,
            num_warps=tile.warps, maxnreg=65_536 // (2 * 32 * tile.warps),
        )  # fmt: skip
