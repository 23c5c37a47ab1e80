"""Orthogonalise matrices: replace G = U S V^T by U V^T, approximately, with matrix products alone.

The semi-orthogonal matrix nearest to G keeps its singular vectors and sets every singular value to 1 (the polar
factor). An SVD gives it exactly and slowly. An odd polynomial p(s) = a s + b s^3 + c s^5 acts on singular values
without knowing them, since a X + b X X^T X + c (X X^T)^2 X = U p(S) V^T, and a few such steps push all of (0, 1]
toward 1. X only has to enter with spectral norm at most 1; the Frobenius norm is a bound that costs one pass.

Two sets of coefficients. "ns5" uses the same three numbers five times: it does not converge but lands in about
[0.68, 1.13], which is good enough for Muon. "polar_express" has its own optimal triple for each of five steps and
lands in [0.859, 1.141] for every s >= 1e-3. Both run in bf16, where rounding refills singular values below about
1e-3 of the largest.

On a GPU in bf16 the products run through the symmetric kernels (`nanosprint.ops.symmetric`) on devices and shapes where
those were measured to beat cuBLAS (`kernels/tuning.py`); elsewhere through `torch.baddbmm`. Rounding is the same.
Stacks of several shapes at once may share launches (`orthogonalize_stacks`).

Names: M rows, N columns, r = min(M, N). Five steps cost 5 * (4 r^2 max(M, N) + 2 r^3) floating-point operations.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanosprint.kernels import has_gluon, has_triton
from nanosprint.ops.symmetric import aligned, fits_kernel

Coefficients = Sequence[tuple[float, float, float]]
Orthogonalizer = Callable[..., Tensor]  # (G, dtype=...) -> tensor of G's shape and that dtype

NS5 = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def newton_schulz(
    G: Tensor,
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    coefficients: tuple[float, float, float] = NS5,
) -> Tensor:
    """Orthogonalise each matrix of G by `steps` applications of one quintic polynomial.

    G: (..., M, N), any float dtype; not modified. Returns `dtype` (the working precision) in the same shape. With
    the default coefficients and 5 steps, singular values of at least 0.01 of the Frobenius norm end in
    [0.68, 1.13], those above 1.5e-3 in [0.68, 1.21]; a zero matrix stays zero. Raises ValueError if G has fewer
    than two axes, is not floating point, or steps < 1. Source: Jordan et al. 2024, "Muon: an optimizer for hidden
    layers in neural networks"; the iteration is Bjorck & Bowie 1971.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1 (5 is usual)")
    X = _normalize(G, dtype, margin=1.0, eps=1e-7)
    return _iterate(X, (coefficients,) * steps).view(G.shape)


def polar_express(G: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Orthogonalise each matrix of G by five polynomials, each optimal for what the one before leaves.

    G: (..., M, N), any float dtype; not modified. Returns `dtype` in the same shape, singular values in
    [0.859, 1.141] for all that exceed 1e-3 of the Frobenius norm. Raises ValueError if G has fewer than two axes or
    is not floating point. Source: Amsel et al. 2025, arXiv:2505.16932 (5 iterations, safety 2 %, cushion 2).
    """
    # The margin is what keeps this finite: the composite polynomial explodes above 1.0218, where rounding alone
    # would carry a matrix of rank one that was divided by exactly its norm.
    X = _normalize(G, dtype, margin=1.02, eps=1e-6)
    return _iterate(X, POLAR_EXPRESS).view(G.shape)


ORTHOGONALIZERS: dict[str, Orthogonalizer] = {"ns5": newton_schulz, "polar_express": polar_express}


class Iteration(NamedTuple):
    """What an orthogonalizer does: divide by margin * Frobenius norm + eps, then a step for each triple."""

    coefficients: Coefficients
    margin: float
    eps: float


_ITERATIONS = {newton_schulz: Iteration((NS5,) * 5, 1.0, 1e-7), polar_express: Iteration(POLAR_EXPRESS, 1.02, 1e-6)}


def orthogonalizer(name: str) -> Orthogonalizer:
    """The function (G, dtype=...) registered under `name`; ValueError lists the names there are.

    Add your own with `ORTHOGONALIZERS["mine"] = function`; optimizers then take orthogonalizer="mine".
    """
    if name not in ORTHOGONALIZERS:
        raise ValueError(f"orthogonalizer={name!r} is unknown: choose one of {', '.join(sorted(ORTHOGONALIZERS))}")
    return ORTHOGONALIZERS[name]


def orthogonalize_stacks(
    function: Orthogonalizer, stacks: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """[function(G, dtype=dtype) for G in stacks], in launches that all stacks share where `share_launches` says so.

    Results may then be views of one tensor. Sums are in another order, so that bf16 may round the other way.
    """
    shapes = [G.shape for G in stacks]
    if len({G.device for G in stacks}) != 1 or not share_launches(function, shapes, dtype, stacks[0].device):
        return [function(G, dtype=dtype) for G in stacks]
    from nanosprint.kernels.polar_grouped import quintic_stacks

    rule = _ITERATIONS[function]
    inputs = [aligned(G.to(dtype)) for G in stacks]
    norms = [torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True, dtype=torch.float32) for G in inputs]
    return quintic_stacks(inputs, norms, rule.margin, rule.eps, rule.coefficients)


def share_launches(
    function: Orthogonalizer, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether stacks (B, M, N) of these shapes are orthogonalised in common launches: eagerly, in bf16, by one of the
    two functions here, on a GPU for which `tuning` says so, several stacks of one width and of whole tiles."""
    from nanosprint.kernels import tuning
    from nanosprint.kernels.polar_jobs import Bank, fits

    if torch.compiler.is_compiling() or device.type != "cuda" or dtype != torch.bfloat16 or len(shapes) < 2:
        return False
    if function not in _ITERATIONS or any(len(shape) != 3 for shape in shapes):
        return False
    known = torch.version.hip is None and torch.cuda.get_device_capability(device) in tuning.GROUPED_POLAR
    return known and fits([Bank(*shape) for shape in shapes]) and has_triton() and has_gluon()


def orthogonalize_flops(num: int, rows: int, cols: int, steps: int = 5) -> int:
    """Floating-point operations of `steps` iterations on `num` matrices, with full (not symmetric) products."""
    r, n = min(rows, cols), max(rows, cols)
    return num * steps * (4 * r * r * n + 2 * r**3)


def _normalize(G: Tensor, dtype: torch.dtype, margin: float, eps: float) -> Tensor:
    """G in the working precision over (margin * Frobenius norm + eps), as a new contiguous (batch, M, N)."""
    if G.ndim < 2:
        raise ValueError(f"expected matrices of shape (..., M, N), got shape {tuple(G.shape)}: add an axis or flatten")
    if not (G.is_floating_point() and dtype.is_floating_point):
        raise ValueError(f"expected floating-point matrices and dtype, got {G.dtype} and dtype={dtype}")
    X = G.to(dtype).reshape(-1, *G.shape[-2:])
    # The norm is that of the rounded values, summed in fp32 at least: a norm rounded to bf16 could be 0.2 % short.
    wide = torch.promote_types(dtype, torch.float32)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=wide)
    # A compiler fuses the plain division into what comes before it.
    if not torch.compiler.is_compiling() and X.is_cuda and wide == torch.float32 and has_triton():
        from nanosprint.kernels.polar import divide

        return divide(X.contiguous(), norm, margin, eps)
    return torch.div(X, norm * margin + eps, out=torch.empty_like(X, memory_format=torch.contiguous_format))


