"""Calls into attention libraries whose low-level functions gain and reorder arguments from release to release.

FlashAttention-3 and -4 both have a forward function that returns (out, log-sum-exp, ...) and a backward function that
fills dq, dk, dv, with names of arguments that barely change. So arguments go by name: what a release does not know is
left out where it has another spelling, and what it demands beyond ours is None.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanosprint.ops.attention_backends import varlen
from nanosprint.ops.attention_backends.contract import Attention

_NEEDED = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"}


def build(name: str, forward: Callable[..., Any], backward: Callable[..., Any], no_limit: int | None) -> Attention:
    """A back end of a library's two functions. `no_limit` is its word for an unlimited side of the window.

    Raises ImportError if a function lacks an argument that we cannot do without.
    """
    takes_forward, takes_backward = _arguments(name, forward), _arguments(name, backward)

    def shared(cu_seqlens: Tensor, max_seq_len: int, window: int, scale: float) -> dict[str, Any]:
        left, right = (no_limit, no_limit if no_limit is None else 0) if window < 0 else (window, 0)
        return {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": max_seq_len,
            "max_seqlen_k": max_seq_len,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (left, right),
            "window_size_left": left,
            "window_size_right": right,
        }

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seq_len: int, window: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        given = {"q": q, "k": k, "v": v, "return_lse": True, **shared(cu_seqlens, max_seq_len, window, scale)}
        out, lse, *_ = forward(**_select(takes_forward, given))
        return out, lse

    def run_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens: Tensor,
        max_seq_len: int,
        window: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        given = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "lse": lse}
        given |= {"dq": dq, "dk": dk, "dv": dv, **shared(cu_seqlens, max_seq_len, window, scale)}
        backward(**_select(takes_backward, given))
        return dq, dk, dv

    return varlen.build(name, run_forward, run_backward)


def _arguments(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    # A torch.library custom op hides its signature behind (*args, **kwargs).
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    lacks = _NEEDED - set(parameters)
    if not {"window_size", "window_size_left"} & set(parameters):
        lacks.add("window_size")
    if lacks:
        raise ImportError(f"the installed {name} takes no {', '.join(sorted(lacks))}: install another release")
    return dict(parameters)


def _select(parameters: dict[str, inspect.Parameter], given: dict[str, Any]) -> dict[str, Any]:
    chosen = {key: value for key, value in given.items() if key in parameters}
    demanded = [key for key, p in parameters.items() if p.default is p.empty and key not in chosen]
    return chosen | dict.fromkeys(demanded)
