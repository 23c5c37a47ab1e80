"""The output head by parts: the loss with its gradient, products in FP8, and the copies that these read."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inputs import CAP, SCALES, Sizes, record_labels
from benchmarks.ops import liger
from benchmarks.ops.case import Case, Cost, Operator, error_of, passes, sample
from nanosprint.ops.fp8 import E4M3, E5M2, quantize, quantize_pair, scaled_product
from nanosprint.ops.softcap_xent import curve_of, loss_and_grad

ROWS = 65_536  # that the head takes at once: more logits than these would be too much of the memory
CUBLAS = "ours is cuBLAS"
_FP8 = {E4M3: 2.0**-5, E5M2: 2.0**-8}  # what a code of 1 stands for in standard normal numbers and their gradients


def capped_loss(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The record's loss, summed: a capped softmax against several weighted labels."""
    z = CAP.cap * torch.sigmoid((logits.float() + CAP.shift) / CAP.width)
    return (weights * (z.logsumexp(-1, keepdim=True) - z.gather(1, ids))).sum()


def plain_loss(logits: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Next-token cross-entropy, summed."""
    return F.cross_entropy(logits.float(), ids[:, 0], reduction="sum")


def loss(sizes: Sizes, capped: bool = True, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Losses of all rows and the gradient of their sum in `dtype`, in one pass over the logits."""
    rows = min(sizes.tokens, ROWS)
    logits = sizes.leaf(rows, sizes.vocab)
    targets = sizes.ids(rows)
    labels = record_labels(targets, 4 if capped else 1)
    out = torch.empty_like(logits, dtype=dtype)
    inverse = 1 / SCALES.gradient if dtype == E5M2 else 1.0
    formula = capped_loss if capped else plain_loss
    ours = partial(loss_and_grad, logits.detach(), labels, curve_of(CAP if capped else None), out, inverse=inverse)
    _, eager = passes(partial(formula, ids=labels.ids, weights=labels.weights), [logits], None)
    compiled = partial(torch.compile(formula, dynamic=False), ids=labels.ids, weights=labels.weights)

    def check() -> float:
        losses, some = ours(), sample(rows, device=sizes.device)
        exact, ids = logits.detach()[some].float().requires_grad_(), labels.ids[some]
        total = formula(exact, ids, labels.weights)
        gradient = inverse * torch.autograd.grad(total, exact)[0]
        made = _rows(out, some) if dtype == E5M2 else out[some].float()
        # columns of labels by themselves: they are so much larger that others would not count beside them
        pairs = ((g.gather(1, ids), g.scatter(1, ids, 0.0)) for g in (made, gradient))
        (labelled, rest), (exact_labelled, exact_rest) = pairs
        return error_of((losses[some].sum(), labelled, rest), (total, exact_labelled, exact_rest))

    yield Case(
        shape=f"{rows:,} x {sizes.vocab:,}", ours=ours, check=check, tolerance=7e-2 if dtype == E5M2 else 1e-2,
        costs=(Cost(nbytes=(2 + dtype.itemsize) * logits.numel()),),
        reference="gradients of PyTorch are not in FP8" if dtype == E5M2 else eager,
        compiled="gradients of PyTorch are not in FP8" if dtype == E5M2 else passes(compiled, [logits], None)[1],
        library="no library has this loss" if capped else liger.cross_entropy(logits, targets), fills=(out,),
    )  # fmt: skip


def products(sizes: Sizes) -> Iterator[Case]:
    """Logits, gradient of the input, gradient of the weight: operands ready, in FP8, beside the same in bf16."""
    T, D, V = min(sizes.tokens, ROWS), sizes.dim, sizes.vocab
    x, weight, g = sizes.random(T, D), sizes.random(V, D), sizes.random(T, V)
    (x8, x8_t), (w8, w8_t) = (quantize_pair(t, _FP8[E4M3], E4M3) for t in (x, weight))
    g8, g8_t = quantize_pair(g, _FP8[E5M2], E5M2)
    a, b, some, flops = _FP8[E4M3], _FP8[E5M2], sample(T, device=sizes.device), 2 * T * D * V
    few = slice(0, 128)  # of the vocabulary
    table: list[tuple[str, Any, Any, Any, float]] = [
        (
            "logits", partial(scaled_product, x8, w8, a, a, torch.bfloat16, fast=True), lambda: x @ weight.mT,
            lambda y: (y[some], a * a * _rows(x8, some) @ w8.float().mT), T * D + V * D + 2 * T * V,
        ),
        (
            "dX", partial(scaled_product, g8, w8_t, b, a, torch.bfloat16), lambda: g @ weight,
            lambda y: (y[some], a * b * _rows(g8, some) @ w8_t.float().mT), T * V + V * D + 2 * T * D,
        ),
        (
            "dW", partial(scaled_product, g8_t, x8_t, b, a, torch.float32), lambda: g.mT @ x,
            lambda y: (y[few], a * b * g8_t[few].float() @ x8_t.float().mT), T * V + T * D + 4 * V * D,
        ),
    ]  # fmt: skip
    for name, ours, in_bf16, pair, nbytes in table:
        yield Case(
            name=name, shape=f"{T:,} x {D} x {V:,}", ours=ours, check=partial(_compare, ours, pair), tolerance=1e-2,
            costs=(Cost(flops, nbytes, "fp8"),), reference=in_bf16, compiled="a product by itself", library=CUBLAS,
        )  # fmt: skip


def _rows(codes: Tensor, numbers: Tensor) -> Tensor:
    return codes.view(torch.uint8)[numbers].view(codes.dtype).float()


def _compare(ours: Callable[[], Tensor], pair: Callable[[Tensor], tuple[Tensor, Tensor]]) -> float:
    return error_of(*pair(ours()))


def both_ways(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Codes of x as it lies and transposed, of plain operators."""
    codes = quantize(x, scale, E4M3)
    return codes, codes.view(torch.uint8).mT.contiguous().view(E4M3)


def turned(codes: Tensor) -> Tensor:
    return codes.mT.contiguous()


def copies(sizes: Sizes) -> Iterator[Case]:
    """E4M3 copies of the input both ways round, of the weight likewise; the logits' gradient transposed."""
    T = min(sizes.tokens, ROWS)
    for name, x in (("input", sizes.random(T, sizes.dim)), ("weight", sizes.random(sizes.dim, sizes.vocab))):
        ours, eager = (partial(f, x, _FP8[E4M3]) for f in (_pair, both_ways))
        yield Case(
            name=f"{name}, E4M3 both ways round", shape=f"{x.shape[0]:,} x {x.shape[1]:,}", ours=ours,
            check=partial(_same, ours, eager), tolerance=1e-3, costs=(Cost(nbytes=4 * x.numel()),), reference=eager,
            compiled=partial(torch.compile(both_ways, dynamic=False), x, _FP8[E4M3]),
        )  # fmt: skip
    g8 = quantize(sizes.random(T, sizes.vocab), _FP8[E5M2], E5M2)
    as_bytes = g8.view(torch.uint8)

    def turn() -> Tensor:
        return quantize_pair(g8, 1.0, E5M2)[1]

    yield Case(
        name="logits' gradient, E5M2, transposed", shape=f"{T:,} x {sizes.vocab:,}", ours=turn,
        check=lambda: float(not torch.equal(turn().view(torch.uint8), turned(as_bytes))), tolerance=0.0,
        costs=(Cost(nbytes=2 * g8.numel()),), reference=partial(turned, as_bytes),
        compiled=partial(torch.compile(turned, dynamic=False), as_bytes),
    )  # fmt: skip


def _pair(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return quantize_pair(x, scale, E4M3)


def _same(ours: Callable[[], Any], eager: Callable[[], Any]) -> float:
    return error_of(ours(), eager())


OPERATORS = (
    Operator("cross entropy, next token, bf16 gradient", partial(loss, capped=False)),
    Operator("cross entropy, record's, bf16 gradient", loss),
    Operator("cross entropy, record's, E5M2 gradient", partial(loss, dtype=E5M2)),
    Operator("head product, FP8", products),
    Operator("head copies", copies),
)
