"""Muon on the record's matrices: symmetric products, the orthogonalisation, and the whole update."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_optim import symmetric_flops, without_kernels
from benchmarks.inputs import Sizes
from benchmarks.ops.case import Case, Cost, Library, Operator, error_of
from nanosprint.ops.polar import POLAR_EXPRESS, polar_express
from nanosprint.ops.symmetric import gram_poly, gram_poly_reference, xtx, xtx_reference, xxt, xxt_reference
from nanosprint.optim import Muon
from nanosprint.optim.mantissa import join

PRODUCT = "a product by itself"
LR, MOMENTUM, BETA, DECAY = 0.023, 0.95, 0.9, 1.2
# Of a direction's RMS. bf16 moves entries by 1 % of it, which decides cautious decay differently for 1 % of them; that
# alone is 3 to 5 % of the update, five times the rest. An entry this far from zero, at eight times that, is decided.
UNSURE = 0.08
RULE = {
    "lr": LR, "momentum": MOMENTUM, "orthogonalizer": "polar_express", "variance_beta": BETA, "decay": "cautious",
    "weight_decay": DECAY, "mantissa": True, "stacked": True,
}  # fmt: skip


def gram(sizes: Sizes) -> Iterator[Case]:
    """X X^T or X^T X, whichever is smaller, of each stack of matrices."""
    for batch, rows, cols in sizes.banks:
        X, tall = sizes.random(batch, rows, cols), rows > cols
        side, other = min(rows, cols), max(rows, cols)
        ours, plain = (xtx, xtx_reference) if tall else (xxt, xxt_reference)
        pair = (X.mT, X) if tall else (X, X.mT)
        yield Case(
            name="X^T X" if tall else "X X^T", shape=f"{batch} x {rows} x {cols}", ours=partial(ours, X),
            check=partial(_agree, partial(ours, X), partial(_float_product, *pair)), tolerance=4e-3,
            costs=(Cost(batch * side * side * other, 2 * batch * (rows * cols + side * side)),),
            reference=partial(plain, X), compiled=PRODUCT, library=Library("cuBLAS", partial(torch.bmm, *pair)),
        )  # fmt: skip


def polynomial(sizes: Sizes) -> Iterator[Case]:
    """b A + c A^2 of the largest stack's Gram matrices."""
    batch, side = sum(bank[0] for bank in sizes.banks if min(bank[1:]) == sizes.dim), sizes.dim
    A = xxt(sizes.random(batch, side, side) / side**0.5)
    b, c = POLAR_EXPRESS[1][1:]
    exact = lambda: b * A.float() + c * _float_product(A, A)  # noqa: E731
    yield Case(
        shape=f"{batch} x {side} x {side}", ours=partial(gram_poly, A, b, c),
        check=partial(_agree, partial(gram_poly, A, b, c), exact), tolerance=4e-3,
        costs=(Cost(batch * side**3, 4 * A.numel()),), reference=partial(gram_poly_reference, A, b, c),
        compiled=PRODUCT, library=Library("cuBLAS", partial(torch.baddbmm, A, A, A, beta=b, alpha=c)),
    )  # fmt: skip


def _float_product(P: Tensor, Q: Tensor) -> Tensor:
    return P.float() @ Q.float()


def _agree(work: Callable[[], Tensor], truth: Callable[[], Tensor]) -> float:
    return error_of(work(), truth())


def textbook_polar(X: Tensor) -> Tensor:
    """Polar Express as published, in the dtype of X: products of the shorter side, sums rounded one by one."""
    Y = X.mT if X.shape[-2] > X.shape[-1] else X
    Y = Y / (1.02 * Y.float().norm(dim=(-2, -1), keepdim=True) + 1e-6).to(Y.dtype)
    for a, b, c in POLAR_EXPRESS:
        A = Y @ Y.mT
        Y = a * Y + (b * A + c * A @ A) @ Y
    return Y.mT if X.shape[-2] > X.shape[-1] else Y


def polar(sizes: Sizes) -> Iterator[Case]:
    """All matrices of the model, a call for each stack."""
    stacks = [sizes.random(*bank) for bank in sizes.banks]

    def ours() -> list[Tensor]:
        return [polar_express(X) for X in stacks]

    yield Case(
        shape=_names(sizes), ours=ours, check=lambda: error_of(ours(), [textbook_polar(X.float()) for X in stacks]),
        tolerance=4e-2, costs=(Cost(_flops(sizes), sum(4 * X.numel() for X in stacks)),),
        reference=lambda: [textbook_polar(X) for X in stacks], compiled=PRODUCT,
        library=Library("cuBLAS, our formula", partial(_by_cublas, ours)),
    )  # fmt: skip


