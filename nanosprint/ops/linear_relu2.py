"""A squared-ReLU MLP in the dtype of its input, and its two products with something elementwise behind them.

    post = relu(x up^T)^2
    y    = post down
    dpre = 2 sqrt(post) (g down^T)       d_up = dpre^T x,   d_down = post^T g,   dx = dpre up

T tokens, width D, F hidden units. post is all that is kept for the backward pass beside x: its root is relu(pre), and
where pre is negative both are zero.

What follows the first product and the first backward product would take several passes over (T, F), the largest
activation of a layer. On a GPU it takes one, in place, behind cuBLAS, or none where `tuning.FUSED_RELU2` says that the
one kernel for both is faster. `up_relu2` and `relu2_grad` make that choice, for the products in FP8 of `ops.fp8_mlp`,
too. Elsewhere the formula, which is the reference. All round at the same places, but for dpre, which kernels round
once and the formula three times. Their `_turned` forms leave nothing but codes, plain and transposed, made of fp32.
"""

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.kernels import has_gluon, has_triton, tuning
from nanosprint.ops.fp8 import E4M3, E5M2, padded, quantize, scaled_product, turn

_log = logging.getLogger(__name__)

Scales = tuple[Tensor, Tensor]  # what a code of 1 stands for in either operand of an FP8 product, 0-D fp32


def relu2_mlp(x: Tensor, up: Tensor, down: Tensor, *, in_out: bool = False) -> Tensor:
    """y (..., D) of x (..., D), up (F, D), down (D, F) or, with `in_out`, (F, D): differentiable in all three.

    Weights are cast to the dtype of x, and so are their gradients until autograd casts them back. post is squared in
    that dtype. Raises ValueError for shapes that do not fit. Source: So et al. 2021, arXiv:2109.08668; the speedrun's
    records #59 and #87.
    """
    check_shapes(x, up, down, in_out)
    y, _ = _forward(x.reshape(-1, x.shape[-1]), up.to(x.dtype), down.to(x.dtype), in_out)
    return y.view(x.shape)


def check_shapes(x: Tensor, up: Tensor, down: Tensor, in_out: bool) -> None:
    expected = up.shape if in_out else up.shape[::-1]
    if up.ndim != 2 or x.ndim < 1 or x.shape[-1] != up.shape[1] or down.shape != expected:
        raise ValueError(
            f"x {tuple(x.shape)}, up {tuple(up.shape)} and down {tuple(down.shape)} do not fit: expected (..., D), "
            f"(F, D) and {'(F, D)' if in_out else '(D, F)'}"
        )


def pays(device: torch.device | str) -> bool:
    """Whether `relu2_mlp` in bf16 is for this device: where the fused product was measured to beat what is compiled."""
    return _route("up", torch.device(device), torch.bfloat16) == "fused"


