"""Products of many stacks of matrices in one launch, for the orthogonalisation on Hopper GPUs.

A stack's product by itself fills the card badly: 20 x 768 x 768 are 420 tiles of a symmetric result, 3.2 for each of
132 multiprocessors, which takes as long as 4, and every launch begins and ends with most of the card idle. Here a block
stays on each multiprocessor and takes what `polar_jobs` dealt it, tiles of all stacks, long ones first.

128 x 128 tiles by themselves ask L2 for more than it gives (a byte for 64 operations), so two that lie one above the
other are computed together and share the right operand (85). One warp fetches pieces of operands into a ring with the
copy engine. Two groups of four warps have a tile each and go on by themselves: as far as the ring reaches, one adds,
rounds and writes while the other has the tensor cores. A finished tile leaves through shared memory in halves, as it
is, turned, or both: symmetric results are computed once and stored twice.

Sums are in fp32 and rounded once, in the order of `symmetric`. Gluon, Triton's lower level, has no interpreter: the
tests run these functions on a CPU, each kind of warps in a thread of its own. Before Triton 3.6 there is none of this.
(Copying and multiplying warps: CUTLASS's warp-specialised kernels.)
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanosprint.kernels.parts import multiprocessors
from nanosprint.kernels.polar import divide
from nanosprint.kernels.polar_jobs import FIELDS, PIECE, TILE, Bank, Plan, plan
from nanosprint.kernels.tuning import GROUPED_STAGES

SIDE = gl.constexpr(TILE)  # rows and columns of a tile
STEP = gl.constexpr(PIECE)  # of the summed axis in a piece
NUMBERS = gl.constexpr(FIELDS)  # of a job


@gluon.constexpr_function
def tile_layout():
    """How four warps hold a tile as warp-group products leave it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])


@gluon.jit
def _fetch(P, Q, jobs, starts, rows_P, rows_Q, full, free, WIDTH: gl.constexpr, UPRIGHT: gl.constexpr):
    """One warp: the pieces of all tiles of this block, in order, as soon as there is room."""
    STAGES: gl.constexpr = rows_Q.shape[0]
    AROUND: gl.constexpr = WIDTH // STEP
    ONE: gl.constexpr = P.block_type.nbytes + Q.block_type.nbytes
    end = gl.load(starts + gl.program_id(0) + 1)
    count = 0
    for job in range(gl.load(starts + gl.program_id(0)), end):
        at = jobs + job * NUMBERS
        p_row, q_row, q_col, steps, stores = (
            gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)
        )  # fmt: skip
        upper, lower = stores & 3 != 0, stores & 12 != 0
        for step in range(steps):
            stage = count % STAGES
            come = full.index(stage)
            down = step // AROUND * WIDTH  # a matrix wider than the memory goes on in the block below
            column = step % AROUND * STEP
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(come, ONE + P.block_type.nbytes, pred=upper & lower)
            mbarrier.expect(come, ONE, pred=upper != lower)
            tma.async_copy_global_to_shared(P, [p_row + down, column], come, rows_P.index(2 * stage), pred=upper)
            tma.async_copy_global_to_shared(
                P, [p_row + SIDE + down, column], come, rows_P.index(2 * stage + 1), pred=lower
            )
            if UPRIGHT:
                tma.async_copy_global_to_shared(Q, [q_row + step * STEP, q_col], come, rows_Q.index(stage))
            else:
                tma.async_copy_global_to_shared(Q, [q_row + down, column], come, rows_Q.index(stage))
            count += 1


