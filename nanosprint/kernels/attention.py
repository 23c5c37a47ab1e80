"""Causal attention over documents laid end to end, with a window; tiles are cut from the packed axis.

Query t sees the keys first_key(t) to t, one unbroken run, and first_key never falls. So a tile of queries needs the
keys from the first one of its first query to its own end, whatever documents it touches: no block is empty, none is
padded, and only blocks that a border crosses are masked. A library that tiles every document apart starts
(documents x blocks of the longest one x heads) programs, of which most find nothing to do. Seen from a key the picture
is the mirror image: key j is seen by the queries j to last_query(j).

Scores are never stored (FlashAttention-2: Dao 2023, arXiv:2307.08691; its backward pass recomputes them from the
log-sum-exp). The backward pass has two kernels without atomics, so two runs agree bit for bit: `gradient_q` goes over
tiles of queries and leaves each query's sum(out x grad) for `gradient_kv`, which goes over tiles of keys.

An average query of web text at window 640 sees 269 keys, so a program does few rounds, and what comes before and after
them counts. Every program finds the documents of its own tokens by bisection, which saves a launch. Neighbouring
programs are the heads of one tile: the memory lines that hold a token's heads are read at one time.

Tiles that say `overlap` go to `attention_hopper`, where these kernels stand again for Hopper alone.

Shapes: T tokens, H heads, K head size, D entries of cu_seqlens. Exponentials are powers of two, the scale folded in.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanosprint.kernels.tuning import AttentionTile

_LOG2E = 1 / math.log(2)
_PADDING = 128  # of what passes from `gradient_q` to `gradient_kv`: no tile is larger


@triton.jit
def _bisect(CU, entries, own, step, token):
    there = own + step
    start = tl.load(CU + there, mask=there < entries, other=2147483647)
    return tl.where(start <= token, there, own)


@triton.jit
def _documents(CU, entries, bits, tokens, low, high):
    """Index of the last entry of CU that is at most each of `tokens`, `low` and `high`: its document.

    Of several that start at one token, all but one empty, it is the last. A program needs this of its tokens and, as
    scalars, of the first and the last of them: loops whose bounds come out of a reduction are not pipelined (seen in
    Triton 3.9). The three searches wait for memory together.
    """
    own, own_low, own_high = tokens * 0, low * 0, high * 0
    for i in range(bits):
        step = 1 << (bits - 1 - i)
        own = _bisect(CU, entries, own, step, tokens)
        own_low = _bisect(CU, entries, own_low, step, low)
        own_high = _bisect(CU, entries, own_high, step, high)
    return own, own_low, own_high


@triton.jit
def _first_keys(CU, entries, bits, window, start, T, ROWS: tl.constexpr):
    """First key that each of ROWS queries from `start` on sees, and of the first and the last of them as scalars."""
    tokens = tl.minimum(start + tl.arange(0, ROWS), T - 1)
    high = tl.minimum(start + ROWS - 1, T - 1)
    own, own_low, own_high = _documents(CU, entries, bits, tokens, start, high)
    first = tl.maximum(tl.load(CU + own), tokens - window)
    lowest = tl.maximum(tl.load(CU + own_low), start - window)
    highest = tl.maximum(tl.load(CU + own_high), high - window)
    return first, lowest, highest


@triton.jit
def _last_queries(CU, entries, bits, window, start, T, ROWS: tl.constexpr):
    """Last query that sees each of ROWS keys from `start` on, and of the first and the last of them as scalars."""
    tokens = tl.minimum(start + tl.arange(0, ROWS), T - 1)
    high = tl.minimum(start + ROWS - 1, T - 1)
    own, own_low, own_high = _documents(CU, entries, bits, tokens, start, high)
    last = tl.minimum(tl.load(CU + own + 1) - 1, tokens + window)
    earliest = tl.minimum(tl.load(CU + own_low + 1) - 1, start + window)
    latest = tl.minimum(tl.load(CU + own_high + 1) - 1, high + window)
    return last, earliest, latest


@triton.jit
def _rows(X, row, column, stride, last, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """ROWS tokens of one head. What lies past the last token repeats it, or is 0: finite, and nobody sees it."""
    if DESCRIPTORS:
        block = X.load([row, column])
    else:
        near = tl.minimum(tl.arange(0, ROWS), last - row)
        start = X + (tl.cast(row, tl.int64) * stride + column)
        block = tl.load(start + near[:, None] * stride + tl.arange(0, COLUMNS)[None, :])
    return block


@triton.jit
def _store_rows(X, values, row, column, stride, T, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    start = X + (tl.cast(row, tl.int64) * stride + column)
    inside = (row + rows < T)[:, None]
    at = start + rows[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    tl.store(at, values.to(X.dtype.element_ty), mask=inside)


@triton.jit
def _hide(scores, low, at, high, crossed, BRANCH: tl.constexpr):
    """Minus infinity in place of scores, unless low <= at <= high.

    Not merely a large number: the product with the scale and the difference behind it become one instruction, in which
    the product is not rounded, and what rounding took from 1e30 is large enough to overflow the exponential.

    `crossed` says whether a border runs through this block at all; without BRANCH nobody asks.
    """
    if BRANCH:
        if crossed:
            scores = tl.where((low <= at) & (at <= high), scores, float("-inf"))
    else:
        scores = tl.where((low <= at) & (at <= high), scores, float("-inf"))
    return scores


@triton.jit(do_not_specialize=["T", "entries", "bits", "window"])
def _attention_forward_kernel(
    Q, K, V, OUT, LSE, CU, q_row, k_row, v_row, out_row, T, H, entries, bits, window, scale2,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BRANCH: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    start = tl.program_id(0) // H * QUERIES
    column = head * HEAD
    rows = start + tl.arange(0, QUERIES)
    first, lowest, highest = _first_keys(CU, entries, bits, window, start, T, QUERIES)

    q = _rows(Q, start, column, q_row, T - 1, QUERIES, HEAD, DESCRIPTORS)
    total = tl.zeros((QUERIES, HEAD), tl.float32)
    norm = tl.zeros((QUERIES,), tl.float32)
    top = tl.full((QUERIES,), -1e30, tl.float32)
    for n in tl.range(lowest, tl.minimum(start + QUERIES, T), KEYS):
        k = _rows(K, n, column, k_row, T - 1, KEYS, HEAD, DESCRIPTORS)
        scores = tl.dot(q, k.T, input_precision="ieee")
        keys = n + tl.arange(0, KEYS)
        crossed = (n < highest) | (n + KEYS > start + 1)
        scores = _hide(scores, first[:, None], keys[None, :], rows[:, None], crossed, BRANCH)
        # `top` is finite from the start, so that a row that has seen nothing yet makes no NaN.
        higher = tl.maximum(top, tl.max(scores, 1) * scale2)
        p = tl.exp2(scores * scale2 - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(p, 1)
        v = _rows(V, n, column, v_row, T - 1, KEYS, HEAD, DESCRIPTORS)
        total = tl.dot(p.to(v.dtype), v, total * fade[:, None], input_precision="ieee")
        top = higher

    _store_rows(OUT, total / norm[:, None], start, column, out_row, T, QUERIES, HEAD)
    lse = (top + tl.log2(norm)) * 0.6931471805599453
    tl.store(LSE + head.to(tl.int64) * T + rows, lse, mask=rows < T)


@triton.jit(do_not_specialize=["T", "entries", "bits", "window"])
def _attention_gradient_q_kernel(
    G, Q, K, V, OUT, LSE, NORMS, DQ, CU, g_row, q_row, k_row, v_row, out_row, padded,
    T, H, entries, bits, window, scale, scale2,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BRANCH: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    start = tl.program_id(0) // H * QUERIES
    column = head * HEAD
    rows = start + tl.arange(0, QUERIES)
    first, lowest, highest = _first_keys(CU, entries, bits, window, start, T, QUERIES)

    q = _rows(Q, start, column, q_row, T - 1, QUERIES, HEAD, DESCRIPTORS)
    g = _rows(G, start, column, g_row, T - 1, QUERIES, HEAD, DESCRIPTORS)
    out = _rows(OUT, start, column, out_row, T - 1, QUERIES, HEAD, DESCRIPTORS)
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    lse2 = tl.load(LSE + head.to(tl.int64) * T + tl.minimum(rows, T - 1)) * 1.4426950408889634
    NORMS += head.to(tl.int64) * (2 * padded)
    tl.store(NORMS + rows, lse2)
    tl.store(NORMS + padded + rows, delta)
    total = tl.zeros((QUERIES, HEAD), tl.float32)
    for n in tl.range(lowest, tl.minimum(start + QUERIES, T), KEYS):
        k = _rows(K, n, column, k_row, T - 1, KEYS, HEAD, DESCRIPTORS)
        v = _rows(V, n, column, v_row, T - 1, KEYS, HEAD, DESCRIPTORS)
        scores = tl.dot(q, k.T, input_precision="ieee")
        keys = n + tl.arange(0, KEYS)
        crossed = (n < highest) | (n + KEYS > start + 1)
        scores = _hide(scores, first[:, None], keys[None, :], rows[:, None], crossed, BRANCH)
        p = tl.exp2(scores * scale2 - lse2[:, None])
        dp = tl.dot(g, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        total = tl.dot(ds.to(k.dtype), k, total, input_precision="ieee")
    _store_rows(DQ, total * scale, start, column, H * HEAD, T, QUERIES, HEAD)


@triton.jit(do_not_specialize=["T", "entries", "bits", "window"])
def _attention_gradient_kv_kernel(
    G, Q, K, V, NORMS, DK, DV, CU, g_row, q_row, k_row, v_row, padded,
    T, H, entries, bits, window, scale, scale2,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BRANCH: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    start = tl.program_id(0) // H * KEYS
    column = head * HEAD
    NORMS += head.to(tl.int64) * (2 * padded)
    keys = start + tl.arange(0, KEYS)
    last, earliest, latest = _last_queries(CU, entries, bits, window, start, T, KEYS)

    k = _rows(K, start, column, k_row, T - 1, KEYS, HEAD, DESCRIPTORS)
    v = _rows(V, start, column, v_row, T - 1, KEYS, HEAD, DESCRIPTORS)
    dk = tl.zeros((KEYS, HEAD), tl.float32)
    dv = tl.zeros((KEYS, HEAD), tl.float32)
    for m in tl.range(start, latest + 1, QUERIES):
        q = _rows(Q, m, column, q_row, T - 1, QUERIES, HEAD, DESCRIPTORS)
        g = _rows(G, m, column, g_row, T - 1, QUERIES, HEAD, DESCRIPTORS)
        queries = m + tl.arange(0, QUERIES)
        lse2 = tl.load(NORMS + queries)
        delta = tl.load(NORMS + padded + queries)
        scores = tl.dot(k, q.T, input_precision="ieee")  # (keys, queries), as all of this kernel
        crossed = (m < start + KEYS - 1) | (m + QUERIES - 1 > earliest)
        scores = _hide(scores, keys[:, None], queries[None, :], last[:, None], crossed, BRANCH)
        p = tl.exp2(scores * scale2 - lse2[None, :])
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
        dp = tl.dot(v, g.T, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    _store_rows(DK, dk * scale, start, column, H * HEAD, T, KEYS, HEAD)
    _store_rows(DV, dv, start, column, H * HEAD, T, KEYS, HEAD)


_KERNELS = {
    "forward": _attention_forward_kernel,
    "gradient_q": _attention_gradient_q_kernel,
    "gradient_kv": _attention_gradient_kv_kernel,
}


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float, tile: AttentionTile
) -> tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ) v and the log-sum-exp of the scores: (T, H, K) contiguous, and fp32 (H, T).

    q, k, v (T, H, K) of one dtype, K a power of two from 16 on; scale above 0. window: tokens to the left that a query
    sees, or -1. What lies side by side in memory is read as it is, other strides cost a copy.
    """
    T, H, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((H, T), dtype=torch.float32, device=q.device)
    q, k, v = _readable(q), _readable(k), _readable(v)
    rows, keys = tile.queries, tile.keys
    launch(
        "forward", triton.cdiv(T, rows), tile, q,
        _read(q, rows, tile), _read(k, keys, tile), _read(v, keys, tile), out, lse, cu_seqlens,
        q.stride(0), k.stride(0), v.stride(0), out.stride(0), *_numbers(q, cu_seqlens, window), scale * _LOG2E,
    )  # fmt: skip
    return out, lse


