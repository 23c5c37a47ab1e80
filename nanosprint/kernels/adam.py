"""AdamW as one pass over memory for what torch's fused kernel does not take: bf16 parameters with fp32 averages, and
decay that looks at the step first. 22 bytes an element with bf16 parameters and gradients.

One launch a tensor: meant for the few large shards of a bank or a table.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.parts import ceil_div

_BLOCK = 2048  # elements of a program, as in `kernels.muon`; not measured yet
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**31 - 2**16  # elements of a tensor: offsets are 32 bits wide


@triton.jit
def _adam_kernel(
    weights, grads, exp_avgs, exp_avg_sqs, size, fresh1, beta2, fresh2, root_scale, eps, step_size, decay,
    CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
    average = tl.load(exp_avgs + at, mask=inside, other=0.0)
    average += fresh1 * (grad - average)
    square = beta2 * tl.load(exp_avg_sqs + at, mask=inside, other=0.0) + fresh2 * grad * grad
    tl.store(exp_avgs + at, average, mask=inside)
    tl.store(exp_avg_sqs + at, square, mask=inside)
    update = step_size * average / (tl.sqrt(square) * root_scale + eps)
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    shrink = decay * weight
    if CAUTIOUS:
        shrink = tl.where(update * weight > 0.0, shrink, 0.0)
    tl.store(weights + at, (weight - shrink - update).to(weights.dtype.element_ty), mask=inside)


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    root_scale: float,
    eps: float,
    step_size: float,
    decay: float,
    cautious: bool,
) -> None:
    """m and v as in `optim.adam`, then w <- w - decay w - step_size m / (root_scale sqrt(v) + eps), in fp32.

    params and grads fp32, bf16 or fp16, averages fp32, all as `can_fuse` wants them; all but grads change in place and
    are rounded once. cautious: decay only where step * weight > 0.
    """
    beta1, beta2 = betas
    # 1 - beta from the host: in fp32, 1 - 0.999 would lose four digits
    numbers = [float(x) for x in (1 - beta1, beta2, 1 - beta2, root_scale, eps, step_size, decay)]
    for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        size = tensors[0].numel()
        if size:
            with torch.cuda.device_of(tensors[0]):
                _adam_kernel[(ceil_div(size, _BLOCK),)](
                    *tensors, size, *numbers, CAUTIOUS=cautious, BLOCK=_BLOCK, num_warps=8
                )
    torch.autograd.graph.increment_version(params)  # autograd did not see the change


def can_fuse(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor]
) -> bool:
    """Whether `adam_step` takes these: contiguous, fp32 averages, parameters and gradients no wider."""
    columns = (params, grads, exp_avgs, exp_avg_sqs)
    return (
        all(t.is_contiguous() and t.numel() <= _MOST for column in columns for t in column)
        and all(t.dtype in _NARROW for t in (*params, *grads))
        and all(t.dtype == torch.float32 for t in (*exp_avgs, *exp_avg_sqs))
    )
