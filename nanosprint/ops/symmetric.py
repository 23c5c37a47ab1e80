"""Products that are known to be symmetric: X X^T, X^T X, and b A + c A^2 of a symmetric A.

An optimizer that orthogonalises matrices spends most of its arithmetic on these, and half of each is the mirror image
of the other half. The GPU kernel computes tiles on or below the diagonal only and stores each twice, so results are
symmetric bit for bit, here and on the CPU. That matters beyond beauty: A^2 is computed as A A^T.

Batch B, rows M, columns N. Sums are in fp32 (fp64 for fp64) and rounded once. bf16 on a GPU takes the Triton kernel;
other dtypes, and a GPU without Triton, take the formula below, which is the reference. There are no gradients: these
serve optimizers.
"""

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.kernels import has_triton

_log = logging.getLogger(__name__)


def xxt(X: Tensor) -> Tensor:
    """X X^T of each matrix: (B, M, N) -> (B, M, M), same dtype, contiguous, exactly symmetric.

    Any strides. On a GPU, sides that are no multiples of 8 are padded with zeros first, which costs a copy. Raises
    ValueError unless X is a batch of float matrices.
    """
    _check("X", X)
    return _xxt(X)


def xtx(X: Tensor) -> Tensor:
    """X^T X of each matrix: (B, M, N) -> (B, N, N); otherwise as `xxt`. X is not transposed in memory."""
    _check("X", X)
    return _xtx(X)


def gram_poly(A: Tensor, b: float, c: float) -> Tensor:
    """b A + c A^2 of each symmetric matrix: (B, M, M) -> (B, M, M), rounded once, exactly symmetric.

    A must be symmetric bit for bit, as `xxt` and `xtx` return it; that is not checked, and for other matrices the
    result is the lower triangle of b A + c A A^T, mirrored. Raises ValueError unless A is a batch of square float
    matrices.
    """
    _check("A", A)
    if A.shape[1] != A.shape[2]:
        raise ValueError(f"A has shape {tuple(A.shape)}: its matrices must be square and symmetric")
    return _gram_poly(A, b, c)


def _check(name: str, X: Tensor) -> None:
    if X.ndim != 3 or not X.is_floating_point():
        raise ValueError(
            f"{name} is {X.dtype} of shape {tuple(X.shape)}: expected floating-point matrices of shape (batch, M, N)"
        )


def xxt_reference(X: Tensor) -> Tensor:
    """The formula of `xxt`, on any device."""
    wide = _widen(X)
    return _mirror(wide @ wide.mT).to(X.dtype)


def xtx_reference(X: Tensor) -> Tensor:
    """The formula of `xtx`, on any device."""
    wide = _widen(X)
    return _mirror(wide.mT @ wide).to(X.dtype)


def gram_poly_reference(A: Tensor, b: float, c: float) -> Tensor:
    """The formula of `gram_poly`, on any device."""
    wide = _widen(A)
    return _mirror(b * wide + c * (wide @ wide.mT)).to(A.dtype)


@torch.library.custom_op("nanosprint::xxt", mutates_args=())
def _xxt(X: Tensor) -> Tensor:
    return xxt_reference(X)


@torch.library.custom_op("nanosprint::xtx", mutates_args=())
def _xtx(X: Tensor) -> Tensor:
    return xtx_reference(X)


@torch.library.custom_op("nanosprint::gram_poly", mutates_args=())
def _gram_poly(A: Tensor, b: float, c: float) -> Tensor:
    return gram_poly_reference(A, b, c)


@_xxt.register_fake
def _(X: Tensor) -> Tensor:
    return X.new_empty(X.shape[0], X.shape[1], X.shape[1])


@_xtx.register_fake
def _(X: Tensor) -> Tensor:
    return X.new_empty(X.shape[0], X.shape[2], X.shape[2])


@_gram_poly.register_fake
def _(A: Tensor, b: float, c: float) -> Tensor:
    return A.new_empty(A.shape)


@_xxt.register_kernel("cuda")
def _(X: Tensor) -> Tensor:
    return _symmetric_product(aligned(X), X.shape[1], turn_q=True) if fits_kernel(X) else xxt_reference(X)


@_xtx.register_kernel("cuda")
def _(X: Tensor) -> Tensor:
    return _symmetric_product(aligned(X), X.shape[2], turn_p=True) if fits_kernel(X) else xtx_reference(X)


@_gram_poly.register_kernel("cuda")
def _(A: Tensor, b: float, c: float) -> Tensor:
    if not fits_kernel(A):
        return gram_poly_reference(A, b, c)
    return _symmetric_product(aligned(A), A.shape[1], turn_q=True, alpha=c, beta=b)


def _symmetric_product(X: Tensor, side: int, beta: float = 0.0, **options: Any) -> Tensor:
    """alpha X X^T + beta X, or alpha X^T X, without the padding; `options` say which."""
    from nanosprint.kernels.symmetric import Operand, product
    from nanosprint.kernels.tuning import symmetric_tile

    width = X.shape[1] if options.get("turn_q") else X.shape[2]
    operand, out = Operand(X), Operand(X.new_empty(len(X), width, width))
    tile = symmetric_tile(side, torch.cuda.get_device_capability(X.device))
    add = operand if beta else None
    product(operand, operand, out, tile, symmetric=True, add=add, beta=beta, **options)
    return out.X[:, :side, :side].contiguous()


def fits_kernel(X: Tensor) -> bool:
    """Whether X, a GPU tensor, is for the Triton kernels; their absence is logged once."""
    return X.dtype == torch.bfloat16 and torch.version.hip is None and (has_triton() or _without_triton())


@functools.cache
def _without_triton() -> bool:
    _log.warning("Triton is not installed: symmetric products are computed in full, which takes about twice as long")
    return False


def aligned(X: Tensor) -> Tensor:
    """X (B, M, N) contiguous, its matrices padded with zeros to sides of whole 16 bytes; X itself if it is so already.

    Zero rows and columns add nothing to any product here.
    """
    unit = 16 // X.element_size()
    rows, cols = -X.shape[1] % unit, -X.shape[2] % unit
    if rows or cols:  # a padding of nothing is a copy to torch
        X = F.pad(X, (0, cols, 0, rows))
    X = X.contiguous()
    return X.clone() if X.data_ptr() % 16 else X


def _widen(X: Tensor) -> Tensor:
    return X.to(torch.promote_types(X.dtype, torch.float32))


def _mirror(S: Tensor) -> Tensor:
    """The lower triangle on both sides: a library may sum S[i, j] and S[j, i] in different orders."""
    return S.tril() + S.tril(-1).mT
