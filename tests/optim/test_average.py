"""The average of the weights and its blend: an explicit loop, exact lower halves, ties, and any number of processes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from toy import ADAM, GROUPS, assert_same_bits, differ, join, spawn, toy, train

from nanosprint.config import ParamGroup, TailAverage
from nanosprint.optim.mantissa import exact

STEPS, HALF = 12, 9  # at half time the average has moved twice
AVERAGE = TailAverage(share=0.7, horizon=0.3, stride=2, blend=0.4, blends=(0.0, 1.0))
NARROW = tuple(replace(g, storage="bf16+16" if g.role == "matrix" else "bf16") for g in GROUPS if g.role != "soap")
NARROW = (*NARROW[:-1], GROUPS[2], GROUPS[-1])  # SOAP and the scalars in fp32


def run(groups=GROUPS, average=AVERAGE, steps=range(STEPS), **options):
    """A model and its engine after `steps` of a run of STEPS."""
    built = {name: options.pop(name) for name in ("dtype", "tied") if name in options}
    model, engine = toy(groups, average=average, **built)
    train(model, engine, steps, average=average, num_steps=STEPS, **options)
    return model, engine


def masters(engine):
    """By part and tensor: the exact weights."""
    pairs = ((p, part) for part in engine.parts for group in part.optimizer.param_groups for p in group["params"])
    return [(part.group.role, exact(p, part.optimizer.state[p]).double()) for p, part in pairs]


def expected(groups, dtype, average=AVERAGE, **options):
    """The blend of a run without an average, written out: (role, weights) of each part's tensors."""
    model, engine = toy(groups, dtype=dtype, **options)
    history = []
    train(model, engine, range(STEPS), after=lambda _: history.append(masters(engine)))
    result = []
    for i, (role, last) in enumerate(history[-1]):
        mean = None
        for step in range(STEPS):
            weights, done = history[step][i][1], step + 1
            if done == STEPS - 8:  # 0.7 x 12 = 8.4: four strides of 2
                mean = weights.clone()
            elif done > STEPS - 8 and done % 2 == 0:
                kept = torch.tensor(-2 / (0.3 * STEPS), dtype=torch.float64).exp()
                mean = kept * mean + (1 - kept) * weights
        share = 0.0 if role in average.exclude else average.blend
        result.append((role, (1 - share) * last + share * mean))
    return result


@pytest.mark.parametrize(
    ("groups", "dtype", "tolerance"), [(GROUPS, torch.float64, 1e-13), (NARROW, torch.float32, 1e-6)]
)
def test_against_an_explicit_loop(groups, dtype, tolerance):
    """In the second case lower halves enter and leave exactly; what is stored in bf16 alone is rounded."""
    _, engine = run(groups, dtype=dtype)
    rounded = {g.role for g in groups if g.storage == "bf16" and dtype == torch.float32}
    for (role, ours), (_, theirs) in zip(masters(engine), expected(groups, dtype), strict=True):
        bound = 2**-8 if role in rounded else tolerance
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=tolerance, msg=role)


def test_blend_0_and_what_is_excluded_stay():
    plain, _ = run(average=None)
    nothing, _ = run(average=replace(AVERAGE, blend=0.0))
    assert differ(nothing, plain) == 0
    some, engine = run(average=replace(AVERAGE, exclude=("embed", "matrix")))
    moved = {name for name, p in some.named_parameters() if not torch.equal(p, plain.get_parameter(name))}
    assert moved == {"head", "up", "mid", "down", "gain", "scale"}
    keys = {part.group.role: "average" in next(iter(part.optimizer.state.values())) for part in engine.parts}
    assert [role for role, has in keys.items() if not has] == ["matrix", "embed"]


def test_other_blends_afterwards():
    """From the last step's weights each time and back to the same bits, but not after a return to an earlier state."""
    model, engine = run(NARROW, dtype=torch.float32)
    chosen = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = masters(engine)
    plain, plain_engine = run(NARROW, average=None, dtype=torch.float32)
    engine.blend(0.0)
    assert differ(model, plain) == 0
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(masters(engine), masters(plain_engine), strict=True))
    engine.blend(1.0)
    averages = [s["average"] for part in engine.parts for s in part.state() if "average" in s]
    found = [weights for role, weights in masters(engine) if role == "matrix"]
    assert any(torch.equal(found[0], a.double()) for a in averages)
    engine.blend(AVERAGE.blend)
    assert all(torch.equal(p, chosen[name]) for name, p in model.named_parameters())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(masters(engine), before, strict=True))
    assert engine.can_blend
    engine.put_back(engine.snapshot())
    assert not engine.can_blend
    assert not run(average=replace(AVERAGE, blends=()))[1].can_blend


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_a_tied_embedding_follows_the_head(layout):
    pair = {"rule": ADAM, "lr": 0.02}
    tied = (ParamGroup(role="head", **pair), *GROUPS[1:3], ParamGroup(role="embed", **pair), GROUPS[4])
    for exclude in (("embed",), ()):
        model, _ = run(tied, replace(AVERAGE, exclude=exclude), tied=layout)
        plain, _ = run(tied, None, tied=layout)
        assert torch.equal(model.embed, model.head.mT if layout == "in_out" else model.head)
        assert not torch.equal(model.head, plain.head)


def test_a_part_that_has_not_moved_yet_has_no_average():
    """With a turn longer than the run its weights and gradients are as without an average."""
    groups = (replace(GROUPS[0], every=2 * STEPS), *GROUPS[1:])
    model, engine = run(groups)
    assert torch.equal(model.head, toy(groups)[0].head)
    head = next(part for part in engine.parts if part.group.role == "head")
    assert not head.optimizer.state
    assert not torch.equal(model.proj, run(groups, None)[0].proj)


def several(rank, processes, folder):
    expected_model, _ = run()
    join(rank, processes)
    model, engine = run(lanes=1)
    assert any(part.sharded for part in engine.parts)
    assert differ(model, expected_model) < 1e-9
    assert_same_bits(model)
    engine.blend(0.0)
    engine.blend(AVERAGE.blend)  # also where a process owns nothing of a bank
    assert differ(model, expected_model) < 1e-9
    saved = torch.load(folder / "1.pt", weights_only=True)
    model, engine = toy(average=AVERAGE)
    model.load_state_dict(saved["model"])
    engine.restore(saved["engine"])
    train(model, engine, range(HALF, STEPS), lanes=1, average=AVERAGE, num_steps=STEPS)
    assert differ(model, expected_model) < 1e-9
    model, engine = run(steps=range(HALF), lanes=1)
    captured = engine.capture(torch.device("cpu") if rank == 0 else None)
    if rank == 0:
        torch.save({"model": model.state_dict(), "engine": captured}, folder / f"{processes}.pt")
    dist.destroy_process_group()


def test_two_processes_average_and_resume_as_one(tmp_path):
    whole, _ = run()
    model, engine = run(steps=range(HALF))
    torch.save({"model": model.state_dict(), "engine": engine.capture(torch.device("cpu"))}, tmp_path / "1.pt")
    spawn(2, several, tmp_path)
    for name in ("1.pt", "2.pt"):
        saved = torch.load(tmp_path / name, weights_only=True)
        assert saved["engine"]["states"]["qkv"]["average"].shape == model.qkv.shape
        model, engine = toy(average=AVERAGE)
        model.load_state_dict(saved["model"])
        engine.restore(saved["engine"])
        train(model, engine, range(HALF, STEPS), average=AVERAGE, num_steps=STEPS)
        assert differ(model, whole) < 1e-9
        if name == "1.pt":
            assert differ(model, whole) == 0
