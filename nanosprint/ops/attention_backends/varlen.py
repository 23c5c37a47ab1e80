"""From a library's pair of variable-length kernels to a back end that compiles, differentiates and passes opcheck.

The kernels take all documents of a batch laid end to end, (T, H, K) with T = B*S, and the log-sum-exp of the scores,
(H, T) in fp32, is what the backward pass needs of the forward one. Rows without documents are documents of S tokens.

Limits and a scale that are data reach the operators as they are and are read there, on the host: nothing waits for the
device. The tensors make CUDA graphs over such a call impossible; numbers do not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanosprint.ops.attention_backends.contract import (
    Attention,
    Documents,
    Limit,
    Scale,
    check_inputs,
    reach,
    window_from,
)

# (q, k, v, cu_seqlens, max_seq_len, window or -1, scale) -> out (T, H, K), log-sum-exp (H, T)
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, float], tuple[Tensor, Tensor]]
# (grad of out, q, k, v, out, log-sum-exp, cu_seqlens, max_seq_len, window or -1, scale) -> grads of q, k, v
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float], tuple[Tensor, Tensor, Tensor]
]


def build(name: str, forward: Forward, backward: Backward) -> Attention:
    """Register `nanosprint::attend_<name>` and its backward operator; return the back end that calls them.

    To be called once per name and process. Outputs are contiguous whatever the strides of the inputs.
    """
    operator = _register(name, forward, backward)

    def attend(
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        scale: Scale,
        window: Limit | None,
        documents: Documents | None = None,
    ) -> Tensor:
        check_inputs(q_BSHK, k_BSHK, v_BSHK, window, documents)
        B, S = k_BSHK.shape[:2]
        if q_BSHK.size(1) != S:
            raise ValueError(f"exec.attention={name} wants as many queries as keys: use sdpa with a cache")
        if documents is None:
            documents = Documents(torch.arange(0, B * S + 1, S, dtype=torch.int32, device=q_BSHK.device), S)
        q, k, v = (t.flatten(0, 1) for t in (q_BSHK, k_BSHK, v_BSHK))
        number, data = (0.0, scale) if isinstance(scale, Tensor) else (scale, None)
        out, _ = operator(q, k, v, documents.cu_seqlens, number, *_limits(S, window, documents.max_seq_len), data)
        result: Tensor = out.view(q_BSHK.shape)
        return result

    return attend


def _limits(seq_len: int, window: Limit | None, max_seq_len: Limit) -> tuple[int, int, Tensor | None, Tensor | None]:
    """For the operators: longest document and window (or -1) as ints, and as data, which then counts."""
    longest_data = max_seq_len if isinstance(max_seq_len, Tensor) else None
    longest = seq_len if isinstance(max_seq_len, Tensor) else max_seq_len
    if isinstance(window, Tensor):
        return longest, -1, longest_data, window
    # A window that hides nothing is said to be none: kernels have a faster path, and one graph serves all. As data it
    # stays a window: libraries compile the two forms apart, and a step in the middle of training would wait for it.
    far = reach(seq_len, window, longest)
    return longest, -1 if far == reach(seq_len, None, longest) else far, longest_data, None


def _read(longest: int, window: int, longest_data: Tensor | None, window_data: Tensor | None) -> tuple[int, int]:
    """Longest document and window (or -1) as the kernels take them."""
    if longest_data is not None:
        longest = int(longest_data)
    if window_data is not None:
        window = window_from(window_data)
    return longest, window


def _register(name: str, forward: Forward, backward: Backward) -> Callable[..., tuple[Tensor, Tensor]]:
    @torch.library.custom_op(f"nanosprint::attend_{name}", mutates_args=())
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        longest: int,
        window: int,
        longest_data: Tensor | None,
        window_data: Tensor | None,
        scale_data: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        limits = _read(longest, window, longest_data, window_data)
        out, lse = forward(q, k, v, cu_seqlens, *limits, scale if scale_data is None else float(scale_data))
        return out.contiguous(), lse.contiguous()

    @torch.library.custom_op(f"nanosprint::attend_{name}_backward", mutates_args=())
    def attend_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        longest: int,
        window: int,
        longest_data: Tensor | None,
        window_data: Tensor | None,
        scale_data: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Kernels read heads as vectors; the gradient of a sum, say, arrives with strides of 0.
        grad = grad.contiguous()
        limits = _read(longest, window, longest_data, window_data)
        scale = scale if scale_data is None else float(scale_data)
        dq, dk, dv = backward(grad, q, k, v, out, lse, cu_seqlens, *limits, scale)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()

    @attend.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)

    @attend_backward.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_seqlens, *ctx.numbers, longest_data, window_data, scale_data = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens, longest_data, window_data, scale_data)

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, longest_data, window_data, scale_data = ctx.saved_tensors
        data = (longest_data, window_data, scale_data)
        return *attend_backward(grad, *tensors, *ctx.numbers, *data), *(None,) * 7

    attend.register_autograd(differentiate, setup_context=save)
    operator: Callable[..., tuple[Tensor, Tensor]] = attend
    return operator
