"""Rows of a table times rows of signs: a program takes a few tokens and whole rows."""

import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _WARPS = 4, 4  # of a program: a thread of 768 columns has eight loads of 16 bytes under way


@triton.jit
def _signed_rows_kernel(W, IDS, SIGNS, SIGN_IDS, OUT, num, D, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)[None, :]
    known = tokens < num
    inside = known[:, None] & (columns < D)
    row = tl.load(IDS + tokens, mask=known, other=0).to(tl.int64)[:, None]
    sign_row = tl.load(SIGN_IDS + tokens, mask=known, other=0).to(tl.int64)[:, None]
    x = tl.load(W + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    sign = tl.load(SIGNS + sign_row * D + columns, mask=inside, other=0).to(tl.float32)
    place = tokens.to(tl.int64)[:, None] * D + columns
    tl.store(OUT + place, (x * sign).to(OUT.dtype.element_ty), mask=inside)


def signed_rows(weight: Tensor, ids: Tensor, signs: Tensor, sign_ids: Tensor, out: Tensor) -> None:
    """Fill out (..., D) with weight[ids] * signs[sign_ids]; all contiguous, ids below 2^63 / D."""
    num, D = ids.numel(), weight.size(1)
    if num:
        sizes = {"TOKENS": _TOKENS, "COLUMNS": triton.next_power_of_2(D)}
        grid = (triton.cdiv(num, _TOKENS),)
        _signed_rows_kernel[grid](weight, ids, signs, sign_ids, out, num, D, **sizes, num_warps=_WARPS)
