"""What a row of the table is made of: an operator on data, what it must agree with, and what it needs at least."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.floors import Ceilings
from benchmarks.inputs import Sizes

Work = Callable[[], Any]


class Cost(NamedTuple):
    """What one pass needs at least: operations in `precision`, and each of its tensors' bytes once."""

    flops: float = 0.0
    nbytes: float = 0.0
    precision: Literal["bf16", "fp8"] = "bf16"


class Library(NamedTuple):
    """Somebody else's way to do the same."""

    name: str
    work: Work


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. Where there is nothing to time, a text says why not.

    ours: the operator as training calls it. check: called once, before anything is timed, it returns the relative error
    against the formula in fp32, which must not exceed `tolerance`. costs: one for each pass. reference: the same of
    eager PyTorch operators. compiled: those compiled by torch, at its first call.

    changes: what `ours` updates in place, tensors in whatever holds them, once it has been called. fills: tensors that
    it overwrites, whatever they held.
    """

    name: str = ""
    shape: str
    ours: Work
    check: Callable[[], float]
    tolerance: float
    costs: Sequence[Cost]
    reference: Work | str
    compiled: Work | str
    library: Library | str = "no library has it"
    changes: Callable[[], Any] | None = None
    fills: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Operator:
    """Cases that share their data. by_tokens: whether they depend on the number of tokens."""

    name: str
    make: Callable[[Sizes], Iterable[Case]]
    by_tokens: bool = True


def floor_ms(costs: Sequence[Cost], ceilings: Ceilings) -> float:
    """Milliseconds that the passes take at least, one after the other."""
    return sum(ceilings.least_ms(cost.flops, cost.nbytes, cost.precision) for cost in costs)


def memory_bound(costs: Sequence[Cost], ceilings: Ceilings) -> bool:
    """Whether bytes make up most of the floor."""
    moving = sum(ceilings.bytes_ms(cost.nbytes) for cost in costs)
    return moving > sum(1e3 * cost.flops / getattr(ceilings, cost.precision) for cost in costs)


def error_of(got: Any, expected: Any) -> float:
    """|got - expected| / |expected|, the largest over pairs of tensors. NaN stays NaN, and so exceeds any tolerance."""
    if isinstance(got, Tensor):
        got, expected = (got,), (expected,)
    errors = torch.stack([_relative(g, e) for g, e in zip(got, expected, strict=True)])
    return float(errors.max())


def _relative(got: Tensor, expected: Tensor) -> Tensor:
    if got.shape != expected.shape:
        raise ValueError(f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    got, expected = got.detach().float(), expected.detach().float()
    return (got - expected).norm() / expected.norm().clamp_min(1e-30)


def passes(function: Callable[..., Any], leaves: Sequence[Tensor], grads: Any) -> tuple[Work, Work]:
    """Forward, its intermediates kept as in training, and forward with backward: gradients of the leaves."""

    def forward() -> Any:
        return function(*leaves)

    return forward, lambda: torch.autograd.grad(forward(), leaves, grads)


def sample(rows: int, most: int = 256, device: str = "cpu") -> Tensor:
    """Numbers of the first and the last rows, for which a formula in fp32 has room."""
    most = min(most, rows // 2)
    return torch.cat((torch.arange(most, device=device), torch.arange(rows - most, rows, device=device)))