def gradient_q(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, window: int,
    scale: float, tile: AttentionTile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of q for `grad`, that of out, and for `gradient_kv` the norms of each query, fp32 (H, 2, padded T).

    Those are its log-sum-exp in units of ln 2, and delta = sum over K of out x grad. Queries past the last one, up to
    a multiple of 128, have finite ones: with rows that begin at multiples of 16 bytes and end with the last block, they
    are read in few instructions and without masks.
    """
    assert _PADDING % tile.queries == 0, tile
    T, H, _ = q.shape
    padded = triton.cdiv(T, _PADDING) * _PADDING
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    norms = torch.empty((H, 2, padded), dtype=torch.float32, device=q.device)
    grad, q, k, v, out = (_readable(t) for t in (grad, q, k, v, out))
    rows, keys = tile.queries, tile.keys
    launch(
        "gradient_q", triton.cdiv(padded, rows), tile, q,
        _read(grad, rows, tile), _read(q, rows, tile), _read(k, keys, tile), _read(v, keys, tile),
        out if tile.overlap else _read(out, rows, tile), lse, norms, dq, cu_seqlens,
        grad.stride(0), q.stride(0), k.stride(0), v.stride(0), out.stride(0), padded,
        *_numbers(q, cu_seqlens, window), scale, scale * _LOG2E,
    )  # fmt: skip
    return dq, norms


def gradient_kv(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, norms: Tensor, cu_seqlens: Tensor, window: int, scale: float,
    tile: AttentionTile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of k and v, given the norms that `gradient_q` returns."""
    # Blocks of queries begin at multiples of their size then, so the last one ends within the padding.
    assert tile.keys % tile.queries == 0, tile
    assert _PADDING % tile.keys == 0, tile
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    grad, q, k, v = (_readable(t) for t in (grad, q, k, v))
    rows, keys = tile.queries, tile.keys
    launch(
        "gradient_kv", triton.cdiv(len(q), keys), tile, q,
        _read(grad, rows, tile), _read(q, rows, tile), _read(k, keys, tile), _read(v, keys, tile),
        _read_norms(norms, rows, tile), dk, dv, cu_seqlens,
        grad.stride(0), q.stride(0), k.stride(0), v.stride(0), norms.size(2),
        *_numbers(q, cu_seqlens, window), scale, scale * _LOG2E,
    )  # fmt: skip
    return dk, dv


def _readable(t: Tensor) -> Tensor:
    """`t`, or a copy if its heads do not lie side by side or a token does not start at a multiple of 16 bytes."""
    H, K = t.shape[1:]
    aligned = t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0
    return t if aligned and t.stride(2) == 1 and (H == 1 or t.stride(1) == K) else t.contiguous()


def _read(t: Tensor, rows: int, tile: AttentionTile) -> Any:
    """What the kernel loads from: the tensor, or the description of blocks of `rows` tokens of one head."""
    T, H, K = t.shape
    block = [T, H * K], [t.stride(0), 1], [rows, K]
    if tile.overlap:
        from nanosprint.kernels import attention_hopper

        return attention_hopper.describe(t, *block)
    return TensorDescriptor(t, *block) if tile.descriptors else t


def _read_norms(norms: Tensor, rows: int, tile: AttentionTile) -> Any:
    """The same for those of `rows` queries."""
    if not tile.overlap:
        return norms
    from nanosprint.kernels import attention_hopper

    return attention_hopper.describe(norms, [norms.numel()], [1], [rows])


def _numbers(q: Tensor, cu_seqlens: Tensor, window: int) -> tuple[int, int, int, int, int]:
    """T, H, D, steps of a bisection of D entries, and the window, where none is one over everything."""
    T, H, _ = q.shape
    entries = cu_seqlens.numel()
    return T, H, entries, (entries - 1).bit_length(), T if window < 0 else min(window, T)


def launch(name: str, blocks: int, tile: AttentionTile, q: Tensor, *args: Any) -> Any:
    """`blocks` programs for every head. Returns the compiled kernel, whose resources a benchmark shows."""
    T, H, K = q.shape
    if not T:
        return None
    kernel, options = _kernel(name, tile)
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    with torch.cuda.device_of(q):  # Triton launches on the current device
        return kernel[(blocks * H,)](
            *args, HEAD=K, QUERIES=tile.queries, KEYS=tile.keys, num_warps=tile.warps, **options
        )


def _kernel(name: str, tile: AttentionTile) -> tuple[Any, dict[str, Any]]:
    """The kernel that a tile wants, and what only it is told."""
    if tile.overlap:
        from nanosprint.kernels import attention_hopper

        return attention_hopper.KERNELS[name], {"STAGES": tile.stages}
    return _KERNELS[name], {"num_stages": tile.stages, "BRANCH": tile.branch, "DESCRIPTORS": tile.descriptors}
