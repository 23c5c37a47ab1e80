"""Composed attention maps in six kernels: every number is written by one block, hence deterministic.

A block of queries sees a band of keys, its own and the window before. Two kernels go over all heads of a band, whose
tiles stay in registers, and leave a map that all heads share; the others do one head of one block, tile by tile:

    maps     P_h = softmax(a q_h k_hᵀ);  A = sum_h w1_h P_h
    read     out_h = (w2_h A) v_h
    dmaps    D_h = g_h v_hᵀ;  dw2_h = rows' sums of D_h A;  dA = sum_h w2_h D_h;  then dw1_h = rows' sums of dA P_h
    dq       a dS_h k_h,   dS_h = P_h w1_h (dA - dw1_h), P_h from the log-sum-exp
    dk       a dS_hᵀ q_h
    dv       (w2_h A)ᵀ g_h

Why so many: with A or dA at hand a head needs no other, and a product whose operand is no other product of the same
kernel is laid out by Triton over all warps in both directions; else each warp holds whole rows, and the band spills.

A and dA are fp32, in bands: of the keys that a query sees, no two have the same remainder modulo PERIOD, a power of two
that is at least the window, so A[t, s] lies in row t, column s mod PERIOD. A band of 128 columns takes a third of the
memory of the queries. Columns that no visible key falls on are neither written nor read.

Tiles of q, k, v and g come through tensor descriptors, which fill what lies outside a row of the batch with zeros.
Scores and their log-sum-exp are in units of ln 2. Shape letters: B rows, S tokens of a row, H heads, K head size, M
queries and N keys of a tile. Sources: DCMHA, Xiao et al. 2024, arXiv:2405.08553; speedrun record #85, whose kernels add
dk and dv up by bf16 atomics.
"""

# Triton unrolls loops over tiles, in which tuples grow: by addition, since 3.6 knows no starred elements, and to mypy a
# tuple has one length.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanosprint.kernels.tuning import Band, ComposeBands

_LN2 = math.log(2)


@triton.jit
def _vectors(X, row, token, head, TOKENS: tl.constexpr, K: tl.constexpr):
    """(TOKENS, K): one head of the tokens from `token` on."""
    return X.load([row, token, head * K]).reshape(TOKENS, K)


@triton.jit
def _sees(FIRST, t, s, S):
    """Whether queries t see keys s; FIRST has the row's first visible keys. A query outside the row sees nothing.

    For each head anew: a mask that does not depend on what is read in the loop over heads would be made before it, and
    held in registers that the band needs. Keys before the first one wrap around, to more than any count.
    """
    first = tl.load(FIRST + t, mask=t < S, other=0)
    count = tl.where(t < S, t + 1 - first, 0)
    return (s - first).to(tl.uint32) < count.to(tl.uint32)


