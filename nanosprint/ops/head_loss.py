"""The output head and its loss as one operator: product, cap, cross-entropy, and both gradients.

Hidden states x (T, D) times the head's weight make logits (T, V), by far the largest tensor of a training step. Here
they live only inside the operator. It makes the gradients of x and of the weight along with the loss, for an upstream
gradient of one; the backward pass multiplies them by the real one, which for a summed loss is a single number. So

- the rows can be taken a part at a time, where memory is short, and the logits' gradient is freed before the layers'
  backward passes begin;
- in FP8 the scale of the logits' gradient is always that of the summed loss, whatever the loss is divided by later;
- the kernel of the loss writes that gradient in E5M2, and nothing else reads or writes it in bf16.

    y = x W^T        FP8: e4m3 x e4m3, fast accumulation      else: in the dtype of x
    g = d loss / d y FP8: e5m2                                      over y, in its dtype
    dx = g W         FP8: e5m2 x e4m3, precise, bf16
    dW = g^T x       FP8: e5m2 x e4m3, precise, fp32

The weight is (V, D), or (D, V) with `in_out`, which needs other copies of the same tensors and is as fast.

A weight that is updated less often than at every step may have its gradient made at those steps alone (`counts`). That
saves one of the three products at the others, and in FP8 the transposed copy of the logits' gradient.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.config.model import SoftcapSpec
from nanosprint.ops.attention import Limit
from nanosprint.ops.fp8 import E4M3, E5M2, quantize_pair, scaled_product, turn
from nanosprint.ops.softcap_xent import Curve, Labels, curve_of, loss_and_grad

_ALIGN = 64  # tensor cores want the vocabulary in multiples of this; FP8 products need 16
_SHARE = 16  # logits take at most this part of a GPU's memory at once
_CPU_LOGITS = 2**26  # elements at once elsewhere


class Fp8Scales(NamedTuple):
    """What a code of 1 stands for in x, the weight (both E4M3) and the logits' gradient of the summed loss (E5M2)."""

    x: float
    weight: float
    gradient: float


def head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Labels,
    *,
    softcap: SoftcapSpec | None = None,
    in_out: bool = False,
    scales: Fp8Scales | None = None,
    columns: Tensor | None = None,
    counts: Limit | None = None,
) -> Tensor:
    """The summed loss of x (T, D) and a weight (V, D), or (D, V) with `in_out`: 0-D fp32, differentiable in both.

    The loss is that of `ops.softcap_xent` on logits rounded to the dtype of x (bf16 with `scales`). Gradients are made
    in any case, so this is not for validation. V is padded to a multiple of 64 inside. A weight beyond 448 times its
    scale is clamped. columns (n,): int64, the tokens that there are logits of; labels count in them then. None is all.
    counts: how often the weight's gradient counts, a number or data (`ops.attention.as_data`); 0: it is zero and not
    computed. None: once.

    Raises ValueError for shapes that do not fit, an FP8 product whose D is not a multiple of 16, or scales that are not
    positive. Source: Micikevicius et al. 2022, arXiv:2209.05433; the speedrun's records #19, #60, #79.
    """
    D = weight.shape[0] if in_out else weight.shape[1]
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != D or labels.ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and {labels.ids.shape[0]} rows of labels do not fit: "
            f"expected (T, D), {'(D, V)' if in_out else '(V, D)'} and T"
        )
    if scales is not None and (D % 16 or not all(s > 0 for s in scales)):
        raise ValueError(f"D={D}, {scales}: FP8 products need a multiple of 16 and positive scales")
    curve = curve_of(softcap)
    times, data = (1, counts) if isinstance(counts, Tensor) else (1 if counts is None else counts, None)
    options = (curve and list(curve), in_out, scales and list(scales), times, data)
    loss, _, _ = _head_loss(x, weight, *labels, columns, *options)
    return loss


class _Plain:
    """Products in the dtype of x."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight_VD.to(dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and where their gradient goes."""
        y = x @ self.weight.mT
        return y, y

    inverse = 1.0  # what the logits' gradient is multiplied by

    def backward(self, x: Tensor, g: Tensor, in_out: bool, times: int) -> tuple[Tensor, Tensor | None]:
        """Gradients of x and, `times` over, of the weight; None for 0."""
        dx = g @ self.weight
        if not times:
            return dx, None
        dw = (x.mT @ g if in_out else g.mT @ x).to(torch.promote_types(x.dtype, torch.float32))
        return dx, dw if times == 1 else dw.mul_(times)


