"""Liger-Kernel's operators (Hsu et al. 2024, arXiv:2410.10989) where the package is installed."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.case import Library

_NAME = "Liger"
_MISSING = "Liger-Kernel is not installed"


def norm_and_rope(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Library | str:
    """RMS norm of queries and keys, then rotary positions with halves as pairs: as much work as neighbours are."""
    if not _installed():
        return _MISSING
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction

    heads_of = qkv.detach().unflatten(-1, (3, heads, -1))
    q, k = (heads_of[:, :, i].contiguous() for i in (0, 1))  # as from projections of their own
    gain = torch.ones(q.size(-1), device=q.device, dtype=q.dtype)
    tables = [torch.cat((t, t), dim=-1)[None].to(q.dtype) for t in (cos, sin)]

    def work() -> Any:
        normed = (LigerRMSNormFunction.apply(x, gain, 1e-7, 0.0, "llama", False).transpose(1, 2) for x in (q, k))
        return LigerRopeFunction.apply(*normed, *tables)

    return Library(f"{_NAME} norm, rope", work)


def cross_entropy(logits: Tensor, targets: Tensor) -> Library | str:
    """Loss of one label and its gradient, which takes the logits' place: of a copy, made at the first call."""
    if not _installed():
        return _MISSING
    from liger_kernel.ops import LigerCrossEntropyFunction

    kept: list[Tensor] = []

    def work() -> Any:
        if not kept:
            kept.append(logits.detach().clone().requires_grad_())
        return LigerCrossEntropyFunction.apply(kept[0], targets, None, -100, 0.0, 0.0, "sum")

    return Library(_NAME, work)


def _installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None
