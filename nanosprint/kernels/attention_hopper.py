"""The kernels of `nanosprint.kernels.attention` again, with the order of Hopper's asynchronous products written down.

Triton waits for a product as soon as it has begun, unless it only adds to an accumulator, and with two stages asks for
the next block at the end of a round, when it is needed. Here (Gluon, the layer below Triton) a round begins both of its
products of scores before it waits for the first, so that exponentials run under the second, and asks for the next block
as soon as the previous round's last product is through, a whole round early. Keys come from the last to the first, so
that the first blocks are on their way while documents are looked up. The forward pass weighs the values of one
block while it takes the exponentials of the next (both ideas: FlashAttention-3, Shah et al. 2024, arXiv:2407.08608).

Arguments, results and padding are those of `attention`, strides of what descriptors read unused. Nothing here runs in
Triton's interpreter: `attention` is what these kernels are compared with.

Shapes: T tokens, H heads, K head size, D entries of cu_seqlens.
"""

from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def _bisect(CU, entries, own, step, token):
    there = own + step
    start = gl.load(CU + there, mask=there < entries, other=2147483647)
    return gl.where(start <= token, there, own)


@gluon.jit
def _documents(CU, entries, bits, tokens, low, high):
    """As in `attention`: the documents of `tokens`, `low` and `high`."""
    own, own_low, own_high = tokens * 0, low * 0, high * 0
    for i in range(bits):
        step = 1 << (bits - 1 - i)
        own = _bisect(CU, entries, own, step, tokens)
        own_low = _bisect(CU, entries, own_low, step, low)
        own_high = _bisect(CU, entries, own_high, step, high)
    return own, own_low, own_high


