"""Operators that `benchmarks.ops` does not time and `benchmarks.stress` repeats all the same: no floor, no rival."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.bench_rotary import EPS
from benchmarks.inputs import CAP, SCALES, Sizes, mlp_operands, projected, record_labels
from benchmarks.ops.attention import NAMES
from benchmarks.ops.case import Case, Operator, Work, passes
from benchmarks.ops.head import ROWS
from benchmarks.ops.tables import BETAS, DECAY, LR
from nanosprint.model.fp8_projection import Fp8Projection
from nanosprint.model.techniques.bigram import bigram_rows
from nanosprint.ops.embedding import lookup_chunks, sort_rows
from nanosprint.ops.fp8 import LARGEST
from nanosprint.ops.fp8_copies import renew
from nanosprint.ops.head_loss import head_loss
from nanosprint.ops.linear_relu2 import relu2_grad_turned, up_relu2_turned
from nanosprint.ops.qk_norm_rotary import NormRotary
from nanosprint.ops.signed_rows import signed_lookup
from nanosprint.optim import AdamW
from nanosprint.optim.adam import step_together


def bare(ours: Work, name: str = "", **more: Any) -> Case:
    """A case that nobody times or compares with a formula."""
    return Case(
        name=name, shape="", ours=ours, check=lambda: 0.0, tolerance=0.0, costs=(), reference="", compiled="", **more
    )


def turned(sizes: Sizes) -> Iterator[Case]:
    """Codes both ways round, as gradients of the MLP's weights in FP8 want them."""
    up, dpre = mlp_operands("up8", sizes), mlp_operands("dpre8", sizes)
    assert up.scales is not None
    assert up.code_scale is not None
    make = partial(up_relu2_turned, up.A, up.B, up.scales, up.code_scale)
    yield bare(make, "up")
    derive = partial(relu2_grad_turned, dpre.A, dpre.B.mT, make()[0], up.code_scale)
    yield bare(partial(derive, dpre.scales, dpre.code_scale), "dpre")


def projection(sizes: Sizes) -> Iterator[Case]:
    """Queries, keys and values in FP8, whose gradient's kernel writes codes, too."""
    _, cos, sin, grads = projected(sizes)
    shape, half = (3 * sizes.dim, sizes.dim), sizes.head_dim // 2
    x, weight = sizes.leaf(1, sizes.tokens, sizes.dim), (sizes.random(*shape) / sizes.dim**0.5).requires_grad_()
    scale = sizes.dim**0.5 / LARGEST
    module = Fp8Projection(shape, x.device, gradient_scale=2.0**-10, input_scale=scale)
    renew([module.weight.copy_of((weight.detach(),))])
    how = NormRotary(sizes.heads, cos, sin, EPS, torch.bfloat16, "neighbours", ((half, 2 * half),), half // 2)
    both = passes(lambda x, weight: module.queries_keys_values(x, weight, how), (x, weight), grads)
    for name, work in zip(NAMES, both, strict=True):
        yield bare(work, name)


def head(sizes: Sizes) -> Iterator[Case]:
    """The loss and its gradients, products and all."""
    T = min(sizes.tokens, ROWS)
    x, weight, labels = sizes.leaf(T, sizes.dim), sizes.leaf(sizes.vocab, sizes.dim), record_labels(sizes.ids(T), 4)
    loss = partial(head_loss, labels=labels, softcap=CAP, scales=SCALES)
    _, both = passes(loss, (x, weight), None)
    yield bare(both)


def look_ups(sizes: Sizes) -> Iterator[Case]:
    """Tables side by side, and rows times signs, with what autograd makes of them."""
    ids = sizes.text_ids(sizes.tokens)
    rows, table = sort_rows(ids), sizes.leaf(sizes.vocab, sizes.tables * sizes.dim)
    grads = [sizes.random(sizes.tokens, sizes.dim) for _ in range(sizes.tables)]
    _, both = passes(partial(lookup_chunks, rows=rows, count=sizes.tables), (table,), grads)
    yield bare(both, "value tables")
    pairs, weight = sort_rows(bigram_rows(ids[None], sizes.pairs)[0]), sizes.leaf(sizes.pairs, sizes.dim)
    signs = 2 * torch.randint(2, (64, sizes.dim), device=sizes.device, generator=sizes.generator).to(torch.int8) - 1
    signed = partial(signed_lookup, rows=pairs, signs=signs, sign_ids=ids % 64, dtype=torch.bfloat16)
    for name, work in zip(NAMES, passes(signed, (weight,), grads[0]), strict=True):
        yield bare(work, f"signed pairs, {name}")


def small_banks(sizes: Sizes) -> Iterator[Case]:
    """Adam on many small tensors in one launch: its numbers and addresses come from the host at every step."""
    rule: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "decay": "cautious"}
    params = [torch.nn.Parameter(sizes.random(16 * (i + 1))) for i in range(24)]
    for param in params:
        param.grad = sizes.random(*param.shape)
    optimizers = [AdamW([param], **rule) for param in params]
    states = [(param, optimizer) for param, optimizer in zip(params, optimizers, strict=True)]
    yield bare(partial(step_together, optimizers), changes=lambda: [(p, o.state[p]) for p, o in states])


OPERATORS = (
    Operator("MLP, codes both ways round", turned),
    Operator("projection in FP8, norm, rotary positions", projection),
    Operator("head loss, FP8", head),
    Operator("look-ups by autograd", look_ups),
    Operator("Adam, small banks together", small_banks, by_tokens=False),
)
