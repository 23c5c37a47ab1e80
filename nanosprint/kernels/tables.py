"""Tables of whole numbers that tell one launch where many tensors lie."""

import functools

import torch
from torch import Tensor


def upload(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers as int64 on a device, from there if they were asked for before. Not to be written to."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _upload(numbers, device, stream)


@functools.lru_cache(maxsize=128)
def _upload(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Parameters and momenta never move and gradients rarely, so most tables are there already.

    Such a small copy from pageable memory waits for nothing; `stream` is in the key because it is ordered on that one.
    """
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
