"""Cross-entropy of soft-capped logits against several labels a row, with its gradient in the same pass.

T rows of V logits z. The cap is l = A tanh(a z + b), which covers both usual forms: cap tanh(z / cap), and
cap sigmoid((z + shift) / width), which is cap / 2 (1 + tanh((z + shift) / (2 width))) and whose constant no softmax
sees. Row t has labels y_tj with weights w_j, and a total S_t:

    lse_t     = log sum_v exp l_tv
    loss_t    = sum_j w_j [y_tj >= 0] (lse_t - l_{t, y_tj})
    d / d z_tv = A a (1 - tanh^2) (S_t exp(l_tv - lse_t) - sum_j w_j [y_tj = v])

Where S_t is the sum of the weights that count, the second line is the first's gradient. The speedrun's record counts
more in S_t than in the loss (`Labels.totals`), so it is an argument. The upstream gradient of a summed loss is one
number, hence the gradient can be made with the loss, while the logits are at hand, and multiplied by it later.

On a GPU a Triton kernel does this in one launch, on Hopper another one, which keeps a row in shared memory, where a row
fits; elsewhere the formula below, which is the reference.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanosprint.config.model import SoftcapSpec
from nanosprint.kernels import has_gluon, has_triton, tuning

_log = logging.getLogger(__name__)


class Labels(NamedTuple):
    """What T rows of logits are scored against, each by m labels.

    ids (T, m): int64, -1 where there is none. weights (m,): fp32. totals (T,): fp32, what the log-sum-exp of the row
    weighs in the gradient. rest (2,): fp32, None where every column counts once; else that is so for the first rest[0]
    columns, in which all labels must be, and the logarithm of what the others count is rest[1] (`model/sampled.py`).
    """

    ids: Tensor
    weights: Tensor
    totals: Tensor
    rest: Tensor | None = None


class Curve(NamedTuple):
    """The cap A tanh(a z + b), up to a constant."""

    amplitude: float
    slope: float
    offset: float


def curve_of(spec: SoftcapSpec | None) -> Curve | None:
    """The numbers of a recipe's cap; None where there is none."""
    if spec is None:
        return None
    if spec.kind == "tanh":
        return Curve(spec.cap, 1 / spec.cap, 0.0)
    return Curve(spec.cap / 2, 0.5 / spec.width, 0.5 * spec.shift / spec.width)


def softcap_xent(logits: Tensor, labels: Labels, softcap: SoftcapSpec | None = None) -> Tensor:
    """The loss, summed over rows: a 0-D tensor in fp32 (fp64 for such logits), differentiable in the logits.

    logits (T, V): any float dtype, in which the gradient is, too, rounded once before the upstream number multiplies
    it. Ids must be below V; that is not checked. Not for validation: the gradient is made in any case. Raises
    ValueError for shapes that do not fit.

    Numerics on a GPU: fp32 inside, tanh by the hardware's instruction (relative error 2^-11). Source: the speedrun's
    records #54, #67, #79; Gemma 2, arXiv:2408.00118.
    """
    check(logits, labels)
    curve = curve_of(softcap)
    loss, _ = _softcap_xent(logits, *labels, curve and list(curve))
    return loss


def loss_and_grad(
    logits: Tensor, labels: Labels, curve: Curve | None, out: Tensor, *, valid: int | None = None, inverse: float = 1.0
) -> Tensor:
    """Losses (T,) of the rows in fp32 or wider; their gradient times `inverse` goes into `out` (T, C).

    `out` may be the logits themselves or of another dtype; E5M2 is clamped to its range first. Columns of the logits
    (T, C) from `valid` on are padding: no part of the softmax, gradient zero. For use inside operators, without
    autograd.
    """
    valid = logits.shape[1] if valid is None else valid
    if uses_kernel(logits.device) and logits.dtype in (torch.bfloat16, torch.float32):
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        ids, weights, totals = (t.contiguous() for t in labels[:3])
        _kernel(logits, curve, out)(
            logits, ids, weights, totals, losses, out, curve=curve, valid=valid, inverse=inverse, rest=labels.rest
        )
        return losses
    return _formula(logits, labels, curve, out, valid, inverse)


def _kernel(logits: Tensor, curve: Curve | None, out: Tensor) -> Callable[..., None]:
    """The kernel that keeps rows in shared memory, or the one that reads them twice."""
    held = tuning.SOFTCAP_XENT_HELD
    if held is not None and curve is not None and _may_hold(logits, out) and has_gluon():
        strides = logits.stride(0), out.stride(0)
        if held.fits(logits.shape[1], strides, curve.amplitude):
            from nanosprint.kernels.softcap_xent_resident import softcap_xent_resident

            return functools.partial(softcap_xent_resident, tile=held)
        _told_that_it_does_not_fit(logits.shape[1], *strides, curve.amplitude)
    from nanosprint.kernels.softcap_xent import softcap_xent as kernel

    return kernel


