"""Numbers on their way from the host to a device that may be several steps behind it. Without Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(numbers: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor on `device`; the host does not wait for it.

    By way of pinned memory, which torch gives to nobody else before the copy is over. Of other memory CUDA says only
    that a copy "might be synchronous": where a GPU reaches all of the host's memory by itself, nothing need be staged,
    and the copy may read what has been given to another tensor by then.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
