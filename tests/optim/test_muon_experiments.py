"""What Muon's options of modules of their own have in common: sharding, resuming, storage, compiling, refusals."""

import copy
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn
from toy import GROUPS, assert_same_bits, differ, join, spawn, toy, train

from nanosprint.config import GradientBasis, MomentumMixture, RadiusControl
from nanosprint.optim import Muon
from nanosprint.optim.mantissa import join as joined

STEPS, HALF = 12, 5
MIXTURE = MomentumMixture(count=3, shortest=0.5, longest=20.0, start=8.0, end=2.0)
OPTIONS = {
    "radius": {"radius": RadiusControl()},
    "basis": {"basis": GradientBasis(sides="both", refresh_every=3)},
    "mixture": {"mixture": MIXTURE},
    "all": {"radius": RadiusControl(outputs="columns"), "basis": GradientBasis(refresh_every=3), "mixture": MIXTURE},
}  # fmt: skip
F64 = torch.float64


def groups(name):
    return tuple(replace(g, rule=replace(g.rule, **OPTIONS[name])) if g.role == "matrix" else g for g in GROUPS)


def ages(step):
    return (("matrix", MIXTURE.age(step, STEPS)),)


def run(name, steps=range(STEPS), model_engine=None, **options):
    model, engine = model_engine or toy(groups(name))
    train(model, engine, steps, ages=ages if name in ("mixture", "all") else None, **options)
    return model, engine


def several(rank, processes, folder):
    expected = {name: run(name)[0] for name in OPTIONS}
    join(rank, processes)
    for name, truth in expected.items():
        model, engine = run(name, lanes=1)
        assert any(part.sharded for part in engine.parts if part.group.role == "matrix")
        assert differ(model, truth) < 1e-8, name
        assert_same_bits(model)
        saved = torch.load(folder / f"{name}.pt", weights_only=True)
        model, engine = toy(groups(name))
        model.load_state_dict(saved["model"])
        engine.restore(saved["engine"])
        run(name, range(HALF, STEPS), (model, engine), lanes=1)
        assert differ(model, truth) < 1e-8, name
    dist.destroy_process_group()


def test_two_processes_train_and_resume_as_one(tmp_path):
    plain = toy()
    train(*plain, range(STEPS))
    for name in OPTIONS:
        model, engine = run(name, range(HALF))
        saved = {"model": model.state_dict(), "engine": engine.capture(torch.device("cpu"))}
        torch.save(saved, tmp_path / f"{name}.pt")
        whole, _ = run(name)
        assert differ(whole, plain[0]) > 1e-3, name
        resumed, other = toy(groups(name))
        resumed.load_state_dict(saved["model"])
        other.restore(saved["engine"])
        run(name, range(HALF, STEPS), (resumed, other))
        assert differ(resumed, whole) == 0, name
    spawn(2, several, tmp_path)


@pytest.mark.parametrize("name", OPTIONS)
def test_lower_halves_are_those_of_fp32(name):
    """bf16 weights with 16 more bits end as fp32 weights with the same gradients do; bf16 alone would be 2^-9 off."""
    high = nn.Parameter(torch.randn(2, 8, 6).bfloat16())
    wide = nn.Parameter(high.detach().float())
    options = {"stacked": True, "orthogonalize_dtype": torch.float32, "lr": 0.01, "variance_beta": 0.9}
    options |= {"weight_decay": 1.0, "decay": "cautious", **OPTIONS[name]}
    narrow, twin = Muon([high], mantissa=True, **options), Muon([wide], **options)
    for _ in range(5):
        high.grad = torch.randn(2, 8, 6).bfloat16()
        wide.grad = high.grad.float()
        narrow.step()
        twin.step()
    exact = joined(high.detach(), narrow.state[high]["mantissa"])
    torch.testing.assert_close(exact, wide.detach(), rtol=1e-5, atol=1e-6)
    assert (exact - high.detach().float()).abs().max() > 1e-4


