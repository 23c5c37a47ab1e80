"""RMS norm without gain: divide by the root mean square over the last axis.

    y = x / sqrt(mean(x^2) + eps)

One pass for the statistics and one for the division, each way. `F.rms_norm` has no kernel of its own on a CPU: there
it is eight operators, of which `pow` and `mean` are slow ones, and fourteen backward.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x (..., D) over its root mean square, along the last axis, in `dtype` (that of x if None).

    x: any float dtype, any strides. Statistics are in fp32, or in fp64 for fp64. Each row is on its own. On a CPU
    outside torch.compile the gradient can be taken once only; everywhere else this is `F.rms_norm` and a cast.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _CpuRmsNorm.apply(x, eps, dtype or x.dtype)
    y = F.rms_norm(x, (x.size(-1),), eps=eps)
    return y if dtype is None else y.to(dtype)


def lengths(x: Tensor, eps: float) -> Tensor:
    """sqrt(sum(x^2) + D eps) over the last axis, kept as size 1: sqrt(D) times what `rms_norm` divides by."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().add_(x.size(-1) * eps).sqrt_()


def norm_backward(grad: Tensor, x: Tensor, scale: Tensor, length: Tensor) -> Tensor:
    """Gradient of y = x * scale / length, length = sqrt(sum(x^2) + constant), along the last axis: shape of x.

        dx = scale / length * (grad - x * sum(grad * x) / length^2)

    grad, x: (..., D), one dtype; scale, length: (..., 1). The kernel is that of weight normalisation, the one fused
    pass of this form that torch has on a CPU: 0.05 ms for 4096 x 128 fp32 on two cores, against 0.16 as vecdot and two
    elementwise passes.
    """
    D = x.size(-1)
    # The kernel reads memory from end to end without asking for strides.
    columns = (t.reshape(-1, t.size(-1)).contiguous() for t in (grad, x, scale, length))
    return torch.ops.aten._weight_norm_interface_backward(*columns, 0)[0].view(*x.shape[:-1], D)


class _CpuRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        length = lengths(x, eps)
        ctx.save_for_backward(x, length)
        return (x * length.reciprocal().mul_(math.sqrt(x.size(-1)))).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, length = ctx.saved_tensors
        scale = torch.full_like(length, math.sqrt(x.size(-1)))
        return norm_backward(grad.to(length.dtype), x.to(length.dtype), scale, length).to(x.dtype), None, None