@gluon.jit
def _first_keys(CU, entries, bits, window, start, T, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """First key that each of ROWS queries from `start` on sees, and of the first and the last of them as scalars."""
    tokens = gl.minimum(start + gl.arange(0, ROWS, LAYOUT), T - 1)
    high = gl.minimum(start + ROWS - 1, T - 1)
    low = gl.minimum(start, T - 1)
    own, own_low, own_high = _documents(CU, entries, bits, tokens, low, high)
    first = gl.maximum(gl.load(CU + own), tokens - window)
    return first, gl.maximum(gl.load(CU + own_low), low - window), gl.maximum(gl.load(CU + own_high), high - window)


@gluon.jit
def _last_queries(CU, entries, bits, window, start, T, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Last query that sees each of ROWS keys from `start` on, and of the first and the last of them as scalars."""
    tokens = gl.minimum(start + gl.arange(0, ROWS, LAYOUT), T - 1)
    high = gl.minimum(start + ROWS - 1, T - 1)
    own, own_low, own_high = _documents(CU, entries, bits, tokens, start, high)
    last = gl.minimum(gl.load(CU + own + 1) - 1, tokens + window)
    earliest = gl.minimum(gl.load(CU + own_low + 1) - 1, start + window)
    return last, earliest, gl.minimum(gl.load(CU + own_high + 1) - 1, high + window)


@gluon.jit
def _barriers(NUM: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _end(bars, NUM: gl.constexpr):
    """Give up barriers, after which their memory may hold something else.

    To be called last: the compiler puts scratch where a barrier has been waited for the last time, but until it is
    invalidated the hardware takes the place for a barrier. When the GPU turned from this kernel to another process and
    back, it wrote there, into the first of 64 deltas, and training ended in NaN.
    """
    for i in gl.static_range(NUM):
        mbarrier.invalidate(bars.index(i))


@gluon.jit
def _buffers(X, NUM: gl.constexpr):
    shape: gl.constexpr = [NUM] + X.block_type.shape  # noqa: RUF005  what Gluon compiles has no unpacking
    return gl.allocate_shared_memory(X.dtype, shape, X.layout)


@gluon.jit
def _fetch(X, row, column, bars, buffers, i, wanted, NUM: gl.constexpr):
    """Ask for the i-th block of X, if it is wanted."""
    bar = bars.index(i % NUM)
    mbarrier.expect(bar, X.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(X, [row, column], bar, buffers.index(i % NUM), pred=wanted)


@gluon.jit
def _fetch_pair(X, Y, row, column, bars, xs, ys, i, wanted, NUM: gl.constexpr):
    """Ask for the i-th block of both, if it is wanted; one barrier counts them in."""
    bar = bars.index(i % NUM)
    mbarrier.expect(bar, X.block_type.nbytes + Y.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(X, [row, column], bar, xs.index(i % NUM), pred=wanted)
    tma.async_copy_global_to_shared(Y, [row, column], bar, ys.index(i % NUM), pred=wanted)


@gluon.jit
def _fetch_queries(
    Q, G, NORMS, row, column, norms, padded, bars, qs, gs, lses, deltas, i, wanted, NUM: gl.constexpr
):  # fmt: skip
    """The same for queries, with their gradients and norms."""
    bar = bars.index(i % NUM)
    nbytes: gl.constexpr = Q.block_type.nbytes + G.block_type.nbytes + 2 * NORMS.block_type.nbytes
    mbarrier.expect(bar, nbytes, pred=wanted)
    tma.async_copy_global_to_shared(Q, [row, column], bar, qs.index(i % NUM), pred=wanted)
    tma.async_copy_global_to_shared(G, [row, column], bar, gs.index(i % NUM), pred=wanted)
    tma.async_copy_global_to_shared(NORMS, [norms + row], bar, lses.index(i % NUM), pred=wanted)
    tma.async_copy_global_to_shared(NORMS, [norms + padded + row], bar, deltas.index(i % NUM), pred=wanted)


@gluon.jit
def _arrived(bars, i, NUM: gl.constexpr):
    mbarrier.wait(bars.index(i % NUM), (i // NUM) & 1)


@gluon.jit
def _store_rows(X, values, row, column, stride, T, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    # A thread stores 16 bytes; a warp as many rows as fit.
    ACROSS: gl.constexpr = COLUMNS // 8 if COLUMNS // 8 < 32 else 32
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
    start = X + (row.to(gl.int64) * stride + column)
    at = start + rows[:, None] * stride + columns[None, :]
    wide = gl.convert_layout(values.to(X.dtype.element_ty), WIDE)
    gl.store(at, wide, mask=(row + rows < T)[:, None])


@gluon.jit
def _hide(scores, low, at, high, crossed):
    """Minus infinity in place of scores, unless low <= at <= high; nobody asks where no border runs through."""
    if crossed:
        scores = gl.where((low <= at) & (at <= high), scores, float("-inf"))
    return scores


@gluon.jit
def _softmax(scores, top, norm, scale2):
    """Powers of the scores, their new maximum and sum, and what older sums are to be multiplied by."""
    higher = gl.maximum(top, gl.max(scores, 1) * scale2)
    p = gl.exp2(scores * scale2 - higher[:, None])
    fade = gl.exp2(top - higher)
    return p, higher, norm * fade + gl.sum(p, 1), fade


@gluon.jit(do_not_specialize=["T", "entries", "bits", "window"])
def _attention_forward_kernel(
    Q, K, V, OUT, LSE, CU, q_row, k_row, v_row, out_row, T, H, entries, bits, window, scale2,
    HEAD: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    head = gl.program_id(0) % H
    start = gl.program_id(0) // H * QUERIES
    column = head * HEAD

    q = _buffers(Q, 1)
    ks, vs = _buffers(K, STAGES), _buffers(V, STAGES)
    q_bar, k_bars, v_bars = _barriers(1), _barriers(STAGES), _barriers(STAGES)
    fence_async_shared()  # the copy engine, too, sees that they have begun
    end = start + QUERIES - KEYS  # where the last block of keys begins, which comes first
    own: gl.constexpr = QUERIES // KEYS if QUERIES // KEYS < STAGES else STAGES
    _fetch(Q, start, column, q_bar, q, 0, True, 1)
    for i in gl.static_range(own):
        _fetch(K, end - i * KEYS, column, k_bars, ks, i, True, STAGES)
        _fetch(V, end - i * KEYS, column, v_bars, vs, i, True, STAGES)
    first, lowest, highest = _first_keys(CU, entries, bits, window, start, T, QUERIES, ROWS)
    rounds = gl.cdiv(start + QUERIES - lowest, KEYS)
    for i in gl.static_range(own, STAGES):
        _fetch(K, end - i * KEYS, column, k_bars, ks, i, i < rounds, STAGES)
        _fetch(V, end - i * KEYS, column, v_bars, vs, i, i < rounds, STAGES)

    rows = start + gl.arange(0, QUERIES, ROWS)
    keys = end + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros((QUERIES, KEYS), gl.float32, SCORES)
    total = gl.zeros((QUERIES, HEAD), gl.float32, TOTAL)
    # The maximum is finite from the start, so that a row that has seen nothing yet makes no NaN.
    top = gl.full((QUERIES,), -1e30, gl.float32, ROWS)
    norm = gl.zeros((QUERIES,), gl.float32, ROWS)
    _arrived(q_bar, 0, 1)
    _arrived(k_bars, 0, STAGES)
    scores = warpgroup_mma(q.index(0), ks.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _fetch(K, end - STAGES * KEYS, column, k_bars, ks, STAGES, rounds > STAGES, STAGES)
    scores = _hide(scores, first[:, None], keys[None, :], rows[:, None], True)
    p, top, norm, fade = _softmax(scores, top, norm, scale2)
    for i in range(1, rounds):
        n = end - i * KEYS
        left = gl.convert_layout(p.to(V.dtype), LEFT)
        _arrived(k_bars, i, STAGES)
        scores = warpgroup_mma(q.index(0), ks.index(i % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)
        _arrived(v_bars, i - 1, STAGES)
        coming = warpgroup_mma(left, vs.index((i - 1) % STAGES), total, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _fetch(K, n - STAGES * KEYS, column, k_bars, ks, i + STAGES, i + STAGES < rounds, STAGES)
        crossed = (n < highest) | (n + KEYS > start + 1)
        scores = _hide(scores, first[:, None], (keys - i * KEYS)[None, :], rows[:, None], crossed)
        p, top, norm, fade = _softmax(scores, top, norm, scale2)
        total = warpgroup_mma_wait(0, deps=(coming,))
        ahead = i - 1 + STAGES
        _fetch(V, end - ahead * KEYS, column, v_bars, vs, ahead, ahead < rounds, STAGES)
        total = total * gl.convert_layout(fade, gl.SliceLayout(1, TOTAL))[:, None]
    left = gl.convert_layout(p.to(V.dtype), LEFT)
    _arrived(v_bars, rounds - 1, STAGES)
    coming = warpgroup_mma(left, vs.index((rounds - 1) % STAGES), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(coming,))

    lse = (top + gl.log2(norm)) * 0.6931471805599453
    gl.store(LSE + head.to(gl.int64) * T + rows, lse, mask=rows < T)
    total = total / gl.convert_layout(norm, gl.SliceLayout(1, TOTAL))[:, None]
    _store_rows(OUT, total, start, column, out_row, T, QUERIES, HEAD)
    _end(q_bar, 1)
    _end(k_bars, STAGES)
    _end(v_bars, STAGES)


@gluon.jit(do_not_specialize=["T", "entries", "bits", "window"])
def _attention_gradient_q_kernel(
    G, Q, K, V, OUT, LSE, NORMS, DQ, CU, g_row, q_row, k_row, v_row, out_row, padded,
    T, H, entries, bits, window, scale, scale2,
    HEAD: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    head = gl.program_id(0) % H
    start = gl.program_id(0) // H * QUERIES
    column = head * HEAD

    q, g = _buffers(Q, 1), _buffers(G, 1)
    ks, vs = _buffers(K, STAGES), _buffers(V, STAGES)
    own_bar, bars = _barriers(1), _barriers(STAGES)
    fence_async_shared()
    end = start + QUERIES - KEYS  # as in the forward pass
    own: gl.constexpr = QUERIES // KEYS if QUERIES // KEYS < STAGES - 1 else STAGES - 1
    _fetch_pair(Q, G, start, column, own_bar, q, g, 0, True, 1)
    for i in gl.static_range(own):
        _fetch_pair(K, V, end - i * KEYS, column, bars, ks, vs, i, True, STAGES)
    first, lowest, highest = _first_keys(CU, entries, bits, window, start, T, QUERIES, ROWS)
    rounds = gl.cdiv(start + QUERIES - lowest, KEYS)
    for i in gl.static_range(own, STAGES - 1):
        _fetch_pair(K, V, end - i * KEYS, column, bars, ks, vs, i, i < rounds, STAGES)

    rows = start + gl.arange(0, QUERIES, ROWS)
    lse2 = gl.load(LSE + head.to(gl.int64) * T + gl.minimum(rows, T - 1)) * 1.4426950408889634
    keys = end + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros((QUERIES, KEYS), gl.float32, SCORES)
    total = warpgroup_mma_init(gl.zeros((QUERIES, HEAD), gl.float32, TOTAL))
    delta = gl.convert_layout(_delta(G, OUT, g, own_bar, start, column, out_row, T, QUERIES, HEAD), ROWS)
    NORMS += head.to(gl.int64) * (2 * padded)
    gl.store(NORMS + rows, lse2)
    gl.store(NORMS + padded + rows, delta)
    for i in range(rounds):
        n = end - i * KEYS
        k = ks.index(i % STAGES)
        _arrived(bars, i, STAGES)
        scores = warpgroup_mma(q.index(0), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        dp = warpgroup_mma(g.index(0), vs.index(i % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))  # and the last round's sum is through
        ahead = i + STAGES - 1
        _fetch_pair(K, V, end - ahead * KEYS, column, bars, ks, vs, ahead, ahead < rounds, STAGES)
        crossed = (n < highest) | (n + KEYS > start + 1)
        scores = _hide(scores, first[:, None], (keys - i * KEYS)[None, :], rows[:, None], crossed)
        p = gl.exp2(scores * scale2 - lse2[:, None])
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = p * (dp - delta[:, None])
        total = warpgroup_mma(gl.convert_layout(ds.to(K.dtype), LEFT), k, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    _store_rows(DQ, total * scale, start, column, H * HEAD, T, QUERIES, HEAD)
    _end(own_bar, 1)
    _end(bars, STAGES)


@gluon.jit
def _delta(G, OUT, g, bar, start, column, out_row, T, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Sum of out x grad of each of ROWS tokens, when `g` has arrived."""
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = COLUMNS // 8 if COLUMNS // 8 < 32 else 32
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    near = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)), gl.maximum(T - 1 - start, 0))
    origin = OUT + (gl.minimum(start, T - 1).to(gl.int64) * out_row + column)
    out = gl.load(origin + near[:, None] * out_row + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))[None, :])
    _arrived(bar, 0, 1)
    return gl.sum(g.index(0).load(WIDE).to(gl.float32) * out.to(gl.float32), 1)