class _Fp8:
    """Products in FP8; the weight is quantised once for all parts."""

    def __init__(self, weight_VD: Tensor, scales: Fp8Scales) -> None:
        self.scales, self.inverse = scales, 1 / scales.gradient
        if weight_VD.is_contiguous():
            self.weight, self.turned = quantize_pair(weight_VD, scales.weight, E4M3)
        else:
            self.turned, self.weight = quantize_pair(weight_VD.mT, scales.weight, E4M3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x8, self.x_turned = quantize_pair(x, self.scales.x, E4M3)
        y = scaled_product(x8, self.weight, self.scales.x, self.scales.weight, torch.bfloat16, fast=True)
        return y, torch.empty_like(y, dtype=E5M2)

    def backward(self, x: Tensor, g: Tensor, in_out: bool, times: int) -> tuple[Tensor, Tensor | None]:
        x_s, w_s, g_s = self.scales
        dx = scaled_product(g, self.turned, g_s, w_s, torch.bfloat16)
        if not times:
            return dx, None
        g_turned = turn(g)
        if in_out:
            return dx, scaled_product(self.x_turned, g_turned, x_s * times, g_s, torch.float32)
        return dx, scaled_product(g_turned, self.x_turned, g_s, x_s * times, torch.float32)


@torch.library.custom_op("nanosprint::head_loss", mutates_args=())
def _head_loss(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    totals: Tensor,
    rest: Tensor | None,
    columns: Tensor | None,
    curve: list[float] | None,
    in_out: bool,
    scales: list[float] | None,
    times: int,
    times_data: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of x, gradient of the weight) for an upstream gradient of one; the latter so many times over."""
    times = times if times_data is None else int(times_data)
    across, whole = int(in_out), weight
    if columns is not None:
        weight = whole.index_select(across, columns)
    V = weight.shape[1] if in_out else weight.shape[0]
    extra = -V % _ALIGN  # rows of logits that start at odd addresses halve the speed of everything that reads them
    padded = F.pad(weight, (0, extra) if in_out else (0, 0, 0, extra)) if extra else weight
    weight_VD = padded.mT if in_out else padded
    product = _Plain(weight_VD, x.dtype) if scales is None else _Fp8(weight_VD, Fp8Scales(*scales))
    cap = None if curve is None else Curve(*curve)
    total, dx = [], []
    dw: Tensor | None = None
    rows = _rows_at_once(len(x), V + extra, x.device)
    for part, part_ids, part_totals in zip(x.split(rows), ids.split(rows), totals.split(rows), strict=True):
        logits, g = product.forward(part)
        labels = Labels(part_ids, weights, part_totals, rest)
        total.append(loss_and_grad(logits, labels, cap, g, valid=V, inverse=product.inverse).sum())
        del logits
        part_dx, part_dw = product.backward(part, g, in_out, times)
        dx.append(part_dx)
        dw = part_dw if dw is None or part_dw is None else dw.add_(part_dw)
    wide = torch.promote_types(x.dtype, torch.float32)
    if dw is None:
        dw = torch.zeros(whole.shape, dtype=wide, device=x.device)
    else:
        dw = dw.narrow(across, 0, V)
        if columns is not None:
            dw = dw.new_zeros(whole.shape).index_copy_(across, columns, dw)
    one = len(dx) == 1
    loss = total[0] if one else torch.stack(total).sum()
    return loss, (dx[0] if one else torch.cat(dx)).to(x.dtype), dw.contiguous()


@_head_loss.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    totals: Tensor,
    rest: Tensor | None,
    columns: Tensor | None,
    curve: list[float] | None,
    in_out: bool,
    scales: list[float] | None,
    times: int,
    times_data: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    dw = torch.empty_like(weight, dtype=wide, memory_format=torch.contiguous_format)
    loss_dtype = torch.float32 if scales is not None else wide
    return x.new_empty((), dtype=loss_dtype), torch.empty_like(x, memory_format=torch.contiguous_format), dw


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.weight_dtype = inputs[1].dtype
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 12
    dx, dw = ctx.saved_tensors
    # A 0-D tensor does not widen what it multiplies.
    return dx * g, (dw * g).to(ctx.weight_dtype), *(None,) * 10


_head_loss.register_autograd(_derive, setup_context=_setup_context)


def _rows_at_once(rows: int, columns: int, device: torch.device) -> int:
    """As many rows as memory has room for logits, or fewer, so that the last part is not much smaller."""
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory // _SHARE // (2 * columns)
    else:
        most = _CPU_LOGITS // columns
    count = -(-rows // max(1, most))
    return max(1, -(-rows // max(1, count * 16))) * 16  # FP8 products sum over rows in multiples of 16
