"""Causal self-attention behind one signature; the back end is chosen when a model is built, never inside forward.

Every back end computes softmax(scale q kᵀ) v over the keys that a query may see: those of its own document, at most
`window` tokens to the left, none to the right (`attention_backends/contract.py`): a sliding window (Beltagy et al.
2020, arXiv:2004.05150) over packed documents, which the speedrun has since its record #12. They differ in speed and
rounding, and in whether a compiled graph takes window and scale as data or is made anew for each
(`Backend.bakes_limits`).

| name      | where                | documents, window | how |
|-----------|----------------------|-------------------|-----|
| sdpa      | everywhere           | by mask           | PyTorch's fused kernels; the choice on a CPU otherwise |
| batched   | everywhere           | window            | two batched products; the choice on a CPU for short rows |
| cudnn     | NVIDIA, bf16 or fp16 | no                | cuDNN through PyTorch |
| flash     | NVIDIA, bf16 or fp16 | no                | FlashAttention-2 through PyTorch, dense rows |
| flex      | CUDA                 | yes               | FlexAttention, compiled to Triton |
| fa2       | NVIDIA, bf16 or fp16 | yes               | PyTorch's variable-length FlashAttention-2 |
| fa3       | Hopper, bf16 or fp16 | yes               | an installed flash_attn_interface, or the kernels hub |
| fa4       | Hopper on, bf16/fp16 | yes               | package flash-attn-4 |
| triton    | GPU, bf16 or fp16    | yes               | kernels of our own, tiles cut from the packed axis |
| reference | everywhere           | yes               | the formula, slow |
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from nanosprint.ops.attention_backends.contract import (
    Attention,
    Documents,
    Limit,
    Scale,
    as_data,
    check_documents,
    pack_documents,
    scale_as_data,
    times,
)
from nanosprint.ops.attention_backends.measure import Call
from nanosprint.ops.attention_backends.reference import reference
from nanosprint.ops.attention_backends.sdpa import sdpa
from nanosprint.ops.attention_backends.table import TABLE, Backend, Needs, needs_of
from nanosprint.ops.attention_backends.table import TABLE as BACKENDS

__all__ = [
    "BACKENDS",
    "Attention",
    "Call",
    "Documents",
    "Limit",
    "Needs",
    "Scale",
    "as_data",
    "available",
    "backend",
    "check_documents",
    "choose",
    "needs_of",
    "pack_documents",
    "reference",
    "require",
    "scale_as_data",
    "sdpa",
    "times",
]


def backend(name: str) -> Attention:
    """The attention function called `name`. Raises ValueError if it is unknown or its library cannot be loaded."""
    entry = _entry(name)
    try:
        return entry.load()
    except ImportError as error:
        raise ValueError(f"exec.attention={name} cannot be had: {error}") from error


def available(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, *, head_dim: int = 64, training: bool = True
) -> dict[str, str | None]:
    """Every back end's name with None, or with the reason why it does not run on `device`. Runs nothing."""
    needs = Needs(device=device, dtype=dtype, head_dim=head_dim, training=training)
    return {name: entry.refuses(needs) for name, entry in TABLE.items()}


def require(name: str, needs: Needs) -> None:
    """Raise ValueError if `name` cannot serve such a run; for whoever resolves a run, before anything starts."""
    reason = _entry(name).refuses(needs)
    if reason is not None:
        raise ValueError(f"exec.attention={name} cannot serve here: it {reason}")
    backend(name)


def choose(device: torch.device, dtype: torch.dtype, calls: Sequence[Call], *, cache: Path | None = None) -> str:
    """What exec.attention=auto stands for: the fastest back end that passes a check on `device`.

    The check compares forward and backward with the reference on odd lengths, single-token and empty documents, window
    0 and a window larger than any document; those that pass are timed, up to 2 s each, forward and backward on `calls`,
    every one as often as it counts. One back end serves them all: that with the smallest sum, or an earlier one in
    trial of equal ones; where there are documents or windows, one that bakes limits must stay below 0.9 of the others'
    best. Once 5 s are spent and something works, no further one is begun; sdpa and flex only where nothing else works,
    triton only for documents or windows. Ranking and failures are logged in a line.

    cache: a folder for the outcome, which is taken from there where GPU, versions and calls are the same.

    On anything but an NVIDIA GPU, in other dtypes than bf16 and fp16, and for no calls at all it is "sdpa" at once.
    Processes of one run should ask one of them and share the answer, because timings differ. Raises ValueError where
    nothing works, with the reasons.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or torch.version.hip is not None or not half or not calls:
        return "sdpa"
    from nanosprint.ops.attention_backends.select import fastest

    return fastest(needs_of(calls, device, dtype), calls, cache=cache)


def _entry(name: str) -> Backend:
    if name not in TABLE:
        raise ValueError(f"exec.attention={name!r}: known backends are {', '.join(TABLE)}")
    return TABLE[name]
