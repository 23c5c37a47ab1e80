"""Between the projections: norm and rotary positions, attention, what composed maps read."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_rotary import EPS, formulas
from benchmarks.floors import visible_pairs
from benchmarks.inputs import Heads, Sizes, first_documents, heads, projected
from benchmarks.ops import liger
from benchmarks.ops.case import Case, Cost, Library, Operator, Work, error_of, passes
from nanosprint.ops.attention import available, backend, reference
from nanosprint.ops.attention_backends.contract import Documents, first_key
from nanosprint.ops.compose import composed_read, composed_read_reference
from nanosprint.ops.qk_norm_rotary import qk_norm_rotary

SCALE = 0.1
NAMES = ("forward", "forward and backward")
_SCORES = 2**35  # bytes of one tensor of scores that the eager formula may take


def rotary(sizes: Sizes, together: int = 1, offset: bool = False) -> Iterator[Case]:
    """From the merged projection to q, k and v. together: heads that turn side by side, as in paired layers."""
    qkv, cos, sin, grads = projected(sizes, together)
    half = sizes.head_dim // 2
    ranges = ((half, 2 * half),) if offset else ()
    ours = partial(
        qk_norm_rotary, num_heads=sizes.heads, cos_SP=cos, sin_SP=sin, eps=EPS, dtype=torch.bfloat16,
        pairs="neighbours", key_offset=ranges, turning=half // 2,
    )  # fmt: skip
    plain = partial(formulas, heads=sizes.heads, cos=cos, sin=sin, eps=EPS, key_offset=ranges)
    compiled = partial(
        torch.compile(formulas, dynamic=False), heads=sizes.heads, cos=cos, sin=sin, eps=EPS, key_offset=ranges
    )
    exact = passes(plain, [qkv.detach().float().requires_grad_()], [g.float() for g in grads])
    unit = 2 * sizes.tokens * sizes.dim
    costs = (Cost(nbytes=6 * unit),), (Cost(nbytes=6 * unit), Cost(nbytes=8 * unit))
    ways = zip(NAMES, *(passes(f, [qkv], grads) for f in (ours, plain, compiled)), exact, costs, strict=True)
    rival = "no library turns neighbours" if together > 1 or offset else liger.norm_and_rope(qkv, sizes.heads, cos, sin)
    for name, mine, eager, merged, truth, cost in ways:
        yield Case(
            name=name, shape=f"{sizes.tokens:,} x 3 x {sizes.heads} x {sizes.head_dim}", ours=mine,
            check=partial(_agree, mine, truth), tolerance=1e-2, costs=cost, reference=eager, compiled=merged,
            library=rival if isinstance(rival, str) or name == NAMES[0] else f"{rival.name}: forward only",
        )  # fmt: skip


def _agree(work: Work, truth: Work) -> float:
    return error_of(work(), truth())


def attend(sizes: Sizes, which: int) -> Iterator[Case]:
    """`which` of the windows, over documents of web-like lengths: back end triton, on a CPU that of CPUs."""
    data, window = heads(sizes), sizes.windows[which]
    device = torch.device(sizes.device)
    limits = {"scale": SCALE, "window": window, "documents": data.documents}
    ours = passes(partial(backend("triton" if device.type == "cuda" else "sdpa"), **limits), data.leaves, data.grad)
    scores = 4 * sizes.heads * sizes.tokens**2
    eager: tuple[Work | str, Work | str] = ("H x T x T scores do not fit",) * 2
    if scores < _SCORES:
        eager = passes(partial(reference, **limits), data.leaves, data.grad)
    others = available(device, torch.bfloat16, head_dim=sizes.head_dim)
    other = next((name for name in ("fa3", "fa2") if others[name] is None), None)
    rivals = (
        passes(partial(backend(other), **limits), data.leaves, data.grad) if other else ("fa2 does not run here",) * 2
    )
    flops = 4 * sizes.dim * visible_pairs(1, sizes.tokens, window, data.documents)
    unit = 2 * sizes.tokens * sizes.dim
    forward, backward = Cost(flops, 4 * unit), Cost(2.5 * flops, 8 * unit)
    checks = _first_alone(ours, partial(reference, scale=SCALE, window=window), data)
    costs = ((forward,), (forward, backward))
    for name, mine, check, cost, plain, rival in zip(NAMES, ours, checks, costs, eager, rivals, strict=True):
        yield Case(
            name=name, shape=_shape(sizes, data), ours=mine, check=check, tolerance=1e-2, costs=cost, reference=plain,
            compiled="FlexAttention is in bench_attention",
            library=rival if isinstance(rival, str) else Library(str(other), rival),
        )  # fmt: skip


def composed(sizes: Sizes) -> Iterator[Case]:
    """What the mixture of all heads' maps reads."""
    data = heads(sizes, weights=2)
    limits = {"scale": SCALE, "window": sizes.compose_window, "documents": data.documents}
    ours = passes(partial(composed_read, **limits), data.leaves, data.grad)
    eager = passes(partial(composed_read_reference, **limits), data.leaves, data.grad)
    checks = _first_alone(ours, partial(composed_dense, window=sizes.compose_window), data)
    flops, unit = 4 * sizes.tokens * sizes.compose_window * sizes.dim, 2 * sizes.tokens * sizes.dim
    forward, backward = Cost(flops, 4 * unit), Cost(2.5 * flops, 7 * unit)
    costs = ((forward,), (forward, backward))
    for name, mine, check, cost, plain in zip(NAMES, ours, checks, costs, eager, strict=True):
        yield Case(
            name=name, shape=_shape(sizes, data), ours=mine, check=check, tolerance=2e-2, costs=cost, reference=plain,
            compiled="takes long to compile: bench_compose",
        )  # fmt: skip


