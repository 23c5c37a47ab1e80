"""Look-up tables: the gradients of their rows, and Adam on the largest of them."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.inputs import Sizes
from benchmarks.ops.case import Case, Cost, Library, Operator, error_of
from nanosprint.model.techniques.bigram import bigram_rows
from nanosprint.ops.embedding import sort_rows
from nanosprint.optim import AdamW

LR, BETAS, EPS, DECAY = 0.6, (0.75, 0.95), 1e-10, 0.025  # of the hashed pairs, in the record


def dense_backward(grads: list[Tensor], ids: Tensor, size: int) -> Tensor:
    """What autograd does with a look-up and a split into parts."""
    grad = grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)
    return torch.ops.aten.embedding_dense_backward(grad, ids, size, -1, False)


def look_ups(sizes: Sizes, which: str) -> Iterator[Case]:
    """The gradient of a table, zero at first, from those of its rows, ids sorted beforehand."""
    ids, size, parts = sizes.text_ids(sizes.tokens), sizes.vocab, 1
    if which == "pairs":
        ids, size = bigram_rows(ids[None], sizes.pairs)[0], sizes.pairs
    if which == "value tables":
        parts = sizes.tables
    grads, rows = [sizes.random(sizes.tokens, sizes.dim) for _ in range(parts)], sort_rows(ids)

    def ours() -> Tensor:
        table = torch.zeros(size, parts * sizes.dim, dtype=torch.bfloat16, device=sizes.device)
        torch.ops.nanosprint.add_rows(table, grads, list(range(parts)), rows.order, rows.sorted_ids)
        return table

    def check() -> float:
        last = torch.zeros(size, sizes.dim, device=sizes.device).index_add_(0, ids, grads[-1].float())
        return error_of(ours()[:, -sizes.dim :], last)

    yield Case(
        shape=f"{sizes.tokens:,} of {size:,} x {parts * sizes.dim}", ours=ours, check=check, tolerance=5e-3,
        costs=(Cost(nbytes=2 * parts * sizes.dim * (sizes.tokens + size)),),
        reference=partial(dense_backward, grads, ids, size),
        compiled=partial(torch.compile(dense_backward, dynamic=False), grads, ids, size),
        library="torch's own is the eager one",
    )  # fmt: skip


def sorting(sizes: Sizes) -> Iterator[Case]:
    """The order that look-ups of the same ids share."""
    ids = sizes.text_ids(sizes.tokens)

    def check() -> float:
        rows = sort_rows(ids)
        ordered = ids.cpu().sort(stable=True)
        return error_of((rows.order.cpu(), rows.sorted_ids.cpu()), (ordered.indices, ordered.values))

    yield Case(
        shape=f"{sizes.tokens:,}", ours=partial(sort_rows, ids), check=check, tolerance=0.0,
        costs=(Cost(nbytes=(8 + 8 + 4) * sizes.tokens),), reference="ours is torch.sort",
        compiled="ours is torch.sort", library="ours is torch.sort",
    )  # fmt: skip


def first_step(weight: Tensor, grad: Tensor, average: Tensor, square: Tensor) -> None:
    """Adam's first update with cautious decay, in fp32, everything but the gradient in place."""
    grad = grad.float()
    average.copy_(BETAS[0] * average + (1 - BETAS[0]) * grad)
    square.copy_(BETAS[1] * square + (1 - BETAS[1]) * grad * grad)
    root = (1 - BETAS[1]) ** 0.5
    step = LR / (1 - BETAS[0]) * root * average / (square.sqrt() + EPS)
    wide = weight.float()
    weight.copy_(wide - step - torch.where(step * wide > 0, LR * LR * DECAY * wide, 0.0))


def adam(sizes: Sizes) -> Iterator[Case]:
    """The whole table of hashed pairs in bf16, its averages in fp32: every row, looked up or not."""
    weight, grad = sizes.random(sizes.pairs, sizes.dim), 1e-3 * sizes.random(sizes.pairs, sizes.dim)
    averages = [torch.zeros_like(weight, dtype=torch.float32) for _ in range(2)]
    param, twin = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    param.grad = twin.grad = grad
    rule = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    optimizer = AdamW([param], eps_form="uncorrected", decay="cautious", **rule)
    eager = partial(first_step, weight, grad, *averages)

    def check() -> float:
        before = weight.float()
        optimizer.step()
        eager()
        state = optimizer.state[param]
        moved = param.detach().float() - before, state["exp_avg"], state["exp_avg_sq"]
        return error_of(moved, (weight.float() - before, *averages))

    yield Case(
        shape=f"{sizes.pairs:,} x {sizes.dim}", ours=optimizer.step, check=check, tolerance=5e-3,
        costs=(Cost(nbytes=22 * weight.numel()),), reference=eager,
        compiled=partial(torch.compile(first_step, dynamic=False), weight, grad, *averages),
        library=Library("torch fused, averages in bf16", torch.optim.AdamW([twin], fused=True, **rule).step),
        changes=lambda: (param, optimizer.state[param]),
    )  # fmt: skip


OPERATORS = (
    Operator("look-up gradient, tokens", partial(look_ups, which="tokens")),
    Operator("look-up gradient, pairs", partial(look_ups, which="pairs")),
    Operator("look-up gradient, value tables", partial(look_ups, which="value tables")),
    Operator("look-ups, sort of the ids", sorting),
    Operator("Adam, table of pairs", adam, by_tokens=False),
)
