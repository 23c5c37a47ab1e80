"""Before anything slow: do all processes run the same program on the same data, and do sums over them come out right?

Processes that differ train without an error, and wrongly: a host with another version of the code, another recipe
typed into one of two terminals, a shard that was not fetched whole. So each says what it has, and every process
compares. What differs is told with who has what:

    the processes do not agree on torch: 2.11.0 on process 0 (a); 2.10.0 on processes 1-7 (b)

Then known numbers go through the collectives that training uses, on its device: a switch or a driver that garbles or
drops a message is found by name.
"""

import socket
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanosprint.data.shards import open_shard
from nanosprint.errors import UserError
from nanosprint.optim.sharding import all_gather, from_all, reduce_scatter
from nanosprint.training.distributed import World
from nanosprint.training.environment import code_checksum, versions
from nanosprint.training.request import RunRequest
from nanosprint.training.setup import Data

_SAMPLES, _SAMPLE_BYTES = 32, 4096  # of a shard: its beginning, its end and places between


def check_processes(request: RunRequest, world: World) -> None:
    """Compare program, recipe and layout, and send known numbers. Raises UserError naming what differs and where."""
    if world.size == 1:
        return
    facts: dict[str, Any] = {name: text for name, text in versions().items() if name != "driver"}
    facts |= {"code": code_checksum(), "recipe": f"{request.recipe.name} {request.recipe.hash}", "seed": request.seed}
    facts |= {"--max-steps": request.max_steps, "device type": world.device.type, "number of processes": world.size}
    require_same(facts, world)
    _check_collectives(world.device)


def check_data(data: Data, world: World) -> None:
    """Compare shards: names, numbers of tokens, and a checksum of samples of each. Raises UserError.

    Samples, since hashing all of it would read 20 GB for a large set; the record has every shard's whole checksum.
    """
    if world.size == 1:
        return
    require_same({f"shard {path.name}": _shard_words(path) for path in (*data.train, *data.val)}, world)


def require_same(facts: Mapping[str, Any], world: World) -> None:
    """Raise UserError on every process unless all have the same facts. Every process must call it."""
    everyone = from_all((socket.gethostname(), dict(facts)))
    names = list(dict.fromkeys(name for _, theirs in everyone for name in theirs))
    differing = [name for name in names if len({str(theirs.get(name, "missing")) for _, theirs in everyone}) > 1]
    if not differing:
        return
    told = [_told(name, [(host, str(theirs.get(name, "missing"))) for host, theirs in everyone]) for name in differing]
    more = f"\n  and {len(told) - 8} more" if len(told) > 8 else ""
    raise UserError(
        "the processes do not agree on " + "\n  ".join(told[:8]) + more + "\nstart all of them with the same program, "
        "words and data"
    )


def _told(name: str, values: list[tuple[str, str]]) -> str:
    """Who has what, the value of the first process first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (host, value) in enumerate(values):
        groups.setdefault((value, host), []).append(rank)
    parts = []
    for (value, host), ranks in groups.items():
        several = len(ranks) > 1
        parts.append(f"{value} on process{'es' if several else ''} {_ranges(ranks)} ({host})")
    more = f"; and on {len(parts) - 6} more hosts" if len(parts) > 6 else ""
    return f"{name}: {'; '.join(parts[:6])}{more}"


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def _check_collectives(device: torch.device) -> None:
    """Known numbers through every collective of training. Raises RuntimeError where they come out wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(4 * size, dtype=torch.float32, device=device) + rank  # small integers: exact in any order
    summed = size * torch.arange(4 * size, dtype=torch.float32) + size * (size - 1) / 2
    total = mine.clone()
    dist.all_reduce(total)
    part = torch.empty(4, device=device)
    reduce_scatter(part, mine)
    whole = torch.empty(4 * size, device=device)
    all_gather(whole, part)
    told = torch.full((4,), float(rank), device=device)
    dist.broadcast(told, src=size - 1)
    results = {
        "all-reduce": (total, summed),
        "reduce-scatter": (part, summed[4 * rank : 4 * rank + 4]),
        "all-gather": (whole, summed),
        "broadcast": (told, torch.full((4,), size - 1.0)),
    }
    for name, (found, expected) in results.items():
        if not torch.equal(found.cpu(), expected):
            raise RuntimeError(
                f"self-check: {name} of known numbers came out wrong on process {rank} ({socket.gethostname()}, "
                f"{device}): {found.cpu().tolist()[:4]} in place of {expected.tolist()[:4]}. The connection between "
                "the GPUs or hosts cannot be relied upon; NCCL_DEBUG=INFO shows it, NCCL_P2P_DISABLE=1 avoids one kind"
            )


def differing_weights(model: nn.Module) -> list[str]:
    """The parameters that are not bit for bit the same on all processes; the same answer on each.

    By checksums, so a second or two for each billion bytes. Every process must call it.
    """
    first, *others = from_all({name: _bits_checksum(weight) for name, weight in model.named_parameters()})
    return [name for name, checksum in first.items() if any(theirs[name] != checksum for theirs in others)]


def _bits_checksum(tensor: Tensor) -> str:
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return sha256(bits.cpu().numpy().data).hexdigest()


def _shard_words(path: Path) -> str:
    """Tokens and a checksum of samples of one shard."""
    size = path.stat().st_size
    digest = sha256()
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{len(open_shard(path)):,} tokens {digest.hexdigest()[:12]}"