def composed_dense(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, window: int, documents: Documents
) -> Tensor:
    """The formula of `ops.compose` with whole maps, S x S."""
    at = torch.arange(q.size(1), device=q.device)
    first = first_key(1, q.size(1), window - 1, documents, q.device)[0]
    visible = (first[:, None] <= at) & (at <= at[:, None])
    scores = SCALE * torch.einsum("bthk,bshk->bhts", q, k)
    maps = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    mixed = torch.einsum("bth,bhts->bts", w1, maps)
    return w2.unsqueeze(-1) * torch.einsum("bts,bshk->bthk", mixed, v)


def _first_alone(
    ours: tuple[Work, Work], formula: Callable[..., Any], data: Heads
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Checks of both passes on the first two documents, of which the formula in fp32 sees nothing else."""
    tokens, documents = first_documents(data.documents)

    def start(tensors: Any) -> list[Tensor]:
        together = (tensors,) if isinstance(tensors, Tensor) else tensors
        return [t[:, :tokens].detach().float() for t in together]

    leaves = [t.requires_grad_() for t in start(data.leaves)]
    truths = passes(partial(formula, documents=documents), leaves, start(data.grad)[0])
    checks = [
        lambda w=work, t=truth: error_of(start(w()), start(t())) for work, truth in zip(ours, truths, strict=True)
    ]
    return checks[0], checks[1]


def _shape(sizes: Sizes, data: Heads) -> str:
    count = int((data.documents.cu_seqlens.diff() > 0).sum())
    return f"{sizes.tokens:,} x {sizes.heads} x {sizes.head_dim}, {count} documents"


OPERATORS = (
    Operator("norm, rotary positions", rotary),
    Operator("norm, rotary positions, key offset", partial(rotary, offset=True)),
    Operator("norm, rotary positions, paired", partial(rotary, together=2)),
    Operator("attention, short window", partial(attend, which=0)),
    Operator("attention, long window", partial(attend, which=1)),
    Operator("composed attention", composed),
)
