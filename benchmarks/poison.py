"""Bytes of 0xFF, NaN in every float format, in all memory that torch holds for the GPU and nobody uses just now.

Who reads what nobody has written then reads NaN, instead of whatever an earlier tensor left there. That may long have
been harmless, finite numbers times zero, and the same at every run.

Memory is found in torch's list of its allocations. Blocks of the stream we are on are taken, of which everything
queued there is done before the fill; so are the unused blocks of CUDA graphs, whose replays write before they read.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """Bytes from `address` on."""

    address: int
    size: int


def unused(segments: Iterable[dict[str, Any]], device: int, stream: int) -> Iterator[Block]:
    """The unused blocks in `torch.cuda.memory_snapshot()`, of `stream` or of CUDA graphs."""
    for segment in segments:
        recorded = tuple(segment["segment_pool_id"]) != (0, 0)
        if segment["device"] != device or not (recorded or segment["stream"] == stream):
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield Block(address, block["size"])
            address += block["size"]


def poison(device: torch.device) -> int:
    """Fill it, behind what is queued on the current stream; how many bytes. Nothing on a CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    blocks = list(unused(torch.cuda.memory_snapshot(), index, stream))
    for block in blocks:
        torch.as_tensor(_Bytes(block), device=f"cuda:{index}").fill_(0xFF)
    return sum(block.size for block in blocks)


def spoil(tensor: Tensor) -> None:
    """The same of a contiguous tensor that is in use."""
    tensor.detach().view(-1).view(torch.uint8).fill_(0xFF)


class _Bytes:
    """A block as torch takes the memory of others."""

    def __init__(self, block: Block) -> None:
        self.__cuda_array_interface__ = {
            "shape": (block.size,), "typestr": "|u1", "data": (block.address, False), "version": 3,
        }  # fmt: skip