@gluon.jit
def _multiply(rows_P, rows_Q, full, free, count, steps, WHO: gl.constexpr, UPRIGHT: gl.constexpr):
    """One tile, whose pieces are the ring's from `count` on. The ring goes on when both groups are through with it."""
    STAGES: gl.constexpr = rows_Q.shape[0]
    total = gl.zeros([SIDE, SIDE], gl.float32, tile_layout())
    for step in range(steps):
        stage = (count + step) % STAGES
        mbarrier.wait(full.index(stage), (count + step) // STAGES & 1)
        q = rows_Q.index(stage)
        if not UPRIGHT:
            q = q.permute([1, 0])
        total = warpgroup_mma(rows_P.index(2 * stage + WHO), q, total, use_acc=step > 0, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(free.index((count + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(free.index((count + steps - 1) % STAGES), count=1)
    return total


@gluon.jit
def _skip(full, free, count, steps, STAGES: gl.constexpr):
    """Let pieces pass that only the other group wants."""
    for step in range(steps):
        stage = (count + step) % STAGES
        mbarrier.wait(full.index(stage), (count + step) // STAGES & 1)
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def _store(OUT, TURNED, result, place, stores, row, column, turned_row, turned_column):
    """A finished tile by halves of its columns. `place`: shared memory for one half."""
    HALF: gl.constexpr = SIDE // 2
    turned = place._reinterpret(place.dtype, [HALF, SIDE], TURNED.layout)
    halves = gl.split(result.reshape([SIDE, 2, HALF]).permute([0, 2, 1]))
    for h in gl.static_range(2):
        if stores & 1 != 0:
            tma.store_wait(0)  # what was stored last has left `place`
            place.store(halves[h])
            fence_async_shared()
            tma.async_copy_shared_to_global(OUT, [row, column + h * HALF], place)
        if stores & 2 != 0:
            tma.store_wait(0)
            turned.permute([1, 0]).store(halves[h])
            fence_async_shared()
            tma.async_copy_shared_to_global(TURNED, [turned_row + h * HALF, turned_column], turned)


@gluon.jit
def _compute(
    ADD, OUT, TURNED, jobs, starts, rows_P, rows_Q, places, full, free, alpha, beta,
    WHO: gl.constexpr, ADD_WIDTH: gl.constexpr, UPRIGHT: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """Four warps: the upper (WHO 0) or lower tile of each job. What is added is read before the products begin."""
    layout: gl.constexpr = tile_layout()
    r = gl.arange(0, SIDE, gl.SliceLayout(1, layout))
    c = gl.arange(0, SIDE, gl.SliceLayout(0, layout))
    inside = r[:, None] * ADD_WIDTH + c[None, :]
    end = gl.load(starts + gl.program_id(0) + 1)
    count = 0
    for job in range(gl.load(starts + gl.program_id(0)), end):
        at = jobs + job * NUMBERS
        steps = gl.load(at + 3)
        stores = gl.load(at + 4) >> (2 * WHO) & 3
        if stores != 0:
            row, column = gl.load(at + 5) + WHO * SIDE, gl.load(at + 6)
            turned_row, turned_column = gl.load(at + 7), gl.load(at + 8) + WHO * SIDE
            if ADDS:
                place = gl.multiple_of(row.to(gl.int64) * ADD_WIDTH + column, 16)  # loads of two numbers, not of one
                added = gl.load(ADD + place + inside)
            total = _multiply(rows_P, rows_Q, full, free, count, steps, WHO, UPRIGHT)
            total = total * alpha
            if ADDS:
                total = total + beta * added.to(gl.float32)
            result = total.to(OUT.dtype)
            _store(OUT, TURNED, result, places.index(WHO), stores, row, column, turned_row, turned_column)
        else:
            _skip(full, free, count, steps, rows_Q.shape[0])
        count += steps
    tma.store_wait(0)


@gluon.jit
def _grouped_product_kernel(
    P, Q, ADD, OUT, TURNED, jobs, starts, alpha, beta, WIDTH: gl.constexpr, ADD_WIDTH: gl.constexpr,
    STAGES: gl.constexpr, UPRIGHT: gl.constexpr, ADDS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """UPRIGHT: Q's pieces are rows of a factor; otherwise of its transpose. WIDTH, ADD_WIDTH: columns of P's and ADD's
    memory. P, Q, OUT, TURNED describe pieces and halves of tiles; ADD is a pointer."""
    rows_P = gl.allocate_shared_memory(P.dtype, [2 * STAGES] + P.block_shape, P.layout)  # noqa: RUF005
    rows_Q = gl.allocate_shared_memory(Q.dtype, [STAGES] + Q.block_shape, Q.layout)  # noqa: RUF005 (Gluon: no star)
    places = gl.allocate_shared_memory(OUT.dtype, [2] + OUT.block_shape, OUT.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (ADD, OUT, TURNED, jobs, starts, rows_P, rows_Q, places, full, free, alpha, beta, 0, ADD_WIDTH,
                        UPRIGHT, ADDS)),
            (_compute, (ADD, OUT, TURNED, jobs, starts, rows_P, rows_Q, places, full, free, alpha, beta, 1, ADD_WIDTH,
                        UPRIGHT, ADDS)),
            (_fetch, (P, Q, jobs, starts, rows_P, rows_Q, full, free, WIDTH, UPRIGHT)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


class _Tables(NamedTuple):
    """A plan, and each product's jobs and starts on a device, int32."""

    plan: Plan
    gram: tuple[Tensor, Tensor]
    polynomial: tuple[Tensor, Tensor]
    update: tuple[Tensor, Tensor]
    last: tuple[Tensor, Tensor]


@functools.lru_cache(maxsize=16)
def _tables(banks: tuple[Bank, ...], device: torch.device) -> _Tables:
    """Made at the first call, which waits for the device: whatever stream asks next, the tables are there."""
    programs = multiprocessors(device)
    found = plan(banks, programs)
    works = (found.gram, found.polynomial, found.update, found.last)
    jobs, starts = ([torch.tensor(work[i], dtype=torch.int32).to(device) for work in works] for i in range(2))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return _Tables(found, *zip(jobs, starts, strict=True))


def quintic_stacks(
    stacks: Sequence[Tensor], norms: Sequence[Tensor], margin: float, eps: float,
    coefficients: Sequence[tuple[float, float, float]],
) -> list[Tensor]:  # fmt: skip
    """`polar.quintic_steps` of each stack over margin * norms + eps, all in three launches a step.

    stacks: (B, M, N) in bf16, contiguous, on one Hopper GPU, of shapes that `polar_jobs.fits`; only read. norms:
    (B, 1, 1) each, in fp32. Returns views of one new tensor, of the stacks' shapes.
    """
    device = stacks[0].device
    banks = tuple(Bank(*G.shape) for G in stacks)
    tables = _tables(banks, device)
    sizes = tables.plan
    X, Y = (stacks[0].new_empty(sizes.rows, sizes.width) for _ in range(2))
    A, B = (stacks[0].new_empty(sizes.gram_rows, sizes.gram_width) for _ in range(2))
    for G, norm, part in zip(stacks, norms, _parts(X, banks), strict=True):
        divide(G, norm, margin, eps, out=part, turned=part.shape[1] > part.shape[2])
    for step, (a, b, c) in enumerate(coefficients):
        update = tables.last if step == len(coefficients) - 1 else tables.update
        grouped_product(X, X, A, tables.gram)
        grouped_product(A, A, B, tables.polynomial, alpha=c, add=A, beta=b)
        grouped_product(B, X, Y, update, upright=True, add=X, beta=a)
        X, Y = Y, X
    return _parts(X, banks)


def _parts(X: Tensor, banks: Sequence[Bank]) -> list[Tensor]:
    parts = X.split([bank.num * bank.rows for bank in banks])
    return [part.view(bank) for part, bank in zip(parts, banks, strict=True)]


def grouped_product(
    P: Tensor, Q: Tensor, out: Tensor, work: tuple[Tensor, Tensor], *, upright: bool = False, alpha: float = 1.0,
    add: Tensor | None = None, beta: float = 0.0,
) -> None:  # fmt: skip
    """The tiles that `work` (jobs and starts) names of alpha P Q + beta add, P Q^T unless `upright`, to out.

    All bf16, contiguous, of two axes. `out` overlaps no other; `add` has as many columns as `out`.
    """
    jobs, starts = work
    with torch.cuda.device_of(out):
        _grouped_product_kernel[(len(starts) - 1,)](
            _pieces(P, TILE, PIECE), _pieces(Q, *((PIECE, TILE) if upright else (TILE, PIECE))),
            out if add is None else add, _pieces(out, TILE, TILE // 2), _pieces(out, TILE // 2, TILE), jobs, starts,
            float(alpha), float(beta), WIDTH=P.shape[1], ADD_WIDTH=out.shape[1], STAGES=GROUPED_STAGES,
            UPRIGHT=upright, ADDS=add is not None, REGISTERS=240, num_warps=4,
        )  # fmt: skip


def _pieces(X: Tensor, rows: int, cols: int) -> Any:
    return TensorDescriptor(X, list(X.shape), list(X.stride()), [rows, cols], _swizzled())


@functools.cache
def _swizzled() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