@gluon.jit(do_not_specialize=["T", "entries", "bits", "window"])
def _attention_gradient_kv_kernel(
    G, Q, K, V, NORMS, DK, DV, CU, g_row, q_row, k_row, v_row, padded,
    T, H, entries, bits, window, scale, scale2,
    HEAD: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, QUERIES, 16])  # (keys, queries)
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    head = gl.program_id(0) % H
    start = gl.program_id(0) // H * KEYS
    column = head * HEAD

    k, v = _buffers(K, 1), _buffers(V, 1)
    qs, gs = _buffers(Q, STAGES), _buffers(G, STAGES)
    lses, deltas = _buffers(NORMS, STAGES), _buffers(NORMS, STAGES)
    norms = head * (2 * padded)
    own_bar, bars = _barriers(1), _barriers(STAGES)
    fence_async_shared()
    _fetch_pair(K, V, start, column, own_bar, k, v, 0, True, 1)
    # A key's first query is itself.
    _fetch_queries(Q, G, NORMS, start, column, norms, padded, bars, qs, gs, lses, deltas, 0, True, STAGES)
    last, earliest, latest = _last_queries(CU, entries, bits, window, start, T, KEYS, ROWS)
    rounds = gl.cdiv(latest + 1 - start, QUERIES)
    for i in gl.static_range(1, STAGES - 1):
        m = start + i * QUERIES
        _fetch_queries(Q, G, NORMS, m, column, norms, padded, bars, qs, gs, lses, deltas, i, i < rounds, STAGES)

    keys = start + gl.arange(0, KEYS, ROWS)
    queries = start + gl.arange(0, QUERIES, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros((KEYS, QUERIES), gl.float32, SCORES)
    dk = warpgroup_mma_init(gl.zeros((KEYS, HEAD), gl.float32, TOTAL))
    dv = warpgroup_mma_init(gl.zeros((KEYS, HEAD), gl.float32, TOTAL))
    _arrived(own_bar, 0, 1)
    for i in range(rounds):
        m = start + i * QUERIES
        q, g = qs.index(i % STAGES), gs.index(i % STAGES)
        _arrived(bars, i, STAGES)
        scores = warpgroup_mma(k.index(0), q.permute((1, 0)), nothing, use_acc=False, is_async=True)
        dp = warpgroup_mma(v.index(0), g.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))  # and the last round's sums are through
        ahead = i + STAGES - 1
        _fetch_queries(
            Q, G, NORMS, start + ahead * QUERIES, column, norms, padded, bars, qs, gs, lses, deltas, ahead,
            ahead < rounds, STAGES,
        )  # fmt: skip
        crossed = (m < start + KEYS - 1) | (m + QUERIES - 1 > earliest)
        scores = _hide(scores, keys[:, None], (queries + i * QUERIES)[None, :], last[:, None], crossed)
        lse2 = lses.index(i % STAGES).load(gl.SliceLayout(0, SCORES))
        p = gl.exp2(scores * scale2 - lse2[None, :])
        dv = warpgroup_mma(gl.convert_layout(p.to(G.dtype), LEFT), g, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        delta = deltas.index(i % STAGES).load(gl.SliceLayout(0, SCORES))
        ds = p * (dp - delta[None, :])
        dk = warpgroup_mma(gl.convert_layout(ds.to(Q.dtype), LEFT), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    _store_rows(DK, dk * scale, start, column, H * HEAD, T, KEYS, HEAD)
    _store_rows(DV, dv, start, column, H * HEAD, T, KEYS, HEAD)
    _end(own_bar, 1)
    _end(bars, STAGES)


KERNELS = {
    "forward": _attention_forward_kernel,
    "gradient_q": _attention_gradient_q_kernel,
    "gradient_kv": _attention_gradient_kv_kernel,
}


def describe(t: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """The description of blocks of `t`, seen as of `shape` and `strides`, swizzled as products want them."""
    bits = 8 * t.element_size()
    widest = block[-1] * bits // 8 if len(block) > 1 else 0
    return TensorDescriptor(t, shape, strides, block, _layout(min(128, widest), bits, len(block)))


@cache
def _layout(swizzle: int, bits: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)
