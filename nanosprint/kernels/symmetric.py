"""Batched product with an optional added matrix, OUT = alpha P Q + beta C, which may be known to be symmetric.

A symmetric result costs little more than half: only tiles on or below the diagonal are computed, and each is stored
twice, as it is and transposed, which also makes the result symmetric bit for bit. A Gram matrix X X^T is P = X and
Q = X^T; tiles are read the way the operand lies in memory and turned in shared memory.

The added matrix is read in the epilogue, while the product is still fp32, so that there is one rounding; cuBLAS would
first copy C to OUT. Tiles move through tensor descriptors (on Hopper by the copy engine: 6 to 12 % faster than loads
through pointers), which fill what lies outside a matrix with zeros, so no edge needs a mask.

On the diagonal of a Gram matrix the same rows come in twice, unless a tile is to read them `once`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanosprint.kernels.parts import ceil_div
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
def _rows(X, batch, row, k, TURN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile (BLOCK, BLOCK_K) of X, with TURN of X^T."""
    return (
        X.load([batch, k, row]).reshape(BLOCK_K, BLOCK).T if TURN else X.load([batch, row, k]).reshape(BLOCK, BLOCK_K)
    )


@triton.jit(do_not_specialize=["M", "N", "K"])
def _product_kernel(
    P, Q, C, OUT, alpha, beta, M, N, K,
    SYMMETRIC: tl.constexpr, ADD: tl.constexpr, TURN_P: tl.constexpr, TURN_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """ONCE, of a symmetric result: P and Q are one matrix, and a tile on the diagonal reads it once."""
    batch = tl.program_id(1)
    if SYMMETRIC:
        tile_m, tile_n = _tile_of(tl.program_id(0))
    else:
        tile_m, tile_n = _grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if ONCE and tile_m == tile_n:
        for k in range(0, K, BLOCK_K):
            p = _rows(P, batch, m, k, TURN_P, BLOCK_M, BLOCK_K)
            total = tl.dot(p, p.T, total, input_precision="ieee")
    else:
        for k in range(0, K, BLOCK_K):
            p = _rows(P, batch, m, k, TURN_P, BLOCK_M, BLOCK_K)
            q = _rows(Q, batch, n, k, not TURN_Q, BLOCK_N, BLOCK_K).T
            total = tl.dot(p, q, total, input_precision="ieee")
    total *= alpha
    if ADD:
        total += beta * C.load([batch, m, n]).reshape(BLOCK_M, BLOCK_N).to(tl.float32)
    result = total.to(OUT.dtype)
    OUT.store([batch, m, n], result.reshape(1, BLOCK_M, BLOCK_N))
    if SYMMETRIC and tile_m != tile_n:
        OUT.store([batch, n, m], result.T.reshape(1, BLOCK_N, BLOCK_M))


class Operand:
    """A batch of matrices with the tensor descriptors made for it so far: making one costs as much as half a launch.

    X (B, rows, cols): inner stride 1, all other strides and the address multiples of 16 bytes.
    """

    def __init__(self, X: Tensor) -> None:
        self.X = X
        self._tiles: dict[tuple[int, int], TensorDescriptor] = {}

    def tiles(self, rows: int, cols: int) -> TensorDescriptor:
        """The descriptor that moves tiles of rows x cols."""
        found = self._tiles.get((rows, cols))
        if found is None:
            found = TensorDescriptor(self.X, list(self.X.shape), list(self.X.stride()), [1, rows, cols])
            self._tiles[rows, cols] = found
        return found


def product(
    P: Operand, Q: Operand, out: Operand, tile: Tile, *, turn_p: bool = False, turn_q: bool = False,
    alpha: float = 1.0, add: Operand | None = None, beta: float = 0.0, symmetric: bool = False,
) -> None:  # fmt: skip
    """out <- alpha P Q + beta add, accumulated in fp32 and rounded once.

    turn_p puts P^T in the place of P, turn_q Q^T in that of Q. Shapes after turning: P (B, M, K), Q (B, K, N), add and
    out (B, M, N); one dtype; out overlaps no other. With symmetric=True the caller promises that the result is, and the
    tile must be square; a tile with `once` wants P and Q to be one matrix.
    """
    batch, M, N = out.X.shape
    K = P.X.shape[1 if turn_p else 2]
    once = symmetric and tile.once
    assert not symmetric or (M == N and tile.m == tile.n), (out.X.shape, tile)
    assert not once or (P.X.data_ptr() == Q.X.data_ptr() and turn_p != turn_q), "not a matrix times its transpose"
    assert Q.X.shape[2 if turn_q else 1] == K, (P.X.shape, Q.X.shape, turn_p, turn_q)
    if out.X.numel() == 0:
        return
    left = P.tiles(tile.k, tile.m) if turn_p else P.tiles(tile.m, tile.k)
    right = Q.tiles(tile.n, tile.k) if turn_q else Q.tiles(tile.k, tile.n)
    target = out.tiles(tile.m, tile.n)
    added = target if add is None else add.tiles(tile.m, tile.n)
    flags = (symmetric, add is not None, turn_p, turn_q, tile.m, tile.n, tile.k, 8, once)
    rows, cols = ceil_div(M, tile.m), ceil_div(N, tile.n)
    with torch.cuda.device_of(out.X):  # Triton launches on the current device
        _launch(
            (rows * (rows + 1) // 2 if symmetric else rows * cols, batch, 1),
            (left, right, added, target, float(alpha), float(beta), M, N, K, *flags), tile,
            (out.X.device, out.X.dtype, flags, tile),
        )  # fmt: skip


_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(grid: tuple[int, int, int], args: tuple[Any, ...], tile: Tile, key: tuple[Any, ...]) -> None:
    """Launch the kernel that was compiled for `key`, which names all that its code depends on.

    To find it, Triton would examine every argument again, in about the time that the smaller products take.
    """
    kernel = _compiled.get(key)
    if kernel is None:  # the interpreter, which compiles nothing, stays on this side
        _compiled[key] = _product_kernel[grid](*args, num_stages=tile.stages, num_warps=tile.warps)
    else:
        kernel[grid](*args)
