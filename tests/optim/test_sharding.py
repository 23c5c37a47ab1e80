"""Messages between processes, and the order in which they start."""

import torch
import torch.distributed as dist
from test_bank import parameters
from toy import LENGTH, join, plan, spawn, toy

from nanosprint.optim.bank import Bank
from nanosprint.optim.sharding import LaunchOrder, from_first, gather_bank, gather_sparse, gather_units, reduce_bank


def started(waits, arrivals):
    """What has been launched after each arrival, for launches that wait for these parameters (by name)."""
    tensors = {name: torch.zeros(1) for name in "abcd"}
    log, order, seen = [], LaunchOrder(), []
    order.arm(([tensors[n] for n in names], lambda i=i: log.append(i)) for i, names in enumerate(waits))
    for name in arrivals:
        order.arrived(tensors[name])
        seen.append(list(log))
    order.finish()
    assert log == list(range(len(waits)))  # always all, always in order
    return seen


def test_launches_keep_their_order():
    assert started(["a", "b"], "ab") == [[0], [0, 1]]
    assert started(["a", "b"], "ba") == [[], [0, 1]]
    assert started(["ab", "c"], "acb") == [[], [], [0, 1]]
    assert started(["ab", "b", "c"], "ba") == [[], [0, 1]]  # one that two wait for; the third never comes
    assert started(["a", "b"], "dd") == [[], []]
    assert started([], "a") == [[]]


def bank_of(dtype, shards):
    """Five matrices, with a gradient of small whole numbers, which every type adds up exactly."""
    torch.manual_seed(0)
    bank = Bank(parameters(*[(3, 4)] * 5), (3, 4), dtype, shards)
    return bank, torch.randint(-4, 5, bank.views(bank.grad)["p0"].shape)


def exchanges(rank, processes):
    join(rank, processes)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shards in (1, processes):
            bank, pattern = bank_of(dtype, shards)
            for i, view in enumerate(bank.views(bank.grad).values()):
                view.copy_(pattern * (rank + 1) + i)
            reduce_bank(bank).wait()
            total = torch.stack([pattern * (processes * (processes + 1) // 2) + i * processes for i in range(5)])
            mine = rank if shards > 1 else 0
            units = bank.units_of(mine)
            assert torch.equal(bank.owned(bank.grad, mine), total[units.start : units.stop].to(dtype))
            bank.owned(bank.data, mine).copy_(total[units.start : units.stop])
            handle = gather_bank(bank)
            assert (handle is None) == (shards == 1)
            if handle is not None:
                handle.wait()
            assert torch.equal(bank.data[: 5 * 12].view(5, 3, 4), total.to(dtype))
    for dtype in (torch.uint16, torch.float32):  # a mantissa is of a type that no back end adds or sends
        bank, _ = bank_of(torch.float32, processes)
        numbers = (torch.arange(15).view(5, 3, 1) * 1000).to(dtype)
        units = bank.units_of(rank)
        own = numbers[units.start : units.stop] if len(units) else None
        assert torch.equal(gather_units(bank, own, (3, 1), dtype).long(), numbers.long())
    assert from_first(f"process {rank}") == "process 0"
    sparse(rank, processes)
    overlap(processes)
    dist.destroy_process_group()


def sparse(rank, processes):
    """Every process with another number of look-ups, the last with none, against the sum of dense gradients."""
    table = torch.zeros(7, 3, dtype=torch.float64)
    grads = []
    for r in range(processes - 1):
        g = torch.Generator().manual_seed(r)
        values = torch.randn(r + 2, 3, generator=g, dtype=torch.float64)
        grads.append(
            torch.sparse_coo_tensor(torch.randint(7, (1, r + 2), generator=g), values, (7, 3), check_invariants=True)
        )
    got = gather_sparse(grads[rank] if rank < len(grads) else None, table)
    torch.testing.assert_close(got.to_dense(), sum(g.to_dense() for g in grads), rtol=0, atol=1e-12)
    assert got._values().size(0) == sum(g._values().size(0) for g in grads)  # look-ups are not added up


def overlap(processes):
    """Reductions start during the backward pass, in the groups' order, and only in a step's last one."""
    model, engine = toy()
    order, now = engine._launches, plan(0)
    at_out = []
    model.out.register_post_accumulate_grad_hook(lambda _: at_out.append(order._next))
    for last in (False, True):
        if last:
            engine.begin(now)
        model.loss_sum(torch.zeros(1, LENGTH, dtype=torch.int64)).backward()
    assert order._next == len(engine.parts)
    assert at_out == [0, 1]  # the head's was under way before the rest of the backward pass
    engine.step(now)


def test_two_processes():
    spawn(2, exchanges)


def test_three_processes():
    spawn(3, exchanges)
