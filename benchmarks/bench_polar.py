"""Polar Express of all stacks in common launches against one by one: `python -m benchmarks.bench_polar [--json FILE]`.

On a Hopper GPU, in less than 25 s, for the banks of the record and of a model with nine layers: microseconds of each
product of a step (X X^T or X^T X, b A + c A^2, a X + B X) and of the whole, stack after stack as it is now, the new
kernel stack after stack, and the new kernel for all at once; operations count half where results are symmetric. Before
that, the distance of both from the formula in fp32, on the first matrices of each stack.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_optim import symmetric_flops
from benchmarks.harness import graph_ms, write_rows
from benchmarks.ops.case import error_of
from nanosprint.kernels import polar_grouped, tuning
from nanosprint.kernels.polar_jobs import Bank
from nanosprint.kernels.symmetric import Operand, product
from nanosprint.kernels.tuning import cublas_gram, full_tile, symmetric_tile
from nanosprint.ops.polar import POLAR_EXPRESS, orthogonalize_stacks, polar_express, share_launches

SETS = (
    (Bank(60, 256, 768), Bank(20, 768, 768), Bank(22, 3072, 768)),
    (Bank(48, 256, 768), Bank(16, 768, 768), Bank(18, 3072, 768)),
)
PRODUCTS = ("Gram", "polynomial", "update")
A, B, C = POLAR_EXPRESS[1]
Work = Callable[[], Any]


def microseconds(work: Work) -> float:
    return 1e3 * graph_ms(work, launches=5, repeats=7)[0]


def products_now(X: Tensor) -> dict[str, Work]:
    """The products of `kernels.polar.quintic_steps` for one stack."""
    capability = torch.cuda.get_device_capability()
    batch, rows, cols = X.shape
    side, tall = min(rows, cols), rows > cols
    small, large = symmetric_tile(side, capability), full_tile(capability)
    x, y = Operand(X), Operand(torch.empty_like(X))
    a, b = (Operand(half) for half in X.new_zeros(2, batch, side, side))
    left, right = (x, b) if tall else (b, x)
    pair = (X.mT, X) if tall else (X, X.mT)
    gram: Work = lambda: product(x, x, a, small, turn_p=tall, turn_q=not tall, symmetric=True)  # noqa: E731
    if cublas_gram(side, batch, capability):
        gram = lambda: torch.bmm(*pair, out=a.X)  # noqa: E731
    return {
        "Gram": gram,
        "polynomial": lambda: product(a, a, b, small, turn_q=True, alpha=C, add=a, beta=B, symmetric=True),
        "update": lambda: product(left, right, y, large, add=x, beta=A),
    }


def products_then(banks: Sequence[Bank]) -> dict[str, Work]:
    """The launches of `kernels.polar_grouped.quintic_stacks`."""
    device = torch.device("cuda", torch.cuda.current_device())
    tables = polar_grouped._tables(tuple(banks), device)
    sizes = tables.plan
    x = torch.randn(sizes.rows, sizes.width, device=device).bfloat16() / sizes.width**0.5
    a, b = (x.new_zeros(sizes.gram_rows, sizes.gram_width) for _ in range(2))
    y, run = torch.empty_like(x), polar_grouped.grouped_product
    return {
        "Gram": lambda: run(x, x, a, tables.gram),
        "polynomial": lambda: run(a, a, b, tables.polynomial, alpha=C, add=a, beta=B),
        "update": lambda: run(b, x, y, tables.update, upright=True, add=x, beta=A),
    }


def check(stacks: Sequence[Tensor]) -> None:
    """Print how far both ways are from fp32."""
    heads = [X[:3] for X in stacks]
    truth = [polar_express(X, dtype=torch.float32) for X in heads]
    now = [polar_express(X)[:3].float() for X in stacks]
    then = [Y[:3].float() for Y in orthogonalize_stacks(polar_express, stacks)]
    for X, exact, one, other in zip(stacks, truth, now, then, strict=True):
        errors = error_of(one, exact), error_of(other, exact)
        print(f"  {tuple(X.shape)!s:18s} off by {errors[0]:.2e} now, {errors[1]:.2e} in common launches")


def measure(banks: Sequence[Bank]) -> list[dict[str, Any]]:
    stacks = [torch.randn(bank, device="cuda").bfloat16() for bank in banks]
    shapes = [tuple(bank) for bank in banks]
    assert share_launches(polar_express, shapes, torch.bfloat16, stacks[0].device), "no common launches here"
    print(", ".join(" x ".join(map(str, bank)) for bank in banks))
    check(stacks)
    now = [products_now(X / X[0].float().norm()) for X in stacks]
    apart, common = [products_then([bank]) for bank in banks], products_then(banks)
    rows = []
    for name in PRODUCTS:
        one_by_one = [microseconds(works[name]) for works in now]
        new_apart = [microseconds(works[name]) for works in apart]
        rows.append({"name": name, "now": one_by_one, "new_apart": new_apart, "common": microseconds(common[name])})
    whole = {
        "name": "Polar Express",
        "now": [microseconds(lambda X=X: polar_express(X)) for X in stacks],
        "new_apart": [],
        "common": microseconds(lambda: orthogonalize_stacks(polar_express, stacks)),
    }
    flops = symmetric_flops([shape for num, *shape in banks for _ in range(num)])
    for row in (*rows, whole):
        parts = " + ".join(f"{us:.1f}" for us in row["now"])
        new = " + ".join(f"{us:.1f}" for us in row["new_apart"])
        print(f"  {row['name']:14s} now {parts} = {sum(row['now']):.1f} us", end="")
        print(f"; new {new} = {sum(row['new_apart']):.1f}" if new else "", end="")
        print(f"; in common {row['common']:.1f} us, {sum(row['now']) / row['common']:.2f} x as fast")
    print(f"  {flops / whole['common'] / 1e6:.0f} TFLOP/s of the whole; now {flops / sum(whole['now']) / 1e6:.0f}")
    return [{**row, "banks": shapes} for row in (*rows, whole)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    tuning.GROUPED_POLAR = (torch.cuda.get_device_capability(),)
    print(torch.cuda.get_device_name())
    rows = [row for banks in SETS for row in measure(banks)]
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