@pytest.mark.parametrize("name", OPTIONS)
def test_bf16_is_close_to_fp64(name):
    """Of matrices whose rotated side is the shorter one: of a longer side a few gradients say nothing in most
    directions, and rounding decides their order in the basis (0.08 of the step here, in fp32 as well)."""
    start, gradients = torch.randn(3, 48, 32).bfloat16(), torch.randn(4, 3, 48, 32).bfloat16()
    ends = []
    for dtype, working in ((torch.bfloat16, torch.bfloat16), (F64, F64)):
        p = nn.Parameter(start.to(dtype, copy=True))
        mantissa = dtype == torch.bfloat16
        options = {"orthogonalize_dtype": working, "mantissa": mantissa, **OPTIONS[name]}
        if "basis" in options:
            options["basis"] = replace(options["basis"], sides="columns")
        optimizer = Muon([p], lr=0.1, stacked=True, orthogonalizer="polar_express", **options)
        for g in gradients:
            p.grad = g.to(dtype)
            optimizer.step()
        ends.append((joined(p.detach(), optimizer.state[p]["mantissa"]) if mantissa else p.detach()).double())
    assert (ends[0] - ends[1]).norm() / (ends[1] - start.double()).norm() < 3e-2


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_step_equals_eager(name):
    torch._dynamo.reset()
    params = [nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 8))]
    twins = copy.deepcopy(params)
    options = {"stacked": True, "orthogonalize_dtype": torch.float32, "variance_beta": 0.9, **OPTIONS[name]}
    ours, theirs = Muon(params, **options), Muon(twins, **options)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(ours.step, backend=graphs)
    for _ in range(4):
        for p, q in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        theirs.step()
    assert graphs.frame_count >= 1
    if name == "radius":
        assert graphs.frame_count == 1
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_off_by_default():
    """What the engine gives Muon from a recipe that says nothing makes no state and no other step."""
    p = nn.Parameter(torch.randn(2, 4, 4))
    optimizer = Muon([p], stacked=True)
    assert [optimizer.param_groups[0][name] for name in ("mixture", "age", "basis", "radius")] == [None] * 4
    p.grad = torch.randn(2, 4, 4)
    optimizer.step()
    assert set(optimizer.state[p]) == {"exp_avg"}


class Spread(nn.Parameter):
    """What Muon takes for a DTensor."""

    device_mesh = "two processes"
    placements = ()


@pytest.mark.parametrize("name", ["radius", "basis", "mixture"])
def test_refusals(name):
    p = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match=rf"{name}=\{{\}} must be a nanosprint\.config\..*, or None"):
        Muon(p, **{name: {}})
    with pytest.raises(ValueError, match=rf"{name} needs whole matrices.*shape \(2, 2\) is a DTensor"):
        Muon([Spread(torch.ones(2, 2))], **OPTIONS[name])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"radius": RadiusControl(floor=-0.1)}, r"radius\.floor=-0\.1: it must be 0"),
        ({"radius": RadiusControl(outward=1.5)}, r"radius\.outward=1\.5: it must be between 0 and 1"),
        ({"basis": GradientBasis(beta=1.0)}, r"basis\.beta=1\.0: it must be at least 0 and below 1"),
        ({"basis": GradientBasis(refresh_every=0)}, r"basis\.refresh_every=0: it must be at least 1"),
        ({"mixture": MomentumMixture(count=1)}, r"mixture\.count=1: it must be between 2"),
        ({"mixture": MomentumMixture(shortest=0.0)}, r"mixture\.shortest=0\.0: it must be above 0"),
        ({"mixture": MomentumMixture(start=200.0)}, r"mixture\.start=200\.0: it must be above .* below longest=100\.0"),
        ({"mixture": MomentumMixture(end=0.5)}, r"mixture\.end=0\.5: it must be above shortest=1\.0"),
    ],
)
def test_numbers_that_cannot_work(option, message):
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(2, 2))], **option)
