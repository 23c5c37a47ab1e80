"""Rows of a table times rows of signs, made once.

    y_n = W[i_n] * S[j_n]

As a formula it is so cheap that a compiler puts it wherever y is read, and reads three bytes a number there, of the two
rows it keeps in place of y. A model that adds y to its stream in every layer reads it twenty times a step. So on a GPU
with Triton this is an operator, which compilers leave alone: y is written once, and read as two bytes.

N tokens, D columns. Elsewhere the formula runs, which is the reference.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.kernels import has_triton
from nanosprint.ops.embedding import Rows, lookup


def signed_lookup(
    weight: Tensor, rows: Rows, signs: Tensor, sign_ids: Tensor, dtype: torch.dtype, *, in_place: bool = False
) -> Tensor:
    """Rows (..., D) of weight (R, D) times those of signs (M, D) int8, in `dtype`; differentiable in weight.

    sign_ids: int32 or int64, shaped like `rows.ids`. in_place: see `lookup_chunks`.
    """
    plain = lookup(weight, rows, dtype, in_place=in_place)
    if weight.is_cuda and has_triton() and dtype != torch.float64:
        return signed_rows(plain, weight, rows.ids, signs, sign_ids)
    return plain * F.embedding(sign_ids, signs).to(dtype)


def signed_rows(plain: Tensor, weight: Tensor, ids: Tensor, signs: Tensor, sign_ids: Tensor) -> Tensor:
    """weight[ids] times signs[sign_ids], in the dtype of `plain`, which is weight[ids] and takes the gradient.

    Its values are not read: in a compiled graph they are not even looked up.
    """
    out: Tensor = _SignedRows.apply(plain, weight.detach(), ids, signs, sign_ids)
    return out


class _SignedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, weight: Tensor, ids: Tensor, signs: Tensor, sign_ids: Tensor) -> Tensor:
        ctx.save_for_backward(signs, sign_ids)
        return _rows(weight, ids, signs, sign_ids, plain.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        signs, sign_ids = ctx.saved_tensors  # the signs fit into a GPU's cache
        return grad * F.embedding(sign_ids, signs).to(grad.dtype), None, None, None, None


@torch.library.custom_op("nanosprint::signed_rows", mutates_args=())
def _rows(weight: Tensor, ids: Tensor, signs: Tensor, sign_ids: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.is_cuda:
        from nanosprint.kernels.signed_rows import signed_rows as kernel

        out = weight.new_empty(*ids.shape, weight.size(1), dtype=dtype)
        kernel(weight, ids.contiguous(), signs, sign_ids.contiguous(), out)
        return out
    return F.embedding(ids, weight).to(dtype) * F.embedding(sign_ids, signs).to(dtype)


@_rows.register_fake
def _(weight: Tensor, ids: Tensor, signs: Tensor, sign_ids: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty(*ids.shape, weight.size(1), dtype=dtype)