def first_update(weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What Muon's first step adds to bf16 weights, all of the record's options on: in fp32, from formulas.

    What is orthogonalised is rounded to bf16 first, as a part of the rule. Two answers: cautious decay is a jump where
    a direction changes its sign, and bf16 decides it for entries near zero. There the second has the other choice, and
    elsewhere it is the same.
    """
    direction = textbook_polar(((1 - MOMENTUM**2) * grad.float()).bfloat16().float())
    rows, cols = weight.shape[-2:]
    length = direction.norm(dim=(-2, -1), keepdim=True)
    direction = direction / direction.square().mean(-1 if rows >= cols else -2, keepdim=True).sqrt()
    direction = direction * length / direction.norm(dim=(-2, -1), keepdim=True)
    step = LR * max(1.0, rows / cols) ** 0.5
    shrink, shrinks = step * LR * DECAY * weight.float(), direction * weight.float() >= 0
    unsure = direction.abs() < UNSURE * direction.square().mean((-2, -1), keepdim=True).sqrt()
    return tuple(-step * direction - torch.where(chosen, shrink, 0.0) for chosen in (shrinks, shrinks ^ unsure))


def nearer(got: Tensor, either: tuple[Tensor, Tensor]) -> Tensor:
    """Entry by entry, whichever of the two is nearer to `got`."""
    one, other = either
    return torch.where((got - one).abs() <= (got - other).abs(), one, other)


def uneven(grad: Tensor) -> Tensor:
    """Rows, or of a wide matrix columns, of a fourth to four times their size: such as make evening out show."""
    tall = grad.shape[-2] >= grad.shape[-1]
    sizes = torch.linspace(-2, 2, max(grad.shape[-2:]), device=grad.device).exp2().to(grad.dtype)
    return grad * (sizes[:, None] if tall else sizes)


def muon(sizes: Sizes) -> Iterator[Case]:
    """A step of the rule on banks of bf16 weights, as training keeps them: momentum to lower halves."""
    params = [torch.nn.Parameter(sizes.random(*bank)) for bank in sizes.banks]  # so large that decay shows
    twins = [torch.nn.Parameter(matrix.clone()) for param in params for matrix in param.detach()]
    for param in (*params, *twins):
        param.grad = uneven(1e-3 * sizes.random(*param.shape))
    optimizer = Muon(params, **RULE)

    def check() -> float:
        before = [p.detach().clone() for p in params]
        expected = [first_update(p, _gradient(q)) for p, q in zip(before, params, strict=True)]
        optimizer.step()
        after = [join(p.detach(), optimizer.state[p]["mantissa"]) for p in params]
        moves = [a - b.float() for a, b in zip(after, before, strict=True)]
        return error_of(moves, [nearer(*pair) for pair in zip(moves, expected, strict=True)])

    nbytes = 18 * sum(p.numel() for p in params)
    # 1e-2 is what the orthogonalisation in bf16 is off by; of the few rows of a tiny model, 2e-2.
    yield Case(
        shape=_names(sizes), ours=optimizer.step, check=check, tolerance=1.5e-2 if sizes.dim >= 256 else 3e-2,
        costs=(Cost(nbytes=nbytes), Cost(_flops(sizes))), reference=partial(_by_cublas, optimizer.step),
        compiled="bench_optim has it", library=_torch_muon(twins),
        changes=lambda: [(param, optimizer.state[param]) for param in params],
    )  # fmt: skip


def _torch_muon(params: list[Any]) -> Library | str:
    if not hasattr(torch.optim, "Muon"):
        return f"torch {torch.__version__} has no Muon"
    return Library("torch.optim.Muon, plain", torch.optim.Muon(params, lr=LR).step)


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _by_cublas(work: Callable[[], Any]) -> Any:
    with without_kernels():
        return work()


def _flops(sizes: Sizes) -> float:
    return symmetric_flops([shape for count, *shape in sizes.banks for _ in range(count)])


def _names(sizes: Sizes) -> str:
    return ", ".join(" x ".join(map(str, bank)) for bank in sizes.banks)


OPERATORS = (
    Operator("symmetric product", gram, by_tokens=False),
    Operator("b A + c A^2", polynomial, by_tokens=False),
    Operator("Polar Express", polar, by_tokens=False),
    Operator("Muon, whole update", muon, by_tokens=False),
)
