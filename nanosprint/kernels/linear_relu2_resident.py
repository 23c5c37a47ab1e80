"""The products of `linear_relu2` with the weights at rest: a block reads its columns of B once and keeps them.

With a width of 768 a tile of the product is a few steps long. Then two things cost as much as the products themselves:
operands that come from L2 again for every tile, and what is done with a finished tile while the tensor cores wait. Here

- a block holds `columns` rows of B with all of K in shared memory, 192 of its 227 KiB, and only rows of A stream past;
- three kinds of warps share it. One warp fetches rows of A with the copy engine. Two groups of four take turns: tile
  after tile, one multiplies while the other writes;
- no shared memory is left to stage results, so they leave from registers. A thread of a warp-group product holds two
  neighbouring columns of each eight. B's rows are therefore fetched in another order (a descriptor of five axes does
  that), after which the same registers hold eight neighbouring columns: 16 bytes of bf16 and 8 of FP8 a store.

That takes Gluon, Triton's lower level, which places shared memory and warps by hand; it has no interpreter. Hopper's
instructions only. (Groups of warps that take turns: CUTLASS's "ping-pong" schedule; FlashAttention-3,
arXiv:2407.08608, has them for attention.)
"""

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

from nanosprint.kernels.parts import FLOATS, ceil_div, larger, multiprocessors
from nanosprint.kernels.tuning import RELU2_PEAKS, Resident

ROWS = gl.constexpr(64)  # of a tile: what one warp-group instruction multiplies


@gluon.constexpr_function
def product_layout(columns, bits):
    """How four warps hold a tile as warp-group products leave it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def store_layout(columns):
    """The same registers, with eight neighbouring columns in a thread and 32 in each four of them."""
    far = [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *far],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.constexpr_function
def turned_layout(columns, step):
    """From `store_layout`, step 0, to 16 neighbouring rows in a thread, step 3, all within a warp.

    In each step four neighbouring codes, which fill a register, stay together, and one bit of the lane changes places
    with one of the register: a shuffle of every other register.
    """
    far = [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    c1, c2, c4, r1, r2, r4, r8 = [0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0]
    regs, lanes = (
        ([c1, c2, r1, r8], [c4, r2, r4]),
        ([c1, r1, r2, r8], [c4, c2, r4]),
        ([r1, r2, r4, r8], [c4, c2, c1]),
    )[step]
    return gl.DistributedLinearLayout(
        reg_bases=[*regs, *far],
        lane_bases=[[0, 8], [0, 16], *lanes],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _announce(X, tile, T, COLS: gl.constexpr, K: gl.constexpr):
    """Have L2 fetch this block's share of a tile of X (T, K), which is one stretch of memory."""
    LINE: gl.constexpr = 128 // (X.dtype.element_ty.primitive_bitwidth // 8)
    ROW: gl.constexpr = K // LINE
    SHARE: gl.constexpr = (ROWS * ROW + COLS - 1) // COLS
    begin = tile * ROWS * ROW + gl.program_id(0) % COLS * SHARE
    for part in gl.static_range(0, SHARE, 32):
        line = begin + part + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        at = gl.minimum(line, T * ROW - 1).to(gl.int64) * LINE
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [X + at], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _fetch(
    A, B, X, rows_A, rows_B, full, free, ready, T, COLS: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr
):
    """One warp: B once, rows of A into the ring as soon as there is room.

    The ring is two thirds of a tile, which may be less than the way from memory takes. So the blocks that will read the
    same rows announce them to L2 beforehand, AHEAD tiles of theirs, each a share. X is A as a pointer.
    """
    STEPS: gl.constexpr = rows_B.shape[0]
    STAGES: gl.constexpr = rows_A.shape[0]
    BLOCK_K: gl.constexpr = rows_A.shape[2]
    COLUMNS: gl.constexpr = rows_B.shape[1] * 32
    WIDTH: gl.constexpr = A.dtype.primitive_bitwidth // 8
    group = gl.program_id(0) // COLS
    col = gl.program_id(0) % COLS * COLUMNS
    count = 0
    for tile in range(group, gl.cdiv(T, ROWS), GROUPS):
        if AHEAD > 0:
            _announce(X, tile + AHEAD * GROUPS, T, COLS, STEPS * BLOCK_K)
        for k in gl.static_range(STEPS):
            first = tile == group
            mbarrier.expect(ready.index(k), COLUMNS * BLOCK_K * WIDTH, pred=first)
            tma.async_copy_global_to_shared(
                B, [col // 32, 0, 0, 0, k * BLOCK_K], ready.index(k), rows_B.index(k), pred=first
            )
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), ROWS * BLOCK_K * WIDTH)
            tma.async_copy_global_to_shared(A, [tile * ROWS, k * BLOCK_K], full.index(stage), rows_A.index(stage))
            count += 1