def _iterate(X: Tensor, coefficients: Coefficients) -> Tensor:
    """Apply X <- a X + X (b A + c A^2) for each (a, b, c) in turn. X: (B, M, N) contiguous, may be overwritten."""
    if X.is_cuda and X.dtype == torch.bfloat16:
        return _quintic_steps(X, [number for triple in coefficients for number in triple])
    return quintic_steps_reference(X, coefficients)


@torch.library.custom_op("nanosprint::quintic_steps", mutates_args=())
def _quintic_steps(X: Tensor, coefficients: list[float]) -> Tensor:
    """All steps as one operator: one dispatch for fifteen launches. coefficients: a, b, c of each step in a row."""
    return quintic_steps_reference(X.clone(), _triples(coefficients))


@_quintic_steps.register_fake
def _(X: Tensor, coefficients: list[float]) -> Tensor:
    return torch.empty_like(X)


@_quintic_steps.register_kernel("cuda")
def _(X: Tensor, coefficients: list[float]) -> Tensor:
    from nanosprint.kernels.tuning import wins

    triples, (rows, cols) = _triples(coefficients), X.shape[1:]
    capability = torch.cuda.get_device_capability(X.device)
    if not (wins(min(rows, cols), capability) and fits_kernel(X)):
        return quintic_steps_reference(X.clone(), triples)
    from nanosprint.kernels.polar import quintic_steps

    return quintic_steps(aligned(X), triples, capability)[:, :rows, :cols].contiguous()


def _triples(coefficients: list[float]) -> Coefficients:
    a, b, c = coefficients[0::3], coefficients[1::3], coefficients[2::3]
    return list(zip(a, b, c, strict=True))


def quintic_steps_reference(X: Tensor, coefficients: Coefficients) -> Tensor:
    """Apply X <- a X + b A X + c A^2 X in turn, A the Gram matrix of the shorter side. X: (B, M, N), overwritten.

    Tall matrices multiply from the right, X (b A + c A^2) with A = X^T X, so nothing is transposed. Each `+` rides in
    the accumulator of a product, in fp32: adding after rounding to bf16 triples the error (0.012 -> 0.035), and adding
    a to the diagonal of b A + c A^2 doubles it. The price is that cuBLAS first copies what is added.
    """
    tall = X.shape[-2] > X.shape[-1]
    side = min(X.shape[-2:])
    A, B = X.new_empty(2, X.shape[0], side, side)
    Y = torch.empty_like(X)
    for a, b, c in coefficients:
        if tall:
            torch.bmm(X.mT, X, out=A)
        else:
            torch.bmm(X, X.mT, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=B)
        if tall:
            torch.baddbmm(X, X, B, beta=a, out=Y)
        else:
            torch.baddbmm(X, B, X, beta=a, out=Y)
        X, Y = Y, X
    return X
