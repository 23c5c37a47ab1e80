"""Attention written out: the documentation, and what the other back ends are compared with.

Runs anywhere, in any float dtype, differentiable any number of times. One row at a time, H x S² scores each.
"""

import torch
from torch import Tensor

from nanosprint.ops.attention_backends.contract import Documents, Limit, Scale, check_inputs, first_key


def reference(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    scale: Scale,
    window: Limit | None,
    documents: Documents | None = None,
) -> Tensor:
    """softmax(scale q kᵀ) v over the visible keys (Vaswani et al. 2017, arXiv:1706.03762).

    Scores, softmax and sums are in fp32 at least. Fewer queries than keys stand at the end of the row.
    """
    check_inputs(q_BSHK, k_BSHK, v_BSHK, window, documents)
    compute = torch.promote_types(q_BSHK.dtype, torch.float32)
    num_queries, num_keys = q_BSHK.size(1), k_BSHK.size(1)
    first = first_key(q_BSHK.size(0), num_keys, window, documents, q_BSHK.device)
    first_BQ = first.expand(q_BSHK.size(0), -1)[:, num_keys - num_queries :]
    query = torch.arange(num_keys - num_queries, num_keys, device=q_BSHK.device)[:, None]
    key = torch.arange(num_keys, device=q_BSHK.device)[None, :]
    rows = []
    for q, k, v, first_Q in zip(q_BSHK, k_BSHK, v_BSHK, first_BQ, strict=True):
        visible = (first_Q[:, None] <= key) & (key <= query)
        scores = torch.einsum("qhk,shk->hqs", q.to(compute), k.to(compute)) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        rows.append(torch.einsum("hqs,shk->qhk", weights, v.to(compute)))
    return torch.stack(rows).to(q_BSHK.dtype)
