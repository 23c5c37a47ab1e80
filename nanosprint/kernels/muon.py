"""Muon's elementwise halves, each one pass over memory for all tensors of a shape in one launch.

The tensors live wherever the allocator put them, so a kernel is handed a table of their addresses: program (block, i)
works on one block of tensor i. Between the two kernels lies the orthogonalisation, on one stack in its own dtype.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # elements of a program: 8 a thread in 8 warps, two wide loads (H200: 4096 is as fast or slower)
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


def momentum_stack(
    averages: Sequence[Tensor], grads: Sequence[Tensor], momentum: float, nesterov: bool, dtype: torch.dtype
) -> Tensor:
    """averages += (1 - momentum) (grads - averages); returns the directions (k, *shape) in `dtype`, rounded once.

    averages fp32, grads fp32, bf16 or fp16, all of one shape and as `can_fuse` wants them.
    """
    stack = torch.empty((len(averages), *averages[0].shape), dtype=dtype, device=averages[0].device)
    size = averages[0].numel()
    if size:
        with torch.cuda.device_of(stack):
            _momentum_kernel[(triton.cdiv(size, _BLOCK), len(averages))](
                _table(stack.device, grads, averages), stack, size, float(momentum),
                NESTEROV=nesterov, GRAD=_TRITON[grads[0].dtype], BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
    return stack


def apply_stack(params: Sequence[Tensor], stack: Tensor, step_size: float, keep: float) -> None:
    """params <- keep params - step_size stack, computed in fp32 and rounded once; stack (k, *shape) contiguous."""
    size = params[0].numel()
    if size:
        with torch.cuda.device_of(stack):
            _apply_kernel[(triton.cdiv(size, _BLOCK), len(params))](
                _table(stack.device, params), stack, size, float(step_size), float(keep),
                PARAM=_TRITON[params[0].dtype], BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
    torch.autograd.graph.increment_version(params)  # autograd did not see the change


def can_fuse(*columns: Sequence[Tensor]) -> bool:
    """Whether the kernels take these: contiguous, at multiples of 16 bytes, each column of one dtype that they know."""
    return all(
        t.dtype == column[0].dtype and t.dtype in _TRITON and t.is_contiguous() and t.data_ptr() % 16 == 0
        for column in columns
        for t in column
    )


def _table(device: torch.device, *columns: Sequence[Tensor]) -> Tensor:
    """Addresses on the device, column after column."""
    addresses = tuple(t.data_ptr() for column in columns for t in column)
    return _upload(addresses, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@functools.lru_cache(maxsize=64)
def _upload(addresses: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Parameters and momenta never move and gradients rarely, so most tables are there already.

    Such a small copy from pageable memory waits for nothing; `stream` is in the key because it is ordered on that one.
    """
    return torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)