@functools.cache
def _told_that_it_does_not_fit(columns: int, logits_row: int, grad_row: int, amplitude: float) -> None:
    _log.warning(
        "rows of %d logits, %d and %d apart, capped at %g, do not fit the loss kernel that reads them once: a slower "
        "one serves", columns, logits_row, grad_row, amplitude,
    )  # fmt: skip


def _may_hold(logits: Tensor, out: Tensor) -> bool:
    aligned = not (logits.data_ptr() % 16 or out.data_ptr() % 16)
    dtypes = logits.dtype == torch.bfloat16 and out.dtype in (torch.bfloat16, torch.float8_e5m2)
    return aligned and dtypes and torch.cuda.get_device_capability(logits.device) in tuning.MEASURED


def uses_kernel(device: torch.device) -> bool:
    """Whether logits on this device are for the Triton kernel. A GPU without Triton is logged once."""
    return device.type == "cuda" and torch.version.hip is None and (has_triton() or _without_triton())


def _formula(logits: Tensor, labels: Labels, curve: Curve | None, out: Tensor, valid: int, inverse: float) -> Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tanh = None if curve is None else torch.tanh(z * curve.slope + curve.offset)
    capped = z.clone() if curve is None or tanh is None else tanh * curve.amplitude
    capped[:, valid:] = float("-inf")
    if labels.rest is not None:
        others = torch.arange(logits.shape[1], device=logits.device) >= labels.rest[0]
        capped += torch.where(others, labels.rest[1], 0.0).to(capped.dtype)
    lse = capped.logsumexp(-1)
    columns, counts = labels.ids.clamp(min=0), (labels.ids >= 0) * labels.weights.to(z.dtype)
    chosen = capped.gather(1, columns)
    losses = ((lse[:, None] - chosen).masked_fill(labels.ids < 0, 0.0) * counts).sum(-1)
    grad = capped.sub_(lse[:, None]).exp_().mul_(labels.totals.to(z.dtype)[:, None])
    grad.scatter_add_(1, columns, -counts)
    if curve is not None and tanh is not None:
        grad.mul_(tanh.square_().neg_().add_(1).mul_(curve.amplitude * curve.slope))
    grad.mul_(inverse)
    if out.element_size() == 1:
        limit = torch.finfo(out.dtype).max
        grad.clamp_(-limit, limit)
    out.copy_(grad)
    return losses


@torch.library.custom_op("nanosprint::softcap_xent", mutates_args=())
def _softcap_xent(
    logits: Tensor, ids: Tensor, weights: Tensor, totals: Tensor, rest: Tensor | None, curve: list[float] | None
) -> tuple[Tensor, Tensor]:
    """(loss, gradient for an upstream gradient of one)."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    known = None if curve is None else Curve(*curve)
    losses = loss_and_grad(logits.contiguous(), Labels(ids, weights, totals, rest), known, grad)
    return losses.sum(), grad


@_softcap_xent.register_fake
def _(
    logits: Tensor, ids: Tensor, weights: Tensor, totals: Tensor, rest: Tensor | None, curve: list[float] | None
) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty((), dtype=torch.promote_types(logits.dtype, torch.float32))
    return loss, torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return None if g is None else ctx.saved_tensors[0] * g, None, None, None, None, None


_softcap_xent.register_autograd(_derive, setup_context=_setup_context)


def check(logits: Tensor, labels: Labels) -> None:
    """Raise ValueError unless logits (T, V) and labels fit together."""
    ids, weights, totals, rest = labels
    T = len(logits)
    if rest is not None and rest.shape != (2,):
        raise ValueError(f"labels with a rest of shape {tuple(rest.shape)}: expected (2,)")
    fits = logits.ndim == 2 and ids.shape == (T, weights.numel()) and weights.ndim == 1 and totals.shape == (T,)
    if not fits or not logits.is_floating_point() or ids.dtype != torch.int64:
        raise ValueError(
            f"logits {tuple(logits.shape)} {logits.dtype}, ids {tuple(ids.shape)} {ids.dtype}, weights "
            f"{tuple(weights.shape)}, totals {tuple(totals.shape)} do not fit: expected (T, V) of a float dtype, "
            "(T, m) of int64, (m,), (T,)"
        )


@functools.cache
def _without_triton() -> bool:
    _log.warning("Triton is not installed: the loss is computed in several passes over the logits")
    return False
