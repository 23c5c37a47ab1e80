"""Reductions after the backward pass, in the order of updates: the bits of those that start during it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from toy import GROUPS, LENGTH, assert_same_bits, join, plan, spawn, toy, train

STEPS = 6
ROWS = tuple(replace(g, comm="shard_sparse", every=2) if g.role == "embed" else g for g in GROUPS)
TIED = tuple(replace(g, lr=0.02, every=2) if g.role in ("head", "embed") else g for g in GROUPS)
CASES = {
    "plain": (GROUPS, {}, {}),
    "clipped": (GROUPS, {}, {"grad_clip": 0.05}),
    "rows": (ROWS, {}, {"skips": (1, 2, 3)}),
    "first": (ROWS, {"update_order": ("embed", "soap")}, {"grad_clip": 0.05}),
    "tied": (TIED, {"tied": "in_out"}, {"split_from": 2}),
}  # fmt: skip


def trained(case, overlap):
    groups, of_engine, options = CASES[case]
    model, engine = toy(groups, dtype=torch.float32, **of_engine)
    engine.overlap = overlap
    losses = train(model, engine, range(STEPS), lanes=1, **options)
    return model, losses


def compared(rank, processes):
    join(rank, processes)
    for case in CASES:
        (early, losses), (late, others) = (trained(case, overlap) for overlap in (True, False))
        assert losses == others, case
        for (name, one), two in zip(early.named_parameters(), late.parameters(), strict=True):
            assert torch.equal(one, two), (case, name)
        assert_same_bits(late)
    nothing_during_the_backward_pass()
    dist.destroy_process_group()


def nothing_during_the_backward_pass():
    """What is reduced, and when: all of it in `step`, in the order of updates, which is not that of the groups."""
    model, engine = toy(update_order=("soap",))
    engine.overlap = False
    reduced, updated = [], []
    for part in engine.parts:
        noted(part, "reduce", reduced)
        noted(part, "update", updated)
    now = plan(0)
    for last in (False, True):
        if last:
            engine.begin(now)
        model.loss_sum(torch.zeros(1, LENGTH, dtype=torch.int64)).backward()
    assert reduced == []
    engine.step(now)
    assert len(reduced) == len(engine.parts)
    assert reduced[0] == "soap"
    assert reduced == [part.group.role for part in engine._updates]
    assert updated == [role for role in reduced if role in updated]


def noted(part, method, log):
    """Put the part's role into `log` at each call of its method."""
    real = getattr(part, method)

    def call(*args):
        log.append(part.group.role)
        return real(*args)

    setattr(part, method, call)


@pytest.mark.parametrize("processes", [2, 4])
def test_same_bits(processes):
    spawn(processes, compared)


def test_one_process():
    for case in CASES:
        (early, losses), (late, others) = (trained(case, overlap) for overlap in (True, False))
        assert losses == others, case
        assert all(torch.equal(*pair) for pair in zip(early.parameters(), late.parameters(), strict=True)), case
