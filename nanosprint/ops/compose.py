"""What dynamically composed attention maps read: a mixture of all heads' maps, applied to each head's values.

    p_h(t, j) = softmax over j of scale q_h(t) · k_h(j),   0 <= t - j < window, in the token's document
    A(t, j)   = sum_h w1_h(t) p_h(t, j)
    out_h(t)  = w2_h(t) sum_j A(t, j) v_h(j)

The maps are those of a narrow window of their own, so that all heads' fit beside each other. On an NVIDIA GPU six
Triton kernels do this (`kernels/compose.py`), two forward and four backward: A and its gradient go through memory, 512
bytes a token each for windows up to 128, no other map does, and no result depends on the order of blocks. Elsewhere the
formula below runs, which is the reference; `torch.compile` sees through it.

The result is to be added to what the plain attention read. That sum is not part of the operator: compiled, it joins the
elementwise passes that follow, and its gradient is the identity, which then costs nothing.

Sources: DCMHA, Xiao et al. 2024, arXiv:2405.08553; this light form: speedrun record #85.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.kernels import has_triton
from nanosprint.ops.attention_backends.bands import band_mask, chunked, with_chunk_before
from nanosprint.ops.attention_backends.contract import Documents, Scale, check_inputs, first_key
from nanosprint.ops.tracing import constant_in_graphs

_log = logging.getLogger(__name__)

_CHUNK_UNIT = 16  # products on a GPU want sizes that are multiples of it
_HEAD_DIMS = (32, 64, 128)
_said: set[str] = set()


def composed_read(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    w1_BSH: Tensor,
    w2_BSH: Tensor,
    scale: Scale,
    window: int,
    documents: Documents | None = None,
) -> Tensor:
    """(B, S, H, K) in the dtype of v, differentiable in all tensors. Rows do not see each other.

    q, k, v: one dtype, any strides; with fewer queries than keys, the queries stand at the end and `documents` must be
    None. w1, w2: (B, S, H), any float dtype. `window` counts keys, the token itself included, and is at least 1.
    Scores, softmax and A are in fp32 at least; what multiplies the values is rounded to their dtype.

    Kernels take bf16 and fp16, heads of 32, 64 or 128 and windows up to 256; a GPU run that they cannot serve is logged
    once. Raises ValueError for a window below 1 and for shapes that do not fit.
    """
    if window < 1:
        raise ValueError(f"composed attention with window={window}: it counts the token itself and is at least 1")
    check_inputs(q_BSHK, k_BSHK, v_BSHK, window - 1, documents)
    if not w1_BSH.shape == w2_BSH.shape == q_BSHK.shape[:3]:
        raise ValueError(
            f"w1 {tuple(w1_BSH.shape)} and w2 {tuple(w2_BSH.shape)} do not fit q {tuple(q_BSHK.shape)}: a number is "
            "wanted for each row, query and head"
        )
    if k_BSHK.size(1) > q_BSHK.size(1):
        return _last_queries(q_BSHK, k_BSHK, v_BSHK, w1_BSH, w2_BSH, scale, window)
    if q_BSHK.device.type == "cuda" and _kernels_serve(q_BSHK.dtype, q_BSHK.size(-1), window):
        first = first_key(q_BSHK.size(0), q_BSHK.size(1), window - 1, documents, q_BSHK.device)
        number, data = (0.0, scale) if isinstance(scale, Tensor) else (scale, None)
        out: Tensor = _composed_read(q_BSHK, k_BSHK, v_BSHK, w1_BSH, w2_BSH, first, number, window, data)[0]
        return out
    return composed_read_reference(q_BSHK, k_BSHK, v_BSHK, w1_BSH, w2_BSH, scale, window, documents)


@constant_in_graphs
def _kernels_serve(dtype: torch.dtype, head_dim: int, window: int) -> bool:
    """Whether the Triton kernels can take this on a CUDA device. Each reason why not is logged once."""
    from nanosprint.kernels.tuning import COMPOSE_WINDOW

    reason = None
    if torch.version.hip is not None or not has_triton():
        reason = "Triton for NVIDIA is not installed"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"the kernels take bf16 and fp16, not {dtype}"
    elif head_dim not in _HEAD_DIMS:
        reason = f"the kernels take heads of {', '.join(map(str, _HEAD_DIMS))}, not {head_dim}"
    elif window > COMPOSE_WINDOW:
        reason = f"the kernels take windows up to {COMPOSE_WINDOW}, not {window}"
    if reason is not None and reason not in _said:
        _said.add(reason)
        _log.warning("composed attention runs as plain formulas, with more time and memory: %s", reason)
    return reason is None


def composed_read_reference(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    w1_BSH: Tensor,
    w2_BSH: Tensor,
    scale: Scale,
    window: int,
    documents: Documents | None = None,
) -> Tensor:
    """The formula, on any device, for as many queries as keys.

    Memory: 2 C H scores a token, C the window rounded up to a multiple of 16, and each key and value twice; for 49,152
    tokens of 6 heads and a window of 112 that is 0.26 GB a tensor of scores.
    """
    B, S = q_BSHK.shape[:2]
    wide = torch.promote_types(v_BSHK.dtype, torch.float32)
    chunk = min(-(-window // _CHUNK_UNIT) * _CHUNK_UNIT, S)
    mask = band_mask(B, S, window - 1, documents, chunk, q_BSHK.device)
    q, k, v, w1 = (chunked(t, chunk) for t in (q_BSHK, k_BSHK, v_BSHK, w1_BSH))
    if mask.size(1) > 1:
        k, v = with_chunk_before(k), with_chunk_before(v)
    scores = torch.einsum("bnqhk,bnshk->bnhqs", q.to(wide), k.to(wide)) * scale
    maps = scores.masked_fill(~mask.unsqueeze(2), float("-inf")).softmax(-1)
    mixed = (w1.to(wide).transpose(-1, -2).unsqueeze(-1) * maps).sum(2)
    # One map for all heads: their values lie side by side and are read by one product.
    read = (mixed.to(v.dtype) @ v.flatten(-2)).flatten(1, 2)[:, :S].view(v_BSHK.shape)
    return (w2_BSH.to(wide).unsqueeze(-1) * read.to(wide)).to(v_BSHK.dtype)


def _last_queries(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, w1_BSH: Tensor, w2_BSH: Tensor, scale: Scale, window: int
) -> Tensor:
    """As in generation from a cache: the keys in sight, and in front of the queries as many empty ones."""
    S = q_BSHK.size(1)
    sight = min(k_BSHK.size(1), S + window - 1)
    q, w1, w2 = (F.pad(t, (0, 0) * (t.ndim - 2) + (sight - S, 0)) for t in (q_BSHK, w1_BSH, w2_BSH))
    k, v = k_BSHK[:, -sight:], v_BSHK[:, -sight:]
    return composed_read_reference(q, k, v, w1, w2, scale, window)[:, -S:]


@torch.library.custom_op("nanosprint::composed_read", mutates_args=())
def _composed_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    first: Tensor,
    scale: float,
    window: int,
    scale_data: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(what is read, log-sum-exp, A). The kernels alone: where they do not serve, the caller takes the formula.

    scale_data: the scale where it is data, read on the host; then `scale` does not count.
    """
    from nanosprint.kernels.compose import forward

    scale = scale if scale_data is None else float(scale_data)
    q, k, v = (_packed(t) for t in (q, k, v))
    return forward(q, k, v, w1.contiguous(), w2.contiguous(), first.contiguous(), scale, window, _bands(q))


