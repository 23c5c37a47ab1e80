"""SOAP's coordinates in front of Muon: the momentum is whitened entry by entry where gradients are nearly diagonal.

Orthogonalisation makes the singular directions of one momentum matrix equally long, whatever their history.
SOAP knows the history: the running Gram matrices of gradients say in which combinations of rows and of columns they
are independent. For a matrix with gradient G and (Nesterov) momentum U, of the sides that are rotated:

    U' = QL^T U QR       V <- b V + (1 - b) U'^2       U <- QL (U' / sqrt(V)) QR^T       then Muon goes on with U
    L  <- b L + (1 - b) G G^T,   R <- b R + (1 - b) G^T G                                (after that)
    Q  <- orthogonal factor of (L + e) Q, columns and V in falling order of diag(Q^T L Q)   now and then

V is made of momenta, not of gradients, as in the source. Bases begin as the matrix' own coordinates and are renewed at
each of the first `refresh_every` updates, then at every such one. The size of what leaves does not matter, since
orthogonalisation divides by it. e is 1e-5 of the mean eigenvalue, which keeps the product invertible. While a Gram
matrix has seen fewer directions than its side is long, rounding decides the order of the rest.

The factor comes from Cholesky's of Z^T Z, twice, in float64: batched products instead of one QR a matrix. Columns are
scaled to 1 first. fp32 would fail, since Z^T Z has the square of the condition of a Gram matrix.

Cost: 4 bytes of state a weight, and 8 n^2 a matrix for each side of n: at 768, one side of all matrices of the record,
0.8 GB. Products a step and matrix of m x n, rotated along n: 6 m n^2 floating-point operations, in TF32 where the
orthogonalisation is in 16 bits (what it reads is rounded further, and gradients in bf16 are exact in TF32). A renewal
takes about 8 n^3 in float64, and 40 n^2 bytes for the while. About 12 launches a bank and step.

Source: see `GradientBasis`; Vyas et al. 2024, arXiv:2409.11321; Fukaya et al. 2020 for shifts in Cholesky's QR,
arXiv:1809.11085.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanosprint.config.groups import GradientBasis
from nanosprint.ops.tracing import not_traced
from nanosprint.optim.soap import SIDES, fp32_products, rotate, rotate_back, update_grams_

SQUARE, COUNT = "basis_square", "step"  # V, and updates done (on the CPU), in the optimizer's state
RIDGE = 1e-5  # of the mean eigenvalue
SHIFT = 1e-12  # of a column's squared length: above float64's rounding, which could make Z^T Z indefinite
TINY = 1e-30  # of mean squares and eigenvalues, which may be those of a matrix without gradient

State = dict[str, Any]


def init_basis(state: State, spec: GradientBasis, matrices: int, rows: int, cols: int, like: Tensor) -> None:
    """Add V, Gram matrices, bases and the count to the state of as many matrices; dtype and device are those of `like`.

    The first axis of each counts matrices, so that states can be cut between them.
    """
    state[COUNT] = torch.zeros((), dtype=torch.float32)
    state[SQUARE] = like.new_zeros(matrices, rows, cols)
    for (gram, basis), side, name in zip(SIDES, (rows, cols), ("rows", "columns"), strict=True):
        if spec.sides in (name, "both"):
            state[gram] = like.new_zeros(matrices, side, side)
            state[basis] = torch.eye(side, dtype=like.dtype, device=like.device).repeat(matrices, 1, 1)


def whiten_(
    directions: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    spec: GradientBasis,
    shape: tuple[int, int],
    tf32: bool,
) -> list[Tensor]:
    """`precondition_` for each parameter, of matrices of `shape` one after the other."""
    columns = zip(directions, grads, states, strict=True)
    return [
        precondition_(d.reshape(-1, *shape), g.reshape(-1, *shape), s, spec, tf32).view(d.shape) for d, g, s in columns
    ]


@not_traced  # bases are renewed when a count on the host says so
def precondition_(directions: Tensor, grads: Tensor, state: State, spec: GradientBasis, tf32: bool) -> Tensor:
    """The whitened directions, (k, M, N) as given; the state of `init_basis` moves on by one update.

    directions: fp32 or wider. grads: (k, M, N), any float dtype. tf32: whether products of fp32 numbers may be rounded
    so on a GPU; those of gradients are only where they are in 16 bits.
    """
    with fp32_products(tf32):
        rotated = rotate(directions, state)
        square = state[SQUARE].mul_(spec.beta).addcmul_(rotated, rotated, value=1 - spec.beta)
        whitened = rotate_back(rotated * square.clamp_min(TINY).rsqrt(), state)
    with fp32_products(tf32 and grads.dtype.itemsize == 2):
        update_grams_(state, grads.to(directions.dtype), spec.beta)
    state[COUNT] += 1
    count = int(state[COUNT])
    if count <= spec.refresh_every or count % spec.refresh_every == 0:
        _renew_(state)
    return whitened


def _renew_(state: State) -> None:
    """Renew the bases; V is reordered with their columns."""
    for axis, (gram, basis) in zip((-2, -1), SIDES, strict=True):
        if gram in state:
            new, order = power_step(state[gram], state[basis])
            state[basis].copy_(new)
            square = state[SQUARE]
            square.copy_(square.gather(axis, order.unsqueeze(-1 if axis == -2 else -2).expand_as(square)))


def power_step(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration for each of k symmetric matrices: (the new bases, the order of their columns).

    gram, basis: (k, n, n), not modified. Column j of a new basis follows column order[j] of the old one.
    """
    Q = basis.double()
    ridge = (RIDGE * gram.diagonal(dim1=-2, dim2=-1).double().mean(-1)).clamp_min(TINY)
    Z = gram.double() @ Q + ridge[:, None, None] * Q
    order = (Q * Z).sum(-2).argsort(dim=-1, descending=True, stable=True)
    Z = Z.gather(-1, order.unsqueeze(-2).expand_as(Z))
    Z /= Z.norm(dim=-2, keepdim=True)
    for _ in range(2):  # the first leaves what the shift and Z's condition cost, the second float64's precision
        Z = _cholesky_qr(Z)
    return Z.to(basis.dtype), order


def _cholesky_qr(Z: Tensor) -> Tensor:
    """Z with its columns made orthogonal from the first to the last; (k, n, n) with columns of length 1 or so."""
    products = Z.mT @ Z
    products.diagonal(dim1=-2, dim2=-1).add_(SHIFT)
    R = torch.linalg.cholesky_ex(products, upper=True).L  # not cholesky: it would make the host wait
    return torch.linalg.solve_triangular(R, Z, upper=True, left=False)