@triton.jit
def _of_head(X, token, head, inside, H: tl.constexpr):
    """A number for each token, from X (B, S, H)."""
    return tl.load(X + token * H + head, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_vectors(OUT, x, token, head, inside, H: tl.constexpr, K: tl.constexpr):
    """One head of OUT (B, S, H, K), contiguous, <- x (tokens, K)."""
    at = token[:, None] * (H * K) + head * K + tl.arange(0, K)[None, :]
    tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _maps_kernel(
    Q, KEYS, W1, FIRST, LSE, MAPS, scale2, S, first_row,
    H: tl.constexpr, K: tl.constexpr, PERIOD: tl.constexpr, LEFT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, m = tl.program_id(1).to(tl.int64), tl.program_id(0) * M
    FIRST += row * first_row
    t = m + tl.arange(0, M)
    token, inside = row * S + t, t < S
    mixed = ()
    for _ in tl.static_range(TILES):
        mixed = mixed + (tl.zeros((M, N), tl.float32),)
    for h in range(H):
        q = _vectors(Q, tl.program_id(1), m, h, M, K)
        scores, top = (), tl.full((M,), -1e30, tl.float32)
        for i in tl.static_range(TILES):
            n = m - LEFT + i * N
            k = _vectors(KEYS, tl.program_id(1), n, h, N, K)
            score = tl.dot(q, k.T, input_precision="ieee") * scale2
            score = tl.where(_sees(FIRST, t[:, None], n + tl.arange(0, N)[None, :], S), score, -1e30)
            top = tl.maximum(top, tl.max(score, 1))
            scores = scores + (score,)
        exps, total = (), tl.zeros((M,), tl.float32)
        for i in tl.static_range(TILES):
            e = tl.exp2(scores[i] - top[:, None])
            total += tl.sum(e, 1)
            exps = exps + (e,)
        weight, added = _of_head(W1, token, h, inside, H) / total, ()
        for i in tl.static_range(TILES):
            added = added + (mixed[i] + weight[:, None] * exps[i],)
        mixed = added
        tl.store(LSE + (row * H + h) * S + t, top + tl.log2(total), mask=inside)
    for i in tl.static_range(TILES):
        s = m - LEFT + i * N + tl.arange(0, N)
        place = token[:, None] * PERIOD + (s % PERIOD)[None, :]
        tl.store(MAPS + place, mixed[i], mask=_sees(FIRST, t[:, None], s[None, :], S))


@triton.jit
def _read_kernel(
    V, W2, FIRST, MAPS, OUT, S, first_row,
    H: tl.constexpr, K: tl.constexpr, PERIOD: tl.constexpr, LEFT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # Heads of one block run side by side: of what they share, only the first reading comes from memory.
    row, h, m = tl.program_id(1).to(tl.int64), tl.program_id(0) % H, tl.program_id(0) // H * M
    FIRST += row * first_row
    t = m + tl.arange(0, M)
    token, inside = row * S + t, t < S
    w2 = _of_head(W2, token, h, inside, H)
    out = tl.zeros((M, K), tl.float32)
    for i in range(TILES):
        n = m - LEFT + i * N
        s = n + tl.arange(0, N)
        place = token[:, None] * PERIOD + (s % PERIOD)[None, :]
        mixed = tl.load(MAPS + place, mask=_sees(FIRST, t[:, None], s[None, :], S), other=0.0)
        v = _vectors(V, tl.program_id(1), n, h, N, K)
        out = tl.dot((w2[:, None] * mixed).to(v.dtype), v, out, input_precision="ieee")
    _store_vectors(OUT, out, token, h, inside, H, K)


@triton.jit
def _dmaps_kernel(
    G, Q, KEYS, V, W1, W2, FIRST, LSE, MAPS, DW1, DW2, DMAPS, SUMS, scale2, S, first_row,
    H: tl.constexpr, K: tl.constexpr, PERIOD: tl.constexpr, LEFT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, m = tl.program_id(1).to(tl.int64), tl.program_id(0) * M
    FIRST += row * first_row
    t = m + tl.arange(0, M)
    token, inside = row * S + t, t < S
    mixed, dmixed = (), ()
    for i in tl.static_range(TILES):
        s = m - LEFT + i * N + tl.arange(0, N)
        place = token[:, None] * PERIOD + (s % PERIOD)[None, :]
        mixed = mixed + (tl.load(MAPS + place, mask=_sees(FIRST, t[:, None], s[None, :], S), other=0.0),)
        dmixed = dmixed + (tl.zeros((M, N), tl.float32),)
    for h in range(H):
        g = _vectors(G, tl.program_id(1), m, h, M, K)
        w2 = _of_head(W2, token, h, inside, H)
        dw2, added = tl.zeros((M,), tl.float32), ()
        for i in tl.static_range(TILES):
            v = _vectors(V, tl.program_id(1), m - LEFT + i * N, h, N, K)
            d = tl.dot(g, v.T, input_precision="ieee")
            dw2 += tl.sum(d * mixed[i], 1)
            added = added + (dmixed[i] + w2[:, None] * d,)
        dmixed = added
        tl.store(DW2 + token * H + h, dw2.to(DW2.dtype.element_ty), mask=inside)
    for i in tl.static_range(TILES):
        s = m - LEFT + i * N + tl.arange(0, N)
        place = token[:, None] * PERIOD + (s % PERIOD)[None, :]
        tl.store(DMAPS + place, dmixed[i], mask=_sees(FIRST, t[:, None], s[None, :], S))
    for h in range(H):
        q = _vectors(Q, tl.program_id(1), m, h, M, K)
        lse = tl.load(LSE + (row * H + h) * S + t, mask=inside, other=0.0)
        dw1 = tl.zeros((M,), tl.float32)
        for i in tl.static_range(TILES):
            n = m - LEFT + i * N
            k = _vectors(KEYS, tl.program_id(1), n, h, N, K)
            p = tl.exp2(tl.dot(q, k.T, input_precision="ieee") * scale2 - lse[:, None])
            dw1 += tl.sum(tl.where(_sees(FIRST, t[:, None], n + tl.arange(0, N)[None, :], S), p * dmixed[i], 0.0), 1)
        tl.store(DW1 + token * H + h, dw1.to(DW1.dtype.element_ty), mask=inside)
        tl.store(SUMS + (row * H + h) * S + t, dw1, mask=inside)


@triton.jit
def _dq_kernel(
    Q, KEYS, W1, FIRST, LSE, DMAPS, SUMS, DQ, scale, scale2, S, first_row,
    H: tl.constexpr, K: tl.constexpr, PERIOD: tl.constexpr, LEFT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, h, m = tl.program_id(1).to(tl.int64), tl.program_id(0) % H, tl.program_id(0) // H * M
    FIRST += row * first_row
    t = m + tl.arange(0, M)
    token, inside = row * S + t, t < S
    lse = tl.load(LSE + (row * H + h) * S + t, mask=inside, other=0.0)
    sums = tl.load(SUMS + (row * H + h) * S + t, mask=inside, other=0.0)
    w1 = _of_head(W1, token, h, inside, H)
    q = _vectors(Q, tl.program_id(1), m, h, M, K)
    dq = tl.zeros((M, K), tl.float32)
    for i in range(TILES):
        n = m - LEFT + i * N
        s = n + tl.arange(0, N)
        seen = _sees(FIRST, t[:, None], s[None, :], S)
        dmixed = tl.load(DMAPS + token[:, None] * PERIOD + (s % PERIOD)[None, :], mask=seen, other=0.0)
        k = _vectors(KEYS, tl.program_id(1), n, h, N, K)
        p = tl.where(seen, tl.exp2(tl.dot(q, k.T, input_precision="ieee") * scale2 - lse[:, None]), 0.0)
        ds = p * (w1[:, None] * (dmixed - sums[:, None]))
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    _store_vectors(DQ, dq * scale, token, h, inside, H, K)


@triton.jit
def _dk_kernel(
    Q, KEYS, W1, FIRST, LSE, DMAPS, SUMS, DK, scale, scale2, S, first_row,
    H: tl.constexpr, K: tl.constexpr, PERIOD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, h, n = tl.program_id(1).to(tl.int64), tl.program_id(0) % H, tl.program_id(0) // H * N
    FIRST += row * first_row
    s = n + tl.arange(0, N)
    k = _vectors(KEYS, tl.program_id(1), n, h, N, K)
    dk = tl.zeros((N, K), tl.float32)
    for i in range(TILES):
        t = n + i * M + tl.arange(0, M)
        token, inside = row * S + t, t < S
        seen = _sees(FIRST, t[None, :], s[:, None], S)
        lse = tl.load(LSE + (row * H + h) * S + t, mask=inside, other=0.0)
        sums = tl.load(SUMS + (row * H + h) * S + t, mask=inside, other=0.0)
        w1 = _of_head(W1, token, h, inside, H)
        dmixed = tl.load(DMAPS + token[None, :] * PERIOD + (s % PERIOD)[:, None], mask=seen, other=0.0)
        q = _vectors(Q, tl.program_id(1), n + i * M, h, M, K)
        p = tl.where(seen, tl.exp2(tl.dot(k, q.T, input_precision="ieee") * scale2 - lse[None, :]), 0.0)
        ds = p * (w1[None, :] * (dmixed - sums[None, :]))
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    _store_vectors(DK, dk * scale, row * S + s, h, s < S, H, K)


@triton.jit
def _dv_kernel(
    G, W2, FIRST, MAPS, DV, S, first_row,
    H: tl.constexpr, K: tl.constexpr, PERIOD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, h, n = tl.program_id(1).to(tl.int64), tl.program_id(0) % H, tl.program_id(0) // H * N
    FIRST += row * first_row
    s = n + tl.arange(0, N)
    dv = tl.zeros((N, K), tl.float32)
    for i in range(TILES):
        t = n + i * M + tl.arange(0, M)
        token, inside = row * S + t, t < S
        seen = _sees(FIRST, t[None, :], s[:, None], S)
        mixed = tl.load(MAPS + token[None, :] * PERIOD + (s % PERIOD)[:, None], mask=seen, other=0.0)
        w2 = _of_head(W2, token, h, inside, H)
        g = _vectors(G, tl.program_id(1), n + i * M, h, M, K)
        dv = tl.dot((w2[None, :] * mixed).to(g.dtype), g, dv, input_precision="ieee")
    _store_vectors(DV, dv, row * S + s, h, s < S, H, K)


def period(window: int) -> int:
    """Columns of A: the power of two that holds a window, and at least a line of memory."""
    return max(32, triton.next_power_of_2(window))


def forward(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, first: Tensor, scale: float, window: int,
    bands: ComposeBands,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the composed maps read (B, S, H, K); for the backward pass log-sum-exp (B, H, S) and A (B, S, PERIOD), fp32.

    q, k, v: (B, S, H, K) of one dtype, the heads of a token side by side, other strides and the address in whole 16
    bytes. w1, w2: (B, S, H), contiguous. first: int32 (B or 1, S), contiguous, the first key that each query sees,
    counted from its row's start and at most window - 1 before the query.
    """
    B, S, H, _ = q.shape
    out = q.new_empty(q.shape)
    lse, maps = (q.new_empty(shape, dtype=torch.float32) for shape in ((B, H, S), (B, S, period(window))))
    if not q.numel():
        return out, lse, maps
    step = S if len(first) > 1 else 0
    with torch.cuda.device_of(q):  # Triton launches on the current device
        band, sizes = bands.maps, _of_queries(q, window, bands.maps)
        _maps_kernel[(triton.cdiv(S, band.queries), B)](
            _source(q, band.queries), _source(k, band.keys), w1, first, lse, maps, scale / _LN2, S, step, **sizes
        )
        band, sizes = bands.read, _of_queries(q, window, bands.read)
        _read_kernel[(triton.cdiv(S, band.queries) * H, B)](
            _source(v, band.keys), w2, first, maps, out, S, step, **sizes
        )
    return out, lse, maps


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, first: Tensor, lse: Tensor, maps: Tensor,
    scale: float, window: int, bands: ComposeBands,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, w1 and w2, contiguous and in their dtypes, from what `forward` took and left.

    grad: as q. Besides the results it takes the memory of `maps` and `lse` once more.
    """
    B, S, H, _ = q.shape
    dq, dk, dv, dw1, dw2 = (t.new_empty(t.shape) for t in (q, k, v, w1, w2))
    if not q.numel():
        return dq, dk, dv, dw1, dw2
    dmaps, sums, step = torch.empty_like(maps), torch.empty_like(lse), S if len(first) > 1 else 0
    scale2 = scale / _LN2
    with torch.cuda.device_of(q):
        band, sizes = bands.dmaps, _of_queries(q, window, bands.dmaps)
        _dmaps_kernel[(triton.cdiv(S, band.queries), B)](
            _source(grad, band.queries), _source(q, band.queries), _source(k, band.keys), _source(v, band.keys),
            w1, w2, first, lse, maps, dw1, dw2, dmaps, sums, scale2, S, step, **sizes,
        )  # fmt: skip
        band, sizes = bands.dq, _of_queries(q, window, bands.dq)
        _dq_kernel[(triton.cdiv(S, band.queries) * H, B)](
            _source(q, band.queries), _source(k, band.keys),
            w1, first, lse, dmaps, sums, dq, scale, scale2, S, step, **sizes,
        )  # fmt: skip
        band, sizes = bands.dk, _of_keys(q, window, bands.dk)
        _dk_kernel[(triton.cdiv(S, band.keys) * H, B)](
            _source(q, band.queries), _source(k, band.keys),
            w1, first, lse, dmaps, sums, dk, scale, scale2, S, step, **sizes,
        )  # fmt: skip
        band, sizes = bands.dv, _of_keys(q, window, bands.dv)
        _dv_kernel[(triton.cdiv(S, band.keys) * H, B)](
            _source(grad, band.queries), w2, first, maps, dv, S, step, **sizes
        )
    return dq, dk, dv, dw1, dw2


def _of_queries(q: Tensor, window: int, band: Band) -> dict[str, int]:
    """How a block of queries cuts what it sees: the first tile starts LEFT keys before the first query."""
    left = triton.cdiv(window - 1, 16) * 16  # in the columns of A, whole pieces of memory
    return _sizes(q, window, band) | {"LEFT": left, "TILES": triton.cdiv(left + band.queries, band.keys)}


def _of_keys(q: Tensor, window: int, band: Band) -> dict[str, int]:
    """How a block of keys cuts the queries that see it: the first tile starts where the block does."""
    return _sizes(q, window, band) | {"TILES": triton.cdiv(band.keys + window - 1, band.queries)}


def _sizes(q: Tensor, window: int, band: Band) -> dict[str, int]:
    return {
        "H": q.shape[2], "K": q.shape[3], "PERIOD": period(window), "M": band.queries, "N": band.keys,
        "num_stages": band.stages, "num_warps": band.warps,
    }  # fmt: skip


def _source(X: Tensor, tokens: int) -> TensorDescriptor:
    """X (B, S, H, K) as tiles of one head of so many tokens."""
    B, S, H, K = X.shape
    return TensorDescriptor(X, [B, S, H * K], [X.stride(0), X.stride(1), 1], [1, tokens, K])
