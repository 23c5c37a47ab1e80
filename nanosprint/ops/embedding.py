"""Look-ups in tables whose gradient is summed by sorted segments.

    forward    y_n = W[i_n]
    backward   dW[r] = sum of g_n over all n with i_n = r

The forward pass is plain indexing, which a compiler merges with what follows. The gradient of W is where time goes:
added up by atomic operations, as compilers do it, words that are everywhere make thousands of additions queue for one
address, rounded to bf16 each. On a GPU with Triton the rows are visited in the order of their ids instead: summed in
fp32, rounded once, and the same at every repetition. The sort is cheap beside reading the gradient, and look-ups of
the same ids share it.

Most rows of a large table are looked up by no token of a batch. So the operator adds to rows and touches no others. By
itself it is given zeros, which autograd then adds to the table's gradient: three passes over a table. With `in_place`
it is given the gradient that the table has, and there is nothing left for autograd to add.

N tokens, D columns. Elsewhere than on such a GPU this is `F.embedding` and its gradient.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.kernels import has_triton
from nanosprint.ops.tracing import constant_in_graphs

_log = logging.getLogger(__name__)
_NARROW = (torch.bfloat16, torch.float16, torch.float32)  # tables whose gradient may be summed in fp32


class Rows(NamedTuple):
    """The rows that N tokens look up, and how to visit them in the order of their ids.

    ids: int32 or int64, any shape. order (N,): int64, the tokens' numbers, stably sorted by id. sorted_ids (N,): int32,
    their ids. The last two are None where no kernel will want them.
    """

    ids: Tensor
    order: Tensor | None = None
    sorted_ids: Tensor | None = None


def rows_of(ids: Tensor) -> Rows:
    """The rows to look up, sorted if gradients are on and a kernel sums them. Make it once and use it for many tables.

    Ids must be below 2^31.
    """
    if torch.is_grad_enabled() and ids.is_cuda and _has_kernel():
        return sort_rows(ids)
    return Rows(ids)


def sort_rows(ids: Tensor) -> Rows:
    """The rows to look up, sorted in any case."""
    sorted_ids, order = torch.sort(ids.reshape(-1).int(), stable=True)  # 32 bits: half the passes of a radix sort
    return Rows(ids, order, sorted_ids)


def lookup(weight: Tensor, rows: Rows, dtype: torch.dtype | None = None, *, in_place: bool = False) -> Tensor:
    """Rows (..., D) of weight (R, D) in `dtype` (that of weight if None), differentiable in weight.

    in_place: see `lookup_chunks`.
    """
    return lookup_chunks(weight, rows, 1, dtype, in_place=in_place)[0]


def lookup_chunks(
    weight: Tensor, rows: Rows, count: int, dtype: torch.dtype | None = None, *, in_place: bool = False
) -> tuple[Tensor, ...]:
    """The same in `count` parts: (..., D) each of weight (R, count D), whose rows hold a token's parts side by side.

    Each part's gradient is read where it lies: no (N, count D) is put together. It is summed in fp32 and comes out in
    the dtype of weight.

    in_place: add it to `weight.grad` during the backward pass, row by row, rounded as autograd rounds it: to the dtype
    of weight, and again when it is added. `torch.autograd.grad` does not have it then; hooks that run after a gradient
    is accumulated do, though autograd accumulates nothing. Where rows are not sorted, and for fp64, autograd adds as
    ever.

    Raises ValueError where the parts would not be equally wide, and where there is no gradient to add to.
    """
    if weight.ndim != 2 or weight.size(1) % count:
        raise ValueError(f"a table of shape {tuple(weight.shape)} has no {count} parts of equal width")
    dtype = dtype or weight.dtype
    if rows.order is None or weight.dtype not in _NARROW:
        return F.embedding(rows.ids, weight).to(dtype).chunk(count, dim=-1)
    into = weight.grad if in_place else None
    if in_place and into is None:
        raise ValueError(f"a table of shape {tuple(weight.shape)} has no gradient to add to in place: make it zeros")
    return _Lookup.apply(weight, into, *rows, count, dtype)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        into: Tensor | None,
        ids: Tensor,
        order: Tensor,
        sorted_ids: Tensor,
        count: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(order, sorted_ids)
        # Not saved: what else is added before our turn comes does not matter, though autograd would complain.
        ctx.into, ctx.shape, ctx.dtype = into, weight.shape, weight.dtype
        if not torch.compiler.is_compiling():  # compilers fill in zeros, but every part has a gradient there
            ctx.set_materialize_grads(False)
        return tuple(_cast(F.embedding(ids, part), dtype) for part in weight.chunk(count, dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        order, sorted_ids = ctx.saved_tensors
        present = [(k, g.reshape(-1, g.size(-1))) for k, g in enumerate(grads) if g is not None]
        if not present:
            return (None,) * 7
        parts, flat = [k for k, _ in present], [g for _, g in present]
        fresh = ctx.into is None
        table = torch.zeros(ctx.shape, dtype=ctx.dtype, device=order.device) if fresh else ctx.into
        _add_rows(table, flat, parts, order, sorted_ids)
        return table if fresh else None, None, None, None, None, None, None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; x itself where that is its own.

    torch 2.11 compiles an autograd.Function whose forward pass ends in an x.to(dtype) that changes nothing without its
    gradient, which is zero then.
    """
    return x if x.dtype == dtype else x.to(dtype)


@torch.library.custom_op("nanosprint::add_rows", mutates_args=("table",))
def _add_rows(table: Tensor, grads: Sequence[Tensor], parts: Sequence[int], order: Tensor, sorted_ids: Tensor) -> None:
    """Add to each row of a table (R, count D) what tokens that looked it up give some of its parts, (N, D) each."""
    D = grads[0].size(1)
    outs = [table[:, k * D : (k + 1) * D] for k in parts]
    if order.is_cuda:
        from nanosprint.kernels.embedding import add_segments

        add_segments([g.contiguous() for g in grads], order, sorted_ids, outs)
    else:
        _add_segments(grads, order, sorted_ids, outs)


@_add_rows.register_fake
def _(table: Tensor, grads: Sequence[Tensor], parts: Sequence[int], order: Tensor, sorted_ids: Tensor) -> None:
    return None


def _add_segments(grads: Sequence[Tensor], order: Tensor, sorted_ids: Tensor, outs: Sequence[Tensor]) -> None:
    """What the kernel does: sums in fp32 or wider, rounded, and added to the rows that occur."""
    rows, segment = torch.unique_consecutive(sorted_ids, return_inverse=True)
    for g, out in zip(grads, outs, strict=True):
        wide = torch.promote_types(g.dtype, torch.float32)
        sums = torch.zeros(len(rows), g.size(1), dtype=wide).index_add_(0, segment, g[order].to(wide))
        out[rows] += sums.to(out.dtype)


@constant_in_graphs
def _has_kernel() -> bool:
    return has_triton() or _without_triton()


@functools.cache
def _without_triton() -> bool:
    _log.warning("Triton is not installed: gradients of look-ups are summed by torch, in an order of its own")
    return False
