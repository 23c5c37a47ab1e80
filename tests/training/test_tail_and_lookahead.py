"""Averages and look-ahead in whole runs: what is validated and saved, resumed, and left alone."""

from dataclasses import replace

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.training import setup, warmup
from nanosprint.training.api import carry_out
from nanosprint.training.batch import random_input
from nanosprint.training.request import load_request, save_request
from nanosprint.training.setup import build_state
from nanosprint.training.step import backward_of, train_step
from tests.training.test_warmup import equal

AVERAGE = 'schedule.average={"share": 0.5, "horizon": 0.3, "stride": 2, "blend": 0.5, "blends": [0.0, 1.0]}'


def blends(path):
    lines = RunDir(path).read_metrics()
    return {line["blend"]: line["loss"] for line in lines if line.get("name") == "blend"}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_ends_in_the_blend(train_tiny, weights):
    """Its loss and its checkpoint are the blend's, and the others are told beside them; their loss is what they say."""
    plain, path = train_tiny("plain"), train_tiny("run", AVERAGE)
    last, blended, found = weights(plain), weights(path), blends(path)
    assert list(found) == [0.0, 1.0]
    assert found[0.0] == RunRecord.load(plain).val_loss
    assert RunRecord.load(path).val_loss not in (found[0.0], found[1.0])
    full = train_tiny("full", AVERAGE.replace('"blend": 0.5', '"blend": 1.0').replace("[0.0, 1.0]", "[]"))
    assert found[1.0] == RunRecord.load(full).val_loss
    assert blends(full) == {}
    assert torch.equal(blended["embed.weight"], last["embed.weight"])
    for name, value in weights(full).items():
        torch.testing.assert_close(blended[name], (last[name] + value) / 2, rtol=1e-5, atol=1e-6)
    assert not torch.equal(blended["head.weight"], last["head.weight"])


@pytest.mark.parametrize("stop", [8, 13, 20])  # before the average begins, while it moves, after the blend
def test_a_resumed_run_is_the_whole_run(train_tiny, weights, stop):
    whole, path = train_tiny("whole", AVERAGE), train_tiny("parts", AVERAGE, max_steps=stop)
    (path / "record.json").unlink()
    request = replace(load_request(RunDir(path)), max_steps=None)
    save_request(RunDir(path), request)
    before = blends(path)
    carry_out(request, RunDir(path), resume=True)
    assert same(weights(path), weights(whole))
    assert RunRecord.load(path).val_loss == RunRecord.load(whole).val_loss
    assert blends(path) == blends(whole)
    assert (len(before) > 0) == (stop == 20)
    said = [line["message"] for line in RunDir(path).read_metrics() if line.get("name") == "notice"]
    assert any("the weights of the last step are gone" in message for message in said) == (stop == 20)


def test_an_early_end_has_no_blend(train_tiny, weights):
    assert same(weights(train_tiny("run", AVERAGE, max_steps=15)), weights(train_tiny("plain", max_steps=15)))


def test_warm_up_visits_it_and_leaves_no_trace(train_tiny, weights, monkeypatch):
    recipe = load_recipe("tiny", [AVERAGE])
    visited = [plan.step for plan in warmup.training_visits(recipe, Execution(compile="off"))]
    assert visited == [0, 9, 11, 19]  # plain, begun, moved, blended
    with_it = weights(train_tiny("with", AVERAGE))
    monkeypatch.setattr(setup, "warm_up", lambda *_, **__: None)
    assert same(with_it, weights(train_tiny("without", AVERAGE)))


def test_warm_up_puts_everything_back():
    recipe, execution = load_recipe("tiny", [AVERAGE]), fixed()
    state = build_state(recipe, execution, 0, torch.device("cpu"))
    before = state.snapshot()
    warmup.warm_up(state, state.model.loss_sum, recipe, execution)
    assert equal(state.snapshot(), before)
    assert not state.engine.can_blend


def test_fp8_copies_are_those_of_the_blend():
    recipe, execution = load_recipe("tiny", [AVERAGE, "precision.fp8_projections={}"]), fixed()
    state = build_state(recipe, execution, 0, torch.device("cpu"))
    for step in range(recipe.train.num_steps):
        plan = recipe.plan(step)
        rows = plan.batch_tokens // plan.seq_len
        train_step(
            backward_of(state.model.loss_sum),
            state,
            [random_input(recipe, plan, rows, torch.device("cpu"), None)],
            plan,
            recipe.train,
        )
    copies = {name: value.clone() for name, value in state.model.state_dict().items() if "codes" in name}
    state.model.refresh(
        recipe.train.num_steps
    )  # their scales are of the present weights: a second time changes nothing
    assert copies
    assert all(torch.equal(state.model.state_dict()[name], value) for name, value in copies.items())
    state.engine.blend(0.0)
    state.model.refresh(recipe.train.num_steps)
    assert not all(torch.equal(state.model.state_dict()[name], value) for name, value in copies.items())


def fixed():
    return Execution(
        device="cpu", compute="fp32", attention="reference", compile="off", tokens_per_microbatch=512,
        parts_per_microbatch=1,
    )  # fmt: skip


def test_two_processes_end_like_one(train_tiny, weights, nanosprint, tmp_path, tiny_data):
    words = (AVERAGE, "precision.compute=fp64", "precision.orthogonalize=fp64", "eval.tokens=1000")
    one = train_tiny("one", *words)
    out = ("--device", "cpu", "--data", tiny_data, "--out", tmp_path / "two", "--gpus", 2)
    result = nanosprint("train", "tiny", *words, *out)
    assert result.returncode == 0, result.stderr
    two = weights(tmp_path / "two")
    for name, value in weights(one).items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-9)
    assert blends(tmp_path / "two") == pytest.approx(blends(one), abs=1e-9)


def test_warm_up_visits_where_gradients_are_taken_ahead():
    """That it leaves no trace, and the rest, is asked of all of Muon's options in `test_muon_options_in_a_run`."""
    recipe = load_recipe("tiny", ('groups.0.rule.lookahead={"decay": 0.8}', "train.checkpoint_every=9"))
    visited = [plan.step for plan in warmup.training_visits(recipe, Execution(compile="off"))]
    assert visited == [0, 2, 13]  # plain, ahead, for the last time