@torch.library.custom_op("nanosprint::composed_read_backward", mutates_args=())
def _composed_read_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    first: Tensor,
    lse: Tensor,
    maps: Tensor,
    scale: float,
    window: int,
    scale_data: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from nanosprint.kernels.compose import backward

    scale = scale if scale_data is None else float(scale_data)
    grad, q, k, v = (_packed(t) for t in (grad, q, k, v))
    w1, w2, first = w1.contiguous(), w2.contiguous(), first.contiguous()
    return backward(grad, q, k, v, w1, w2, first, lse, maps, scale, window, _bands(q))


def _bands(q: Tensor) -> Any:
    from nanosprint.kernels.tuning import compose_bands

    # On a CPU there are kernels in Triton's interpreter only.
    return compose_bands(torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0))


def _packed(X: Tensor) -> Tensor:
    """X (B, S, H, K) as tensor descriptors want it: heads side by side, whole 16 bytes from token to token."""
    unit = 16 // X.element_size()
    apart = X.stride(3) != 1 or X.stride(2) != X.size(3) or any(s % unit or not s for s in X.stride()[:2])
    X = X.contiguous() if apart else X
    return X.clone() if X.data_ptr() % 16 else X


@_composed_read.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, first: Tensor, scale: float, window: int, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    B, S, H = q.shape[:3]
    columns = max(32, 1 << (window - 1).bit_length())
    lse, maps = (q.new_empty(shape, dtype=torch.float32) for shape in ((B, H, S), (B, S, columns)))
    return q.new_empty(q.shape), lse, maps


@_composed_read_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dw1, dw2 = (t.new_empty(t.shape) for t in (q, k, v, w1, w2))
    return dq, dk, dv, dw1, dw2


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, scale_data = inputs
    _, lse, maps = output
    ctx.save_for_backward(*tensors, lse, maps, scale_data)
    ctx.mark_non_differentiable(lse, maps)
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    *tensors, scale_data = ctx.saved_tensors
    return *_composed_read_backward(grad, *tensors, ctx.scale, ctx.window, scale_data), *(None,) * 4


_composed_read.register_autograd(_derive, setup_context=_setup_context)
