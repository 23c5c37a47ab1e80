"""Embedding and head are one parameter until they part, then two that start from the same state."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from toy import ADAM, EXACT, GROUPS, LANES, LENGTH, VOCAB, Toy, assert_same_bits, differ, join, spawn, toy, train

from nanosprint.config import AdamConfig, ParamGroup
from nanosprint.model.roles import Role
from nanosprint.optim.build import build_parts
from nanosprint.optim.tying import Tie

STEPS = 10
PAIR = {"rule": ADAM, "lr": 0.02, "weight_decay": 0.1}
TIED = (ParamGroup(role="head", **PAIR), *(replace(g, lr=0.0) for g in GROUPS[1:3]), ParamGroup(role="embed", **PAIR),
        replace(GROUPS[4], lr=0.0))  # fmt: skip
TURNS = tuple(replace(g, every=2) if g.role in ("head", "embed") else g for g in TIED)


def by_hand(every, split_from):
    """(embedding, head) after STEPS steps of Adam written out on one weight, on two from the split on; head (V, D)."""
    model = Toy()
    w = [model.head.detach().clone()]
    m, v = [torch.zeros_like(w[0])], [torch.zeros_like(w[0])]
    g = [torch.zeros_like(w[0]), torch.zeros_like(w[0])]
    count = 0
    for step in range(STEPS):
        model.embed.data, model.head.data = w[0].clone(), w[-1].clone()
        model.zero_grad()
        rows = torch.randint(VOCAB, (LANES, LENGTH), generator=torch.Generator().manual_seed(step))
        (model.loss_sum(rows) / (LANES * LENGTH)).backward()
        g = [g[0] + model.embed.grad, g[1] + model.head.grad]
        if (step + 1) % every:
            continue
        count += 1
        lr = 0.02 * (1 - step / 40)
        for i, grad in enumerate([g[0] + g[1]] if len(w) == 1 else g):
            m[i] = 0.8 * m[i] + 0.2 * grad
            v[i] = 0.95 * v[i] + 0.05 * grad**2
            alpha = lr * (1 - 0.95**count) ** 0.5 / (1 - 0.8**count)
            w[i] = (1 - lr * 0.1) * w[i] - alpha * m[i] / (v[i].sqrt() + 1e-10)
        g = [torch.zeros_like(w[0]), torch.zeros_like(w[0])]
        if step >= split_from and len(w) == 1:
            w, m, v = w * 2, m * 2, v * 2
    return w[0], w[-1]


def turned(model, tensor):
    return tensor.mT if model.head_layout == "in_out" else tensor


def run(layout, groups, split_from, lanes):
    """A trained model and its engine; while tied, checks that the copies agree after every step."""
    model, engine = toy(groups, tied=layout)
    seen = []

    def check(step):
        seen.append(engine.tied)
        if engine.tied or seen[-2:] == [True, False]:
            assert torch.equal(model.embed, turned(model, model.head)), f"step {step}"
        if seen[-2:] == [True, False]:
            states = engine.capture(torch.device("cpu"))["states"]
            assert states["embed"]["step"] == states["head"]["step"] > 0
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(states["embed"][key], turned(model, states["head"][key]))
                assert states["head"][key].any()

    train(model, engine, range(STEPS), lanes=lanes, split_from=split_from, after=check)
    return model, engine, seen


CASES = [(layout, groups, split) for layout in ("out_in", "in_out") for groups in (TIED, TURNS) for split in (4, 5, 99)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A file: what is written out by hand, and the model that one process trains in each case."""
    truths = {(every, split): by_hand(every, split) for every in (1, 2) for split in (4, 5, 99)}
    singles = [run(layout, groups, split, 8)[0] for layout, groups, split in CASES]
    file = tmp_path_factory.mktemp("tied") / "expected.pt"
    torch.save((truths, singles), file)
    return file


def several(rank, processes, expected):
    truths, singles = torch.load(expected, weights_only=False)
    if processes > 1:
        join(rank, processes)
    for (layout, groups, split), single in zip(CASES, singles, strict=True):
        model, engine, seen = run(layout, groups, split, 1)
        every = groups[0].every
        assert seen.index(False) == (5 if every == 2 else split) if split < STEPS else all(seen)
        embed, head = truths[every, split]
        torch.testing.assert_close(model.embed.detach(), embed, rtol=0, atol=1e-9)
        torch.testing.assert_close(turned(model, model.head.detach()), head, rtol=0, atol=1e-9)
        assert differ(model, single) < 1e-9
        if processes > 1:
            assert all(part.sharded for part in engine.parts if part.group.role in ("head", "embed"))
            assert_same_bits(model)
    if processes > 1:
        dist.destroy_process_group()


def test_one_process(expected):
    several(0, 1, expected)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes(processes, expected):
    spawn(processes, several, expected)


def test_a_checkpoint_remembers_whether_they_are_tied():
    truth = run("in_out", TURNS, 5, 8)[0]
    for stop in (3, 4, 7):
        model, engine = toy(TURNS, tied="in_out")
        train(model, engine, range(stop), split_from=5)
        saved = engine.capture(torch.device("cpu"))
        other, fresh = toy(TURNS, tied="in_out")
        other.load_state_dict(model.state_dict())
        fresh.restore(saved)
        assert fresh.tied == (stop < 6)
        train(other, fresh, range(stop, STEPS), lanes=8, split_from=5)
        assert differ(other, truth) < 1e-12


def test_put_back_ties_again():
    model, engine = toy(TIED, tied="in_out")
    before, weights = engine.snapshot(), {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, engine, range(6), split_from=2)
    assert not engine.tied
    assert not torch.equal(model.embed, model.head.mT)
    model.load_state_dict(weights)
    engine.put_back(before)
    assert engine.tied
    train(model, engine, range(STEPS), split_from=5)
    assert differ(model, run("in_out", TIED, 5, 8)[0]) < 1e-12


def test_what_cannot_be_tied():
    other = (TIED[0], *TIED[1:3], replace(TIED[3], rule=AdamConfig()), TIED[4])
    with pytest.raises(ValueError, match=r"model.head_copy ties .* differ in rule, every or storage"):
        toy(other, tied="in_out")
    roles = Toy.ROLES
    try:
        Toy.ROLES = {**roles, "head": Role("scalar")}
        with pytest.raises(ValueError, match=r"exactly one parameter of role 'head', but there are 0"):
            toy(TIED, tied="in_out")
    finally:
        Toy.ROLES = roles


def test_shapes_that_do_not_fit():
    parameters = {"a": nn.Parameter(torch.zeros(5, 3)), "b": nn.Parameter(torch.zeros(5, 3))}
    parts = build_parts(parameters, {"a": Role("head"), "b": Role("embed")}, TIED, EXACT)
    with pytest.raises(ValueError, match=r"embedding of shape \(5, 3\) to a head of shape \(5, 3\): check model.head"):
        Tie(parts[1], parts[0], transposed=True)
