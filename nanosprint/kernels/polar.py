"""The orthogonalisation's own kernels: the division before it, and its loop over the products of `symmetric`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.parts import ceil_div
from nanosprint.kernels.symmetric import Operand, product
from nanosprint.kernels.tuning import cublas_gram, full_tile, symmetric_tile

_BLOCK = 4096  # elements of a program: four wide loads a thread
_SQUARE = 64  # rows and columns of a tile that is turned: not measured yet


@triton.jit
def _divide_kernel(X, OUT, norms, size, margin, eps, BLOCK: tl.constexpr):
    matrix = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = matrix.to(tl.int64) * size
    x = tl.load(X + offset + at, mask=at < size, other=0.0).to(tl.float32)
    quotient = tl.div_rn(x, tl.load(norms + matrix) * margin + eps)
    tl.store(OUT + offset + at, quotient.to(OUT.dtype.element_ty), mask=at < size)


@triton.jit
def _divide_turned_kernel(X, OUT, norms, rows, side, margin, eps, BLOCK: tl.constexpr):
    """One tile of one square block of a matrix with more rows than columns: `side`."""
    block = tl.program_id(1)
    r = tl.program_id(0) // tl.cdiv(side, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(0) % tl.cdiv(side, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    offset = block.to(tl.int64) * side * side
    inside = (r < side)[:, None] & (c < side)[None, :]
    x = tl.load(X + offset + r[:, None] * side + c[None, :], mask=inside, other=0.0).to(tl.float32)
    quotient = tl.div_rn(x, tl.load(norms + block // (rows // side)) * margin + eps).to(OUT.dtype.element_ty)
    inside = (c < side)[:, None] & (r < side)[None, :]
    tl.store(OUT + offset + c[:, None] * side + r[None, :], quotient.T, mask=inside)


def divide(
    X: Tensor, norms: Tensor, margin: float = 1.0, eps: float = 0.0, out: Tensor | None = None, turned: bool = False
) -> Tensor:
    """X (B, M, N), contiguous, over margin * norms + eps, as a new tensor or in `out`: torch's mixed division is slow.

    norms (B, 1, 1) in fp32. With `turned` M is a multiple of N, and each N x N block comes out transposed in its place.
    """
    if out is None:
        out = torch.empty_like(X)
    batch, rows, cols = X.shape
    assert not turned or rows % cols == 0, X.shape
    if not X.numel():
        return out
    with torch.cuda.device_of(X):
        if turned:
            tiles = ceil_div(cols, _SQUARE) ** 2
            _divide_turned_kernel[(tiles, batch * rows // cols)](
                X, out, norms, rows, cols, margin, eps, BLOCK=_SQUARE, num_warps=4
            )
        else:
            _divide_kernel[(ceil_div(rows * cols, _BLOCK), batch)](
                X, out, norms, rows * cols, margin, eps, BLOCK=_BLOCK, num_warps=8
            )
    return out


def quintic_steps(X: Tensor, coefficients: Sequence[tuple[float, float, float]], capability: tuple[int, int]) -> Tensor:
    """X <- a X + X (b A + c A^2), A the Gram matrix of the shorter side, for each (a, b, c) in turn.

    X (B, M, N) contiguous, M and N multiples of 16 bytes; only read. Returns a new tensor. Everything is summed in fp32
    and rounded once. Gram matrices by cuBLAS, where `tuning` has them, may differ from their transpose in the last bit,
    or be sums of parts in X's dtype, as torch allows; b A + c A A^T is the lower triangle, mirrored, all the same.
    """
    batch, rows, cols = X.shape
    side, tall = min(rows, cols), rows > cols
    small, large = symmetric_tile(side, capability), full_tile(capability)
    by_cublas = cublas_gram(side, batch, capability)
    A, B = (Operand(half) for half in X.new_empty(2, batch, side, side))
    source, target = Operand(X), Operand(torch.empty_like(X))
    spare = Operand(torch.empty_like(X)) if len(coefficients) > 1 else source
    for a, b, c in coefficients:
        if by_cublas:
            torch.bmm(*((source.X.mT, source.X) if tall else (source.X, source.X.mT)), out=A.X)
        else:
            product(source, source, A, small, turn_p=tall, turn_q=not tall, symmetric=True)
        product(A, A, B, small, turn_q=True, alpha=c, add=A, beta=b, symmetric=True)
        left, right = (source, B) if tall else (B, source)
        product(left, right, target, large, add=source, beta=a)
        source, target, spare = target, spare, target
    return source.X
