"""Looking ahead along the drift: the published form, written around an engine that knows nothing of it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from toy import GROUPS, assert_same_bits, differ, join, spawn, toy, train

from nanosprint.config.schedule import Ahead
from nanosprint.optim import Muon
from nanosprint.optim.lookahead import step_ahead
from nanosprint.optim.mantissa import exact

STEPS, FIRST, LAST, HALF, KEPT = 12, 3, 8, 6, 0.7  # looks ahead at steps FIRST to LAST
LOOKING = ("qkv", "proj", "out")
TURNS = tuple(replace(g, every=2) if g.role == "matrix" else g for g in GROUPS)


def lead(step):
    return 0.8 * (1 - step / 40) if FIRST <= step <= LAST else 0.0


def ahead(step, every=1):
    return (("matrix", Ahead(lead(step), lead(step + every), KEPT)),) if FIRST <= step <= LAST else ()


def run(groups=GROUPS, steps=range(STEPS), model_engine=None, every=1, **options):
    model, engine = model_engine or toy(groups)
    train(model, engine, steps, ahead=lambda step: ahead(step, every), **options)
    return model, engine


def published(groups, every=1):
    """Weights are moved before the first forward pass of a turn and the step is taken from there."""
    model, engine = toy(groups)
    weights = [model.get_parameter(name) for name in LOOKING]
    drifts, before = [torch.zeros_like(w) for w in weights], None
    for step in range(STEPS):
        if step % every == 0:
            before = [w.detach().clone() for w in weights]
        if step % every == 0 and FIRST <= step + every - 1 <= LAST:
            for w, d in zip(weights, drifts, strict=True):
                w.data.add_(d, alpha=lead(step + every - 1))
        train(model, engine, [step])
        if step % every == every - 1 and FIRST <= step <= LAST:
            for w, b, d in zip(weights, before, drifts, strict=True):
                d.copy_(KEPT * d + (1 - KEPT) * (w.detach() - b))
    return model


@pytest.mark.parametrize(("groups", "every"), [(GROUPS, 1), (TURNS, 2)])
def test_the_published_form(groups, every):
    model, engine = run(groups, every=every)
    truth = published(groups, every)
    assert differ(model, truth) < 1e-11
    plain, other = toy(groups)
    train(plain, other, range(STEPS))
    assert differ(model, plain) > 1e-3
    assert not any("drift" in state for part in engine.parts for state in part.state())  # it is over


def test_weights_stand_ahead_in_between_and_no_longer_after_the_last():
    """What is left when it ends is the position itself: a step whose plan says no more moves by its own step only."""
    _, engine = run(steps=range(HALF))
    bank = next(part.bank for part in engine.parts if part.group.role == "matrix")
    state = next(part.state()[0] for part in engine.parts if part.group.role == "matrix")
    drift, weights = state["drift"], bank.owned(bank.data, 0).clone()
    other, twin = toy()
    train(other, twin, range(HALF), ahead=lambda step: ahead(step) if step < HALF - 1 else end(step))
    twin_bank = next(part.bank for part in twin.parts if part.group.role == "matrix")
    position = twin_bank.owned(twin_bank.data, 0)
    torch.testing.assert_close(weights - position, lead(HALF) * drift, rtol=1e-9, atol=1e-12)
    assert drift.any()


def end(step):
    return (("matrix", Ahead(lead(step), 0.0, KEPT)),)


def test_lower_halves_take_the_move_exactly():
    """The exact weights are those of fp32 parameters with the same gradients; bf16 alone would be 2^-9 off."""
    high = torch.nn.Parameter(torch.randn(2, 8, 6).bfloat16())
    wide = torch.nn.Parameter(high.detach().float())
    options = {"stacked": True, "orthogonalize_dtype": torch.float32, "lr": 0.01}
    narrow, twin = Muon([high], mantissa=True, **options), Muon([wide], **options)
    for step in range(FIRST, LAST + 1):
        high.grad = torch.randn(2, 8, 6).bfloat16()
        wide.grad = high.grad.float()
        for optimizer in (narrow, twin):
            step_ahead(optimizer, ahead(step)[0][1])
        assert narrow.state[high]["mantissa"].any()
        torch.testing.assert_close(exact(high, narrow.state[high]), wide.detach(), rtol=1e-5, atol=1e-6)
    assert "drift" not in narrow.state[high]


def several(rank, processes, folder):
    expected, _ = run()
    join(rank, processes)
    model, engine = run(lanes=1)
    assert any(part.sharded for part in engine.parts if part.group.role == "matrix")
    assert differ(model, expected) < 1e-9
    assert_same_bits(model)
    saved = torch.load(folder / "1.pt", weights_only=True)
    model, engine = toy()
    model.load_state_dict(saved["model"])
    engine.restore(saved["engine"])
    run(steps=range(HALF, STEPS), model_engine=(model, engine), lanes=1)
    assert differ(model, expected) < 1e-9
    dist.destroy_process_group()


def test_two_processes_look_ahead_and_resume_as_one(tmp_path):
    model, engine = run(steps=range(HALF))
    saved = {"model": model.state_dict(), "engine": engine.capture(torch.device("cpu"))}
    assert saved["engine"]["states"]["qkv"]["drift"].any()
    torch.save(saved, tmp_path / "1.pt")
    spawn(2, several, tmp_path)
