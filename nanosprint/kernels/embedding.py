"""The gradient of look-ups: rows added to the row of the table that they belong to, without atomic operations.

Positions come sorted by id, so that the rows of one id, a segment, follow each other. A program takes a run of RUN
positions and a block of columns, and adds up row after row in registers:

    positions   0 .. RUN-1      RUN .. 2 RUN-1      2 RUN .. 3 RUN-1
    ids         3 3 5 5 5 7     7 7 7 7 7 7         7 7 9 9 11 11
                --- ----- *     ***********         *** --- -----
    first pass  added     tail  tail                head    added

A segment within a run is added to its row of the table at once. Of one that crosses borders each run keeps a part in
fp32: the tail, which goes on in the next run, or the head, with which it ends. The second pass adds up the parts, in
the order of the runs, several at a time: an id that is a tenth of a text has hundreds. So each row of the table that
occurs is read and written once, and is the same in every run of the program; and an id that is everywhere costs what
any other costs.

Sums are rounded to the dtype of the table before they are added to it, as if they had been a tensor of their own.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.tuning import EMBEDDING

_PARTS, _COLUMNS, _WARPS = 16, 256, 4  # of a program of the second pass, which moves a tenth of the bytes


@triton.jit
def _choose(slot, tensors):
    """The tensor of a slot that is known when the program runs."""
    chosen = tensors[0]
    for k in tl.static_range(1, len(tensors)):
        if slot == k:
            chosen = tensors[k]
    return chosen


@triton.jit
def _load_row(G, ORDER, at, num, columns, inside, D):
    """The row of a sorted position, some row from `num` on; not widened yet, so that the next load need not wait."""
    token = tl.load(ORDER + at, mask=at < num, other=0).to(tl.int64)
    return tl.load(G + token * D + columns, mask=inside, other=0.0)


@triton.jit
def _load_old(OUT, here, following, before, columns, D, out_row):
    """What the table has in row `here`, where a segment within the run ends; early, so that nobody waits for it."""
    wanted = tl.where((here != following) & (here != before), D, 0)
    return tl.load(OUT + here.to(tl.int64) * out_row + columns, mask=columns < wanted, other=0.0)


@triton.jit
def _add_to(OUT, here, total, old, columns, inside, out_row):
    """The row `here` of the table becomes `old`, which it is, plus the rounded sum."""
    new = old.to(tl.float32) + total.to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + here.to(tl.int64) * out_row + columns, new.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _add_row(total, row, old, here, following, before, OUT, HEAD, columns, inside, out_row):
    """The sum with one more row of id `here`; where its segment ends, the sum is handed on and a new one begins."""
    total += row.to(tl.float32)
    if here != following:
        if here == before:
            tl.store(HEAD + columns, total, mask=inside)
        else:
            _add_to(OUT, here, total, old, columns, inside, out_row)
        total = tl.zeros_like(total)
    return total


@triton.jit
def _segments_kernel(
    GRADS, ORDER, IDS, OUTS, PARTS, num, D, out_row, runs,
    RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PARTS: (slots, 2, runs, D), tails and then heads."""
    blocks = tl.cdiv(D, BLOCK)
    run, slot = tl.program_id(0) // blocks, tl.program_id(1)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    G, OUT = _choose(slot, GRADS), _choose(slot, OUTS)
    TAIL = PARTS + (2 * slot * runs + run).to(tl.int64) * D
    HEAD = PARTS + ((2 * slot + 1) * runs + run).to(tl.int64) * D
    start = run * RUN
    stop = tl.minimum(start + RUN, num)
    before = tl.load(IDS + start - 1, mask=start > 0, other=-1)
    here = tl.load(IDS + start)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(start, stop, 4):
        # Behind the last position ids count as -1, which ends the last segment; what is summed then goes nowhere.
        id1 = tl.load(IDS + at + 1, mask=at + 1 < num, other=-1)
        id2 = tl.load(IDS + at + 2, mask=at + 2 < num, other=-1)
        id3 = tl.load(IDS + at + 3, mask=at + 3 < num, other=-1)
        id4 = tl.load(IDS + at + 4, mask=at + 4 < num, other=-1)
        row0 = _load_row(G, ORDER, at, num, columns, inside, D)
        row1 = _load_row(G, ORDER, at + 1, num, columns, inside, D)
        row2 = _load_row(G, ORDER, at + 2, num, columns, inside, D)
        row3 = _load_row(G, ORDER, at + 3, num, columns, inside, D)
        old0 = _load_old(OUT, here, id1, before, columns, D, out_row)
        old1 = _load_old(OUT, id1, id2, before, columns, D, out_row)
        old2 = _load_old(OUT, id2, id3, before, columns, D, out_row)
        old3 = _load_old(OUT, id3, id4, before, columns, D, out_row)
        total = _add_row(total, row0, old0, here, id1, before, OUT, HEAD, columns, inside, out_row)
        total = _add_row(total, row1, old1, id1, id2, before, OUT, HEAD, columns, inside, out_row)
        total = _add_row(total, row2, old2, id2, id3, before, OUT, HEAD, columns, inside, out_row)
        total = _add_row(total, row3, old3, id3, id4, before, OUT, HEAD, columns, inside, out_row)
        here = id4
    if tl.load(IDS + stop - 1) == here:
        tl.store(TAIL + columns, total, mask=inside)


