"""Parameters that are spread over several processes (FSDP2's `fully_shard`, tensor parallelism: `DTensor`).

Elementwise rules need no communication: each process updates its own shard. Orthogonalisation needs whole matrices,
so their shards are gathered, in the working precision and one collective for all matrices of a shape, every process
does the same small computation, and each takes its own part of the result. That is simple and right; it spends the
arithmetic once per process. Plain tensors pass through untouched, and nothing here imports `torch.distributed`
until a DTensor appears.
"""

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, asked without importing it."""
    return hasattr(tensor, "device_mesh")


def layout(tensor: Any) -> Any:
    """A hashable description of how the tensor is spread; None for a plain one."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None


def local(tensor: Any) -> Tensor:
    """This process's part, sharing memory with `tensor`."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_like(tensor: Any, like: Any) -> Tensor:
    """This process's part of `tensor` (a gradient), cut the way `like` (its parameter) is cut."""
    if not is_sharded(like):
        return tensor
    if tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def whole(tensor: Any) -> Tensor:
    """All of `tensor`, on every process."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather(stack: Tensor, like: Any) -> Tensor:
    """From local parts (k, *local shape) of k tensors spread as `like` to the whole (k, *shape), on every process."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(stack), *like.shape))
    stride = torch.empty(shape, device="meta").stride()
    mesh = like.device_mesh
    return DTensor.from_local(stack, mesh, _stacked(like), run_check=False, shape=shape, stride=stride).full_tensor()


def scatter(stack: Tensor, like: Any) -> Tensor:
    """The inverse of `gather`, without communication: this process's parts of (k, *shape)."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    whole = DTensor.from_local(stack, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=_stacked(like)).to_local()


def _stacked(like: Any) -> list[Any]:
    """The placements of `like` for tensors with one more axis in front."""
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = []
    for placement in like.placements:
        if type(placement) is Shard:
            placements.append(Shard(placement.dim + 1))
        elif isinstance(placement, Replicate):
            placements.append(placement)
        else:
            raise ValueError(
                f"a parameter of shape {tuple(like.shape)} is placed as {placement}: matrices can be gathered from "
                "Shard and Replicate only, so shard it over one mesh axis or give it to AdamW"
            )
    return placements
