"""Processes that train together: who am I, and sums over all of us.

One process needs no process group: every function here is then the identity. Several are started by torch's elastic
launcher (`--gpus N`) or by torchrun on one node or many; both tell each process its place by environment variables.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanosprint.errors import UserError

# What the program sets for NCCL, unless the user has. NVLink multicast stays off: not every host allows it. "3" ends a
# process whose collective failed or timed out, without waiting for the others.
NCCL_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0  # among the processes of this machine
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launched_rank() -> int | None:
    """This process's rank if a launcher started it, else None. Reads the environment only."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def pick_device(name: str) -> torch.device:
    """The device for `exec.device`, this process's own one where several GPUs train together.

    Raises UserError when it does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("exec.device=mps: this machine has no Apple GPU that torch can use; try --device cpu")
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise UserError("exec.device=cuda: torch sees no CUDA device here; try --device cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"process {local_rank + 1} of this machine has no GPU of its own: torch sees {count}; lower --gpus"
        )
    return torch.device("cuda", local_rank)


def start(device_name: str, timeout_s: float) -> World:
    """Join the other processes, if there are any. Call `stop` at the end.

    timeout_s: how long to wait for them, now and in every collective. Raises TimeoutError where they do not come.
    """
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launched_rank() is None:
        return World(0, 1, device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise TimeoutError(
            f"the {os.environ['WORLD_SIZE']} processes did not come together within exec.timeout_s={timeout_s:g} at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: is one missing, or the network "
            f"interface another (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)? ({str(error).splitlines()[0]})"
        ) from error
    return World(dist.get_rank(), dist.get_world_size(), device, *local_place())


def local_place() -> tuple[int, int]:
    """This process's number among those of its host, and how many they are.

    Where each is shown a GPU of its own alone (`torchrun --virtual-local-rank`, and `--gpus`), LOCAL_RANK is the
    number of that GPU, 0 for all: hosts of equally many processes are taken for granted there.
    """
    size, number = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown and "," not in shown and size > 1:
        number = int(os.environ["RANK"]) % size
    return number, size


def stop() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def max_(tensor: Tensor) -> Tensor:
    """Replace `tensor` by its element-wise maximum over all processes, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor
