"""Muon's elementwise halves, each one pass over memory for all tensors of a shape in one launch.

The tensors live wherever the allocator put them, so a kernel is handed a table of their addresses: program (block, i)
works on one block of tensor i. Between the two kernels lies the orthogonalisation, on one stack in its own dtype.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements of a program: 16 a thread in 8 warps, four wide loads
_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _lerp(start, end, weight):
    """start + weight (end - start) by whichever of two equal forms rounds less, as torch.lerp does."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def _pointer(table, index, DTYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table + index).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _momentum_kernel(
    table, stack, size, momentum, NESTEROV: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    averages = _pointer(table, tl.num_programs(1) + index, tl.float32) + at
    grad = tl.load(_pointer(table, index, GRAD) + at, mask=inside, other=0.0).to(tl.float32)
    average = _lerp(tl.load(averages, mask=inside, other=0.0), grad, 1.0 - momentum)
    tl.store(averages, average, mask=inside)
    direction = _lerp(grad, average, momentum) if NESTEROV else average
    tl.store(stack + index.to(tl.int64) * size + at, direction.to(stack.dtype.element_ty), mask=inside)


@triton.jit
def _apply_kernel(table, stack, size, step_size, keep, PARAM: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    params = _pointer(table, index, PARAM) + at
    update = tl.load(stack + index.to(tl.int64) * size + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(params, mask=inside, other=0.0).to(tl.float32) * keep - step_size * update
    tl.store(params, weight.to(PARAM), mask=inside)


def momentum_stack(averages: Sequence[Tensor], grads: Sequence[Tensor], stack: Tensor, momentum: float, nesterov: bool):
    """averages += (1 - momentum) (grads - averages); stack <- the directions, rounded once.

    averages fp32, grads fp32, bf16 or fp16, all of one shape; stack (k, *shape) contiguous, any of these dtypes.
    """
    size = averages[0].numel()
    if not stack.numel():
        return
    with torch.cuda.device_of(stack):
        _momentum_kernel[(triton.cdiv(size, _BLOCK), len(averages))](
            _table(stack.device, grads, averages), stack, size, momentum,
            NESTEROV=nesterov, GRAD=_TRITON[grads[0].dtype], BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def apply_stack(params: Sequence[Tensor], stack: Tensor, step_size: float, keep: float):
    """params <- keep params - step_size stack, computed in fp32 and rounded once. Layout as in `momentum_stack`."""
    size = params[0].numel()
    if not stack.numel():
        return
    with torch.cuda.device_of(stack):
        _apply_kernel[(triton.cdiv(size, _BLOCK), len(params))](
            _table(stack.device, params), stack, size, step_size, keep,
            PARAM=_TRITON[params[0].dtype], BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def can_fuse(*columns: Sequence[Tensor]) -> bool:
    """Whether every tensor is contiguous on one GPU, starts at a multiple of 16 bytes and has one dtype a column."""
    device = columns[0][0].device
    return device.type == "cuda" and all(
        t.device == device and t.dtype == column[0].dtype in _TRITON and t.is_contiguous() and t.data_ptr() % 16 == 0
        for column in columns
        for t in column
    )


def _table(device: torch.device, *columns: Sequence[Tensor]) -> Tensor:
    """Addresses on the device, column after column. From pageable memory such a small copy waits for nothing."""
    addresses = [t.data_ptr() for column in columns for t in column]
    return torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)
