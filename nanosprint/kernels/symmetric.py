"""Batched product with an optional added matrix, OUT = alpha P Q + beta C, which may be known to be symmetric.

A symmetric result costs little more than half: only tiles on or below the diagonal are computed, and each is stored
twice, as it is and transposed, which also makes the result symmetric bit for bit. A Gram matrix X X^T is P = X and
Q = X^T as a view: tiles are read the way the operand lies in memory and turned in shared memory.

The added matrix is read in the epilogue, while the product is still fp32, so that there is one rounding; cuBLAS would
first copy C to OUT. Tiles move through tensor descriptors (on Hopper by the copy engine: 6 to 12 % faster than loads
through pointers), which fill what lies outside a matrix with zeros, so no edge needs a mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    SYMMETRIC: tl.constexpr, ADD: tl.constexpr, TURN_P: tl.constexpr, TURN_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1)
    if SYMMETRIC:
        tile_m, tile_n = _tile_of(tl.program_id(0))
    else:
        tile_m, tile_n = _grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if TURN_P:
            p = P.load([batch, k, m]).reshape(BLOCK_K, BLOCK_M).T
        else:
            p = P.load([batch, m, k]).reshape(BLOCK_M, BLOCK_K)
        if TURN_Q:
            q = Q.load([batch, n, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            q = Q.load([batch, k, n]).reshape(BLOCK_K, BLOCK_N)
        total = tl.dot(p, q, total, input_precision="ieee")
    total *= alpha
    if ADD:
        total += beta * C.load([batch, m, n]).reshape(BLOCK_M, BLOCK_N).to(tl.float32)
    result = total.to(OUT.dtype)
    OUT.store([batch, m, n], result.reshape(1, BLOCK_M, BLOCK_N))
    if SYMMETRIC and tile_m != tile_n:
        OUT.store([batch, n, m], result.T.reshape(1, BLOCK_N, BLOCK_M))


def product(
    P: Tensor, Q: Tensor, out: Tensor, tile: Tile, *,
    alpha: float = 1.0, add: Tensor | None = None, beta: float = 0.0, symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """out <- alpha P Q + beta add, accumulated in fp32 and rounded once; returns out.

    P (B, M, K), Q (B, K, N), add and out (B, M, N), of one dtype; out overlaps no other. P and Q may be transposed
    views; apart from that, inner strides are 1 and all others and the addresses multiples of 16 bytes (`aligned`).
    With symmetric=True the caller promises that the result is, and the tile must be square.
    """
    (batch, M, K), N = P.shape, Q.shape[2]
    assert not symmetric or (M == N and tile.m == tile.n), (P.shape, Q.shape, tile)
    if out.numel() == 0:
        return out
    turn_p, turn_q = P.stride(2) != 1, Q.stride(2) != 1
    left = _tiles(P.mT, tile.k, tile.m) if turn_p else _tiles(P, tile.m, tile.k)
    right = _tiles(Q.mT, tile.n, tile.k) if turn_q else _tiles(Q, tile.k, tile.n)
    target = _tiles(out, tile.m, tile.n)
    rows, cols = triton.cdiv(M, tile.m), triton.cdiv(N, tile.n)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _product_kernel[(rows * (rows + 1) // 2 if symmetric else rows * cols, batch)](
            left, right, target if add is None else _tiles(add, tile.m, tile.n), target,
            float(alpha), float(beta), M, N, K,
            SYMMETRIC=symmetric, ADD=add is not None, TURN_P=turn_p, TURN_Q=turn_q,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=8,
            num_stages=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return out


def _tiles(X: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(X, list(X.shape), list(X.stride()), [1, rows, cols])
