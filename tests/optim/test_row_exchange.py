"""Rows of a sparse gradient reach their owners: the sum is the dense one, and only what is needed travels."""

import math

import pytest
import torch
import torch.distributed as dist
from test_bank import parameters
from torch import nn
from toy import EXACT, join, spawn

from nanosprint.config import MuonConfig, ParamGroup
from nanosprint.model.roles import Role
from nanosprint.optim import sharding
from nanosprint.optim.bank import Bank
from nanosprint.optim.build import build_parts
from nanosprint.optim.sharding import reduce_bank, reduce_rows

ROWS, WIDTH = 43, 5  # no multiple of any number of processes


def drawn(case, rank, processes):
    """Rows that a process has a gradient for."""
    g = torch.Generator().manual_seed(100 * rank + len(case))
    per_shard = -(-ROWS // processes)
    some = torch.randint(ROWS, (7,), generator=g)
    return {
        "random": some,
        "one sends nothing": some[:0] if rank == processes - 1 else some,
        "nobody sends": some[:0],
        "all to one": torch.randint(per_shard, (7,), generator=g),
        "ends": torch.tensor([0, ROWS - 1]),
        "same everywhere": torch.tensor([3, 20, 41]),
        "everything": torch.arange(ROWS),
    }[case]


CASES = ("random", "one sends nothing", "nobody sends", "all to one", "ends", "same everywhere", "everything")


def device_of(rank):
    return torch.device("cuda", rank) if dist.is_initialized() and "nccl" in dist.get_backend_config() else "cpu"


def gradient(case, rank, processes, dtype):
    """What process `rank` has, on the caller's device."""
    grad = torch.zeros(ROWS, WIDTH, dtype=dtype)
    rows = drawn(case, rank, processes)
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    grad[rows] = values[rows].to(dtype)
    return grad.to(device_of(dist.get_rank() if dist.is_initialized() else 0))


def bank_with(grad, shards):
    held = {name: nn.Parameter(p.detach().to(grad.device)) for name, p in parameters((ROWS, WIDTH)).items()}
    bank = Bank(held, (WIDTH,), grad.dtype, shards)
    bank.grads["p0"].copy_(grad)
    return bank


class Spy:
    """Counts what is sent by either kind of message, in numbers."""

    def __init__(self):
        self.sent, self._messages = {"rows": 0, "all": 0}, (dist.all_to_all_single, sharding.reduce_scatter)

    def __enter__(self):
        def to_each(out, of, *args, **options):
            self.sent["rows"] += of.numel()
            return self._messages[0](out, of, *args, **options)

        def scatter(out, of, **options):
            self.sent["all"] += of.numel()
            return self._messages[1](out, of, **options)

        dist.all_to_all_single, sharding.reduce_scatter = to_each, scatter
        return self.sent

    def __exit__(self, *_):
        dist.all_to_all_single, sharding.reduce_scatter = self._messages


def exchanges(rank, processes, backend="gloo"):
    if backend == "gloo":
        join(rank, processes)
    else:
        torch.cuda.set_device(rank)
        dist.init_process_group(backend, rank=rank, world_size=processes)
    for case in CASES:
        sparse_equals_dense(case, rank, processes)
        order_of_additions(case, rank, processes)
    dense_above_the_threshold(rank, processes)
    nan_travels(rank, processes)
    dist.barrier()
    dist.destroy_process_group()


def sparse_equals_dense(case, rank, processes):
    mine = gradient(case, rank, processes, torch.float64)
    dense, sparse = bank_with(mine, processes), bank_with(mine, processes)
    reduce_bank(dense).wait()
    with Spy() as sent:
        reduce_rows(sparse).wait()
    ours, theirs = (bank.owned(bank.grad, rank) for bank in (sparse, dense))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=lambda m: f"{case}: {m}")
    abroad = mine.clone()
    abroad[list(sparse.units_of(rank))] = 0
    assert sent == {"rows": int(abroad.any(1).sum()) * (WIDTH + 1), "all": 0}, case  # each with its place


def order_of_additions(case, rank, processes):
    """In bf16 every addition rounds: own rows first, then those of the others in the order of ranks."""
    everyone = [gradient(case, r, processes, torch.bfloat16) for r in range(processes)]
    bank = bank_with(everyone[rank], processes)
    reduce_rows(bank).wait()
    total = everyone[rank].clone()
    for r in range(processes):
        total += everyone[r] if r != rank else 0
    mine = list(bank.units_of(rank))
    assert torch.equal(bank.owned(bank.grad, rank), total[mine]), case


def dense_above_the_threshold(rank, processes):
    """All send alike, or none: what counts is the busiest process, which all of them know of."""
    few = gradient("ends", rank, processes, torch.float64)
    mine = few if rank else gradient("everything", rank, processes, torch.float64)
    before, sharding.SPARSE_BELOW = sharding.SPARSE_BELOW, 0.5
    for grad, expected in ((mine, "all"), (few, "rows")):
        dense, bank = bank_with(grad, processes), bank_with(grad, processes)
        reduce_bank(dense).wait()
        with Spy() as sent:
            reduce_rows(bank).wait()
        assert bool(sent["all"]) == (expected == "all")
        torch.testing.assert_close(*(b.owned(b.grad, rank) for b in (bank, dense)), rtol=0, atol=1e-12)
    sharding.SPARSE_BELOW = before


def nan_travels(rank, processes):
    grad = torch.zeros(ROWS, WIDTH, dtype=torch.float64, device=device_of(rank))
    if rank == processes - 1:
        grad[0, 2] = math.nan
    bank = bank_with(grad, processes)
    reduce_rows(bank).wait()
    assert bool(bank.owned(bank.grad, rank).isnan().any()) == (rank == 0)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes(processes):
    spawn(processes, exchanges)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    spawn(2, exchanges, "cpu:gloo,cuda:nccl")


def test_one_process_sends_nothing():
    grad = gradient("random", 0, 1, torch.float64)
    bank = bank_with(grad, 1)
    assert reduce_rows(bank) is None
    assert torch.equal(bank.grads["p0"], grad)


def test_rows_are_for_adam():
    group = ParamGroup(role="matrix", rule=MuonConfig(), lr=0.1, comm="shard_sparse")
    with pytest.raises(ValueError, match=r"comm='shard_sparse' of role 'matrix' needs AdamConfig"):
        build_parts(parameters((4, 3)), {"p0": Role("matrix")}, (group,), EXACT)