def up_relu2(
    x: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    scales: Scales | None = None,
    code_scale: Tensor | None = None,
    want_peaks: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(post (T, F) in `dtype`, its E4M3 codes for `code_scale`, maxima) of x (T, D) and up (F, D).

    Operands in FP8 where there are `scales`, else of `dtype`. The product is rounded to `dtype` before the square. The
    maxima, (tuning.RELU2_PEAKS,) fp32, are those of parts of post: the largest of them is that of post. Codes and
    maxima are None where not asked for. No gradients.
    """
    out = x.new_empty(x.shape[0], up.shape[0], dtype=dtype)
    code = None if code_scale is None else torch.empty_like(out, dtype=E4M3)
    peaks = x.new_empty(tuning.RELU2_PEAKS, dtype=torch.float32) if want_peaks else None
    kind = "up" if scales is None else "up8"
    route = _route(kind, x.device, dtype)
    if route == "fused":
        _fused(kind, x, up, out, scales=scales, out8=code, out_scale=code_scale, peaks=peaks)
        return out, code, peaks
    out = _product(x, up.mT, scales, dtype)
    if route == "pass":
        from nanosprint.kernels.linear_relu2 import relu2_pass

        relu2_pass(out, out8=code, out_scale=code_scale, peaks=peaks)
        return out, code, peaks
    post = F.relu(out).square()
    if code_scale is not None:
        code = quantize(post, code_scale, E4M3)
    if want_peaks:
        peaks = F.pad(post.amax().float().view(1), (0, tuning.RELU2_PEAKS - 1))
    return post, code, peaks


def relu2_grad(
    g: Tensor,
    down_DF: Tensor,
    post: Tensor,
    scales: Scales | None = None,
    code_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dpre (T, F) in post's dtype, its E5M2 codes for `code_scale`) of g (T, D), down and post.

    down is (D, F) as the product wants it, one of whose strides is 1; in FP8, where there are `scales`, that of D.
    """
    code = None if code_scale is None else torch.empty_like(post, dtype=E5M2)
    kind = "dpre" if scales is None else "dpre8"
    route = _route(kind, post.device, post.dtype)
    if route == "fused":
        out, turned = torch.empty_like(post), down_DF.stride(1) == 1
        B = down_DF if turned else down_DF.mT
        _fused(kind, g, B, out, turned, scales=scales, post=post, out8=code, out_scale=code_scale)
        return out, code
    d_post = _product(g, down_DF, scales, post.dtype)
    if route == "pass":
        from nanosprint.kernels.linear_relu2 import relu2_pass

        relu2_pass(d_post, post=post, out8=code, out_scale=code_scale)
        return d_post, code
    d_pre = 2 * post.sqrt() * d_post
    return d_pre, None if code_scale is None else quantize(d_pre, code_scale, E5M2)


def up_relu2_turned(x: Tensor, up: Tensor, scales: Scales, code_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(post's E4M3 codes (T, F), the same transposed as `fp8.turn` does it, maxima): all of post that anyone keeps.

    They are those of `up_relu2` in fp32. On Hopper one kernel writes both codes, by shuffles.
    """
    held = _held("up8", up) if _route("up8", x.device, torch.bfloat16) == "fused" else None
    if held is None:
        _, code, peaks = up_relu2(x, up, torch.float32, scales, code_scale, want_peaks=True)
        assert code is not None
        assert peaks is not None
        return code, turn(code), peaks
    from nanosprint.kernels.linear_relu2_resident import relu2_resident

    code, turned = _codes(x.shape[0], up.shape[0], E4M3, x.device)
    peaks = x.new_empty(tuning.RELU2_PEAKS, dtype=torch.float32)
    relu2_resident(x, up, None, held, scales=scales, out8=code, out_scale=code_scale, turned=turned, peaks=peaks)
    return code, turned, peaks


def relu2_grad_turned(
    g: Tensor, down_DF: Tensor, post8: Tensor, post_scale: Tensor, scales: Scales, code_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """(dpre's E5M2 codes (T, F), the same transposed): those of `relu2_grad` in fp32, of operands as it takes them.

    post is known by its codes, E4M3 for `post_scale`; its root has half their error.
    """
    held = _held("dpre8", down_DF.mT) if _route("dpre8", g.device, torch.bfloat16) == "fused" else None
    if held is None or down_DF.stride(0) != 1:
        _, code = relu2_grad(g, down_DF, post8.float() * post_scale, scales, code_scale)
        assert code is not None
        return code, turn(code)
    from nanosprint.kernels.linear_relu2_resident import relu2_resident

    code, turned = _codes(post8.shape[0], post8.shape[1], E5M2, g.device)
    relu2_resident(
        g, down_DF.mT, None, held, scales=scales, post=post8, post_scale=post_scale, out8=code, out_scale=code_scale,
        turned=turned,
    )  # fmt: skip
    return code, turned


def _codes(T: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for codes, and for the same transposed."""
    plain, turned = (T, hidden), (hidden, padded(T))
    return torch.empty(plain, dtype=dtype, device=device), torch.empty(turned, dtype=dtype, device=device)


def _product(A: Tensor, B: Tensor, scales: Scales | None, dtype: torch.dtype) -> Tensor:
    """A (T, K) times B (K, N). Sums over the width alone: fast accumulation in FP8."""
    return A @ B if scales is None else scaled_product(A, B.mT, *scales, dtype, fast=True)


def _fused(kind: str, A: Tensor, B: Tensor, out: Tensor, turned: bool = False, **options: Any) -> None:
    """One of the two kernels."""
    held = None if turned else _held(kind, B)
    if held is not None:
        from nanosprint.kernels.linear_relu2_resident import relu2_resident

        relu2_resident(A, B, out, held, **options)
        return
    from nanosprint.kernels.linear_relu2 import relu2_product

    relu2_product(A, B, out, tuning.relu2_tile(kind, _capability(out.device)), turned=turned, **options)


def _held(kind: str, B: Tensor) -> tuning.Resident | None:
    """The tile of the kernel that keeps the weights B, where it is named for the kind and they fit."""
    held = tuning.RELU2_RESIDENT[kind] if kind in tuning.RESIDENT_RELU2 and has_gluon() else None
    return held if held is not None and held.fits((B.shape[0], B.shape[1]), B.element_size()) else None


def _route(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """What computes `kind` (see `tuning.FUSED_RELU2`) there, with results in `dtype`: "fused", "pass" or "formula"."""
    if device.type != "cuda" or torch.version.hip is not None or dtype == torch.float64:
        return "formula"
    if not (has_triton() or _without_triton()):
        return "formula"
    measured = kind in tuning.FUSED_RELU2 and _capability(device) in tuning.MEASURED
    return "fused" if measured and dtype == torch.bfloat16 else "pass"


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _without_triton() -> bool:
    _log.warning("Triton is not installed: squared ReLU and its gradient take several passes over memory")
    return False


@torch.library.custom_op("nanosprint::relu2_mlp", mutates_args=())
def _forward(x: Tensor, up: Tensor, down: Tensor, in_out: bool) -> tuple[Tensor, Tensor]:
    """(y, post); all of one dtype, x (T, D)."""
    post, _, _ = up_relu2(x.contiguous(), up.contiguous(), x.dtype)
    return post @ (down if in_out else down.mT), post


@_forward.register_fake
def _(x: Tensor, up: Tensor, down: Tensor, in_out: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], up.shape[0])


@torch.library.custom_op("nanosprint::relu2_mlp_backward", mutates_args=())
def relu2_mlp_grads(
    g: Tensor, x: Tensor, post: Tensor, up: Tensor, down: Tensor, in_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, up and down, of one dtype and shaped as these, from that of y (T, D)."""
    g, down = g.contiguous(), down.contiguous()
    d_down = post.mT @ g if in_out else g.mT @ post
    d_pre, _ = relu2_grad(g, down.mT if in_out else down, post)
    return d_pre @ up, d_pre.mT @ x, d_down


@relu2_mlp_grads.register_fake
def _(g: Tensor, x: Tensor, post: Tensor, up: Tensor, down: Tensor, in_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, up, down, ctx.in_out = inputs
    ctx.save_for_backward(x, output[1], up, down)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 4
    return (*relu2_mlp_grads(g, *ctx.saved_tensors, ctx.in_out), None)


_forward.register_autograd(_derive, setup_context=_setup_context)