@gluon.jit
def _multiply(rows_A, rows_B, full, free, ready, mine, others, phase, count):
    """One tile of A B^T, (64, columns), columns in the order in which B's rows were fetched.

    A barrier knows the parity of its phase only, so nobody may wait for a piece before the one that had its place in
    the ring has come. The other group has seen all of those when it hands over: `mine` is completed by it, `others` by
    this one, when the last products are under way.
    """
    STEPS: gl.constexpr = rows_B.shape[0]
    STAGES: gl.constexpr = rows_A.shape[0]
    BLOCK_K: gl.constexpr = rows_A.shape[2]
    COLUMNS: gl.constexpr = rows_B.shape[1] * 32
    layout: gl.constexpr = product_layout(COLUMNS, rows_A.dtype.primitive_bitwidth)
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    mbarrier.wait(mine, phase)
    for k in range(STEPS):  # not unrolled: the descriptors of all steps would fill the registers
        stage = (count + k) % STAGES
        mbarrier.wait(ready.index(k), 0)
        mbarrier.wait(full.index(stage), (count + k) // STAGES & 1)
        b = rows_B.index(k).reshape([COLUMNS, BLOCK_K]).permute([1, 0])
        total = warpgroup_mma(rows_A.index(stage), b, total, use_acc=k > 0, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(free.index((count + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    mbarrier.arrive(others, count=1)
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(free.index((count + STEPS - 1) % STAGES), count=1)
    return total


@gluon.jit
def _store_turned(TURNED, code, row, column, width):
    """A tile of codes to rows from `column` and columns from `row` on of TURNED, which is `width` wide.

    By shuffles, since no shared memory is left. Rows beyond the last one are of zeros: so is what they leave.
    """
    layout: gl.constexpr = turned_layout(code.shape[1], 2)
    for step in gl.static_range(3):
        code = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [code], dtype=gl.uint8, is_pure=True, pack=4)
        code = gl.convert_layout(code, turned_layout(code.shape[1], step))
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, code.shape[1], gl.SliceLayout(0, layout))
    to = TURNED + (column.to(gl.int64) * width + row)
    gl.store(to + (c * width)[None, :] + r[:, None], code, mask=(r < width - row)[:, None])


@gluon.jit
def _take_turns(
    rows_A, rows_B, full, free, ready, order, POST, OUT, OUT8, TURNED, peaks, a_scale, b_scale, post_scale, out_scale,
    T, WHO: gl.constexpr, COLS: gl.constexpr, GROUPS: gl.constexpr, PEAKS: gl.constexpr, SCALED: gl.constexpr,
    BACKWARD: gl.constexpr, EMIT: gl.constexpr, TURN: gl.constexpr, PEAK: gl.constexpr, DTYPE: gl.constexpr,
    DTYPE8: gl.constexpr,
):  # fmt: skip
    """Four warps: every other tile of the block. A tile of POST is read before the products: its way is hidden, too."""
    STEPS: gl.constexpr = rows_B.shape[0]
    COLUMNS: gl.constexpr = rows_B.shape[1] * 32
    N: gl.constexpr = COLS * COLUMNS
    layout: gl.constexpr = store_layout(COLUMNS)
    scale = gl.load(a_scale) * gl.load(b_scale) if SCALED else 1.0
    if BACKWARD:
        scale *= 2.0 * gl.sqrt(gl.load(post_scale)) if TURN else 2.0
    inverse = gl.div_rn(1.0, gl.load(out_scale)) if EMIT else 1.0  # as `linear_relu2._inverse`
    group = gl.program_id(0) // COLS
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    at = row[:, None] * N + column[None, :]
    base = gl.program_id(0) % COLS * COLUMNS
    peak = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    turns = gl.cdiv(gl.cdiv(T, ROWS) - group, GROUPS)
    for turn in range(WHO, turns, 2):
        begin = (group + turn * GROUPS) * ROWS
        begin_at = begin.to(gl.int64) * N + base
        inside = (row < T - begin)[:, None]
        if BACKWARD:
            post = gl.load(POST + begin_at + at, mask=inside, other=0)
        phase = (turn // 2 & 1) ^ (1 - WHO)  # of the one whose first turn it is, that before the first is over
        total = _multiply(
            rows_A, rows_B, full, free, ready, order.index(WHO), order.index(1 - WHO), phase, turn * STEPS
        )
        total = total.reshape([ROWS, COLUMNS // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, COLUMNS])
        total = gl.convert_layout(total, layout) * scale
        if BACKWARD:
            if TURN:
                post = post.to(gl.float8e4nv, bitcast=True)
            result = (gl.sqrt(post.to(gl.float32)) * total).to(DTYPE)
        else:
            root = larger(total.to(DTYPE).to(gl.float32), 0.0)
            result = (root * root).to(DTYPE)
            if PEAK:
                peak = larger(peak, gl.reduce(result.to(gl.float32), 1, larger))
        if not TURN:
            gl.store(OUT + begin_at + at, result, mask=inside)
        if EMIT:
            code = (result.to(gl.float32) * inverse).to(DTYPE8)  # clamps, and keeps NaN
            gl.store(OUT8 + begin_at + at, code, mask=inside)
            if TURN:
                _store_turned(TURNED, code.to(gl.uint8, bitcast=True), begin, base, (T + 15) // 16 * 16)
    if PEAK:
        gl.store(peaks + gl.program_id(0) * 2 + WHO, gl.reduce(peak, 0, larger))
        if WHO == 0 and gl.program_id(0) == 0:
            slot = gl.arange(0, PEAKS, gl.BlockedLayout([1], [32], [4], [0]))
            gl.store(peaks + slot, gl.zeros_like(slot).to(gl.float32), mask=slot >= 2 * COLS * GROUPS)


@gluon.jit(do_not_specialize=["T"])
def _relu2_resident_kernel(
    A, B, X, POST, OUT, OUT8, TURNED, peaks, a_scale, b_scale, post_scale, out_scale, T, K: gl.constexpr,
    COLS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PEAKS: gl.constexpr, SCALED: gl.constexpr,
    BACKWARD: gl.constexpr, EMIT: gl.constexpr, TURN: gl.constexpr, PEAK: gl.constexpr, AHEAD: gl.constexpr,
    DTYPE: gl.constexpr, DTYPE8: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = A.block_shape[1]
    STEPS: gl.constexpr = K // BLOCK_K
    rows_A = gl.allocate_shared_memory(A.dtype, [STAGES] + A.block_shape, A.layout)  # noqa: RUF005
    rows_B = gl.allocate_shared_memory(B.dtype, [STEPS] + B.block_shape, B.layout)  # noqa: RUF005 (Gluon knows no star)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STEPS, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(2):
        mbarrier.init(order.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for k in gl.static_range(STEPS):
        mbarrier.init(ready.index(k), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_take_turns, (rows_A, rows_B, full, free, ready, order, POST, OUT, OUT8, TURNED, peaks, a_scale, b_scale,
                           post_scale, out_scale, T, 0, COLS, GROUPS, PEAKS, SCALED, BACKWARD, EMIT, TURN, PEAK,
                           DTYPE, DTYPE8)),
            (_take_turns, (rows_A, rows_B, full, free, ready, order, POST, OUT, OUT8, TURNED, peaks, a_scale, b_scale,
                           post_scale, out_scale, T, 1, COLS, GROUPS, PEAKS, SCALED, BACKWARD, EMIT, TURN, PEAK,
                           DTYPE, DTYPE8)),
            (_fetch, (A, B, X, rows_A, rows_B, full, free, ready, T, COLS, GROUPS, AHEAD)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def relu2_resident(
    A: Tensor, B: Tensor, out: Tensor | None, tile: Resident, *, scales: tuple[Tensor, Tensor] | None = None,
    post: Tensor | None = None, post_scale: Tensor | None = None, out8: Tensor | None = None,
    out_scale: Tensor | None = None, turned: Tensor | None = None, peaks: Tensor | None = None,
) -> None:  # fmt: skip
    """As `linear_relu2.relu2_product`, for what `Resident.fits`: out (T, N), A (T, K), B (N, K), out8 in FP8.

    With `turned` (N, T up to a multiple of 16), which becomes out8 transposed and zeros behind it, there is no `out`,
    and nothing is rounded before it is quantised. `post` is then E4M3 codes for `post_scale`.
    """
    (T, K), (N, _) = A.shape, B.shape
    assert all(t.is_contiguous() for t in (A, B, out, post, out8, turned) if t is not None)
    assert tile.fits((N, K), A.element_size()), (A.shape, B.shape, tile)
    assert post is None or peaks is None
    assert (out8 is None) == (out_scale is None)
    assert (out is None) == (turned is not None)
    assert turned is None or (out8 is not None and turned.shape == (N, ceil_div(T, 16) * 16))
    assert (post_scale is None) == (post is None or turned is None)
    if not T:
        return
    columns = N // tile.columns
    groups = max(1, min(multiprocessors(A.device) // columns, ceil_div(T, 64)))
    assert peaks is None or 2 * columns * groups <= RELU2_PEAKS
    bits = 8 * A.element_size()
    rows = TensorDescriptor(A, [T, K], [K, 1], [64, tile.k], gl.NVMMASharedLayout(128, bits, 2))
    weights = TensorDescriptor(B, *five_axes(N, K), [tile.columns // 32, 4, 4, 2, tile.k],
                               gl.NVMMASharedLayout(128, bits, 5))  # fmt: skip
    a_scale, b_scale = scales or (None, None)
    with torch.cuda.device_of(A):
        _relu2_resident_kernel[(columns * groups,)](
            rows, weights, A, _bytes(post), out, out8, _bytes(turned), peaks, a_scale, b_scale, post_scale, out_scale,
            T, K, COLS=columns, GROUPS=groups, STAGES=tile.stages, PEAKS=RELU2_PEAKS, SCALED=scales is not None,
            BACKWARD=post is not None, EMIT=out8 is not None, TURN=turned is not None, PEAK=peaks is not None,
            AHEAD=tile.ahead, DTYPE=FLOATS[torch.float32 if out is None else out.dtype],
            DTYPE8=None if out8 is None else FLOATS[out8.dtype], REGISTERS=tile.registers, num_warps=4,
        )  # fmt: skip


def _bytes(codes: Tensor | None) -> Tensor | None:
    """FP8 as bytes, which masked loads and shuffles take; anything else as it is."""
    return codes.view(torch.uint8) if codes is not None and codes.element_size() == 1 else codes


def five_axes(N: int, K: int) -> tuple[list[int], list[int]]:
    """Shape and strides of a view of (N, K) whose rows, taken in order, are those of each 32 as registers want them.

    A thread has columns 2 q and 2 q + 1 of each 8 of a product. Its rows of B should be 8 q .. 8 q + 7 of each 32.
    """
    return [N // 32, 4, 4, 2, K], [32 * K, 2 * K, 8 * K, K, 1]
