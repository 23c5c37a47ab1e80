"""Batched product with an optional added matrix, OUT = alpha P Q + beta C, which may be known to be symmetric.

A symmetric result costs little more than half: only tiles on or below the diagonal are computed, and each is stored
twice, as it is and transposed, which also makes the result symmetric bit for bit. A Gram matrix X X^T is P = X and
Q = X^T as a view: every operand is read through its strides, so nothing is transposed in memory.

The added matrix is read in the epilogue, while the product is still fp32, so that there is one rounding; cuBLAS would
first copy C to OUT.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.tuning import Tile


@triton.jit
def _tile_of(index):
    """Row and column of the index-th tile on or below the diagonal, counted row by row."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)  # the root may be rounded either way
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def _grouped(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of the index-th tile, GROUP rows of tiles at a time, so that neighbours share operands in L2."""
    group = index // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    inside = index % (GROUP * tiles_n)
    return group * GROUP + inside % height, inside // height


@triton.jit
def _product_kernel(
    P, Q, C, OUT, alpha, beta, M, N, K,
    p_batch, p_row, p_col, q_batch, q_row, q_col, c_batch, c_row, o_batch, o_row,
    SYMMETRIC: tl.constexpr, ADD: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    if SYMMETRIC:
        tile_m, tile_n = _tile_of(tl.program_id(0))
    else:
        tile_m, tile_n = _grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Indices beyond an edge wrap around: those results are never stored, and the loads need no mask.
    p = P + batch * p_batch + (rows % M)[:, None] * p_row + ks[None, :] * p_col
    q = Q + batch * q_batch + ks[:, None] * q_row + (cols % N)[None, :] * q_col
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            total = tl.dot(tl.load(p), tl.load(q), total, input_precision="ieee")
        else:
            left = tl.load(p, mask=ks[None, :] < K - k, other=0.0)
            right = tl.load(q, mask=ks[:, None] < K - k, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        p += BLOCK_K * p_col
        q += BLOCK_K * q_row
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    total *= alpha
    if ADD:
        c = tl.load(C + batch * c_batch + rows[:, None] * c_row + cols[None, :], mask=inside, other=0.0)
        total += beta * c.to(tl.float32)
    result = total.to(OUT.dtype.element_ty)
    out = OUT + batch * o_batch
    tl.store(out + rows[:, None] * o_row + cols[None, :], result, mask=inside)
    if SYMMETRIC and tile_m != tile_n:
        mirrored = (cols < N)[:, None] & (rows < M)[None, :]
        tl.store(out + cols[:, None] * o_row + rows[None, :], tl.trans(result), mask=mirrored)


def product(
    P: Tensor, Q: Tensor, out: Tensor, tile: Tile, *,
    alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """out <- alpha P Q + beta add, rounded once; returns out.

    P (B, M, K), Q (B, K, N), any strides; add and out (B, M, N) with unit inner stride, not overlapping P or Q. With
    symmetric=True the caller promises that the result is (M = N), and the tile must be square.
    """
    (batch, M, K), N = P.shape, Q.shape[2]
    assert not symmetric or (M == N and tile.m == tile.n), (P.shape, Q.shape, tile)
    if out.numel() == 0:
        return out
    rows, cols = triton.cdiv(M, tile.m), triton.cdiv(N, tile.n)
    C = out if add is None else add
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _product_kernel[(rows * (rows + 1) // 2 if symmetric else rows * cols, batch)](
            P, Q, C, out, alpha, beta, M, N, K,
            *P.stride(), *Q.stride(), C.stride(0), C.stride(1), out.stride(0), out.stride(1),
            SYMMETRIC=symmetric, ADD=add is not None, EVEN_K=K % tile.k == 0,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=8,
            num_stages=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return out
