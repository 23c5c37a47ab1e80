"""A start-up ahead of its run: the run finds choices and graphs, and is what it would be without."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.data.lock import try_lock
from nanosprint.recipes import load_recipe
from nanosprint.training import ahead as module
from nanosprint.training import precompile, setup
from nanosprint.training.ahead import Ahead
from nanosprint.training.api import carry_out
from nanosprint.training.request import Budget, RunRequest, start_run
from nanosprint.training.reuse import Kept


def asked(data, seed=1, budget=None, **execution):
    recipe = load_recipe("tiny", {"train.num_steps": 4, "eval.batch_tokens": 2048})  # all validation in one call
    return RunRequest(
        recipe=recipe, execution=Execution(device="cpu", **execution), seed=seed, data=str(data), budget=budget
    )


def prepared(request):
    kept = Kept()
    ahead = Ahead(request, kept)
    for step in (ahead.choose, ahead.compile, ahead.warm_up):
        step()
    return kept


def test_a_run_is_what_it_would_be_and_compiles_nothing(tmp_path, tiny_data, monkeypatch, weights):
    """Its budget is fitted in its turn, and the next seed's run goes on with the recipe that came out."""
    made = []
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=lambda graph, _: made.append(graph) or graph))
    monkeypatch.setattr(setup, "measure_step_ms", lambda *_, **__: 100.0)
    request = asked(tiny_data, budget=Budget(amount=0.7, unit="seconds"), compile="default")
    kept = prepared(request)
    count = len(made)
    assert count > 0
    run = start_run(request, tmp_path / "prepared")
    record = carry_out(request, run, kept=kept)
    assert (record.steps, record.shared_graphs, record.clock_graphs) == (7, True, 0)
    fitted = replace(request, recipe=request.recipe.with_num_steps(7), budget=None, seed=2)
    other = carry_out(fitted, start_run(fitted, tmp_path / "next"), kept=kept)
    assert (other.steps, other.shared_graphs) == (7, True)
    assert len(made) == count
    torch._dynamo.reset()
    alone = carry_out(request, start_run(request, tmp_path / "alone"))
    assert alone.val_loss == record.val_loss
    one, two = weights(tmp_path / "alone"), weights(run.path)
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_what_was_found_to_fit_is_what_the_run_has(tmp_path, tiny_data, monkeypatch):
    tried = []
    real = setup.warm_up

    def warm_up(state, loss_sum, recipe, execution, backward):
        tried.append(execution.tokens_per_microbatch)
        if execution.tokens_per_microbatch > 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(state, loss_sum, recipe, execution, backward)

    monkeypatch.setattr(setup, "warm_up", warm_up)
    request = asked(tiny_data)
    kept = prepared(request)
    assert tried[0] > 128 >= tried[-1]
    tried.clear()
    record = carry_out(request, start_run(request, tmp_path / "run"), kept=kept)
    assert record.execution["tokens_per_microbatch"] == tried[0] <= 128
    assert len(tried) == 1


def test_a_step_that_fails_leaves_nothing(tiny_data, monkeypatch):
    kept, request = Kept(), asked(tiny_data)
    ahead = Ahead(request, kept)
    ahead.choose()

    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(setup, "build_state", short)
    with pytest.raises(torch.OutOfMemoryError):
        ahead.warm_up()
    assert kept.settled(request) is None


def test_graphs_are_compiled_as_was_chosen_and_once(tiny_data, tmp_path, monkeypatch):
    """The second run differs in nothing that graphs know: it finds that they are there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    started = []

    class Compilers:
        def __init__(self, request, count):
            started.append((request.execution, count))
            self.mark = precompile._mark_of(request)

        def wait(self):
            assert try_lock(self.mark.with_suffix(".lock")) is None  # others wait
            self.mark.touch()

        def stop(self):
            started.append("stopped")

    monkeypatch.setattr(precompile, "Compilers", Compilers)
    monkeypatch.setattr(module, "load_compiler", lambda: type("Loading", (), {"join": lambda _: None})())
    request = asked(tiny_data, compile="default", compilers=2)
    for seed in (1, 2):
        ahead = Ahead(replace(request, seed=seed), Kept())
        ahead.choose()
        ahead.compile()
    assert len(started) == 2
    (execution, count), _ = started
    assert count == 2
    assert "auto" not in (execution.attention, execution.tokens_per_microbatch, execution.compute)