@triton.jit
def _borders_kernel(
    IDS, OUTS, PARTS, num, D, out_row, runs,
    RUN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    run, slot = tl.program_id(0) + 1, tl.program_id(2)
    start = run * RUN
    stop = tl.minimum(start + RUN, num)
    here = tl.load(IDS + start)
    began_before = tl.load(IDS + start - 1) == here
    goes_on = tl.load(IDS + stop, mask=stop < num, other=-1) == here
    if began_before & (goes_on == 0):
        low, high = run * 0, start - 1  # the segment's first position, by halving what is left
        while low < high:
            middle = (low + high) // 2
            below = tl.load(IDS + middle) < here
            low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < D
        TAILS = PARTS + (2 * slot * runs).to(tl.int64) * D + columns
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(low // RUN, run, TOGETHER):
            part = first + tl.arange(0, TOGETHER)
            valid = (part < run)[:, None] & inside[None, :]
            total += tl.sum(tl.load(TAILS[None, :] + part.to(tl.int64)[:, None] * D, mask=valid, other=0.0), axis=0)
        total += tl.load(TAILS + (runs + run).to(tl.int64) * D, mask=inside, other=0.0)
        OUT = _choose(slot, OUTS)
        old = tl.load(OUT + here.to(tl.int64) * out_row + columns, mask=inside, other=0.0)
        _add_to(OUT, here, total, old, columns, inside, out_row)


def add_segments(grads: Sequence[Tensor], order: Tensor, sorted_ids: Tensor, outs: Sequence[Tensor]) -> None:
    """outs[k][i] += the sum of grads[k][order[p]] over all p with sorted_ids[p] = i, where there are any.

    grads: (N, D) each, contiguous, of one float dtype. order (N,): integers. sorted_ids (N,): int32, ascending. outs:
    (rows, D) each, one for each of grads, of one dtype, strides alike and 1 within a row; rows that do not occur are
    left as they are. Sums are in fp32, then rounded to the dtype of outs, and rounded again when they are added.
    """
    num, D = grads[0].shape
    if not num or not D:
        return
    run, block, warps = EMBEDDING
    assert run % 4 == 0, run
    runs, slots, out_row = triton.cdiv(num, run), len(grads), outs[0].stride(0)
    parts = torch.empty((slots, 2, runs, D), dtype=torch.float32, device=order.device)
    block = min(block, triton.next_power_of_2(D))
    wide = min(_COLUMNS, triton.next_power_of_2(D))
    with torch.cuda.device_of(order):
        _segments_kernel[(runs * triton.cdiv(D, block), slots)](
            tuple(grads), order, sorted_ids, tuple(outs), parts, num, D, out_row, runs,
            RUN=run, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        if runs > 1:
            _borders_kernel[(runs - 1, triton.cdiv(D, wide), slots)](
                sorted_ids, tuple(outs), parts, num, D, out_row, runs,
                RUN=run, TOGETHER=_PARTS, BLOCK=wide, num_warps=_WARPS,
            )  # fmt: skip
