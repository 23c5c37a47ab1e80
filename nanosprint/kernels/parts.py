"""What kernels of several files are made of."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.host import sent

FLOATS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has. The interpreter's machine has four, so that blocks get several tiles there, too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def ceil_div(a: int, b: int) -> int:
    """How many parts of size b hold a. `triton.cdiv` would take the host 4 us, half as long as a launch."""
    return -(-a // b)


@triton.jit
def larger(a, b):
    """The larger of two, NaN if either is; for `tl.reduce`, too, whose own maximum drops NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def address_table(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Where tensors begin, int64 on their device; 0 for None. For kernels that work on many of them in one launch."""
    return upload(tuple(0 if t is None else t.data_ptr() for t in tensors), device)


def upload(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Whole numbers as int64 on a device, from there if they were asked for before. Not to be written to.

    While a graph is recorded they must have been: on any stream, whose copy is over when a recording begins.
    """
    tables = _tables(numbers, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if stream not in tables:
        if tables and torch.cuda.is_current_stream_capturing():
            return next(iter(tables.values()))
        tables[stream] = sent(numbers, torch.int64, device)
    return tables[stream]


@functools.lru_cache(maxsize=128)
def _tables(numbers: tuple[int, ...], device: torch.device) -> dict[int, Tensor]:
    """By the stream on which a copy is ordered. Parameters and momenta never move and gradients rarely, so most tables
    are there already."""
    return {}
