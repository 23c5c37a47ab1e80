"""What the warm-up visits, that it visits all that training will meet, and that it leaves no trace."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.training import setup, warmup
from nanosprint.training.api import train
from nanosprint.training.setup import build_state
from nanosprint.training.warmup import first_of_each, graph_of, training_visits, validation_visits
from tests.recipes.test_ladder import small
from tests.training.test_batch import STAGED

COMPILED = {"compile": "default", "tokens_per_microbatch": 1 << 20, "parts_per_microbatch": 1}
AS_DATA, BAKED, EAGER = (
    Execution(**{**COMPILED, **choice}) for choice in ({"attention": "fa2"}, {"attention": "sdpa"}, {"compile": "off"})
)


def graphs(plans, execution):
    return len({graph_of(plan, execution) for plan in plans})


@pytest.mark.parametrize(("name", "borders"), [("record", (423, 847)), ("record-third", (102, 204))])
def test_the_record_needs_a_graph_for_each_batch_and_one_for_validation(name, borders):
    """At each border both turns of Adam; at the second the split, too, and two steps later the first updates apart."""
    recipe, (second, third) = load_recipe(name), borders
    visits = training_visits(recipe, AS_DATA)
    assert graphs(visits, AS_DATA) == 3
    assert graphs(map(recipe.plan, range(recipe.train.num_steps)), AS_DATA) == 3
    assert len(validation_visits(recipe, AS_DATA)) == 1
    steps = [plan.step for plan in visits]
    split = third // 2 * 2 + 1
    assert steps == sorted({0, 1, second, second + 1, *range(third, split + 4)})
    assert [plan.step for plan in training_visits(recipe, EAGER)] == steps


def test_graphs_of_other_recipes():
    """Windows that move make graphs where they are constants; groups that all move at once are visited once."""
    for name, windows in (("longwindow", 27), ("sub3", 14)):
        recipe = load_recipe(name)
        plans = [recipe.plan(step) for step in range(recipe.train.num_steps)]
        assert graphs(training_visits(recipe, BAKED), BAKED) == windows == graphs(plans, BAKED)
        assert graphs(training_visits(recipe, AS_DATA), AS_DATA) == 1
    assert [plan.step for plan in training_visits(load_recipe("gpt2"), BAKED)] == [0]


def test_a_graph_for_every_stage_and_for_no_more():
    """18 scheduled steps in thirds, the extension with another window; in the second the prefix loss goes out."""
    recipe = load_recipe("tiny", STAGED)
    assert [plan.step for plan in training_visits(recipe, BAKED)] == [0, 6, 12, 18]
    assert [plan.step for plan in training_visits(recipe, AS_DATA)] == [0, 6, 12]
    every = replace(recipe, eval=replace(recipe.eval, every=5, at_start=True))
    assert every.validation_steps == [0, 5, 10, 15, 20]
    assert [plan.windows.long for plan in validation_visits(every, BAKED)] == [8, 16, 32, 64]
    assert [plan.step for plan in validation_visits(every, AS_DATA)] == [0]


def test_the_first_of_each_kind():
    plans = [load_recipe("tiny").plan(step) for step in range(6)]
    assert [plan.step for plan in first_of_each(plans, lambda plan: plan.step % 4 // 2)] == [0, 2]


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def record(**more):
    return load_recipe("record", small("record", **{"train.num_steps": 12, "precision.fp8_mlp": "{}", **more}))


@pytest.fixture
def execution():
    return Execution(
        device="cpu", compute="fp32", attention="reference", compile="off", tokens_per_microbatch=512,
        parts_per_microbatch=1,
    )  # fmt: skip


def test_all_kinds_of_update_are_visited_and_put_back(execution, monkeypatch):
    """Adam moves and waits, at first tied, then apart; afterwards moments, counters and gradients are as before."""
    state = build_state(record(), execution, 0, torch.device("cpu"))
    real, seen = warmup.train_step, []

    def step(loss_sum, state, batches, plan, train):
        before = state.engine.tied
        loss = real(loss_sum, state, batches, plan, train)
        moved = [part.group.role for part in state.engine.parts if part.due(plan)]
        seen.append((plan.batch_tokens, "head" in moved, before, state.engine.tied))
        return loss

    monkeypatch.setattr(warmup, "train_step", step)
    before = state.snapshot()
    warmup.warm_up(state, state.model.loss_sum, record(), execution)
    assert equal(state.snapshot(), before)
    assert state.engine.tied
    assert seen == [
        (336, False, True, True),
        (336, True, True, True),
        (680, False, True, True),
        (680, True, True, True),
        (1024, False, True, True),
        (1024, True, True, False),
        (1024, False, False, False),
        (1024, True, False, False),
    ]


@pytest.mark.parametrize("name", ["paired", "record"])
def test_warming_up_changes_no_bit_of_a_run_with_a_split(name, tmp_path, tiny_data, weights, monkeypatch):
    recipe = load_recipe(name, small(name, **{"train.num_steps": 12}))
    train(recipe, out=tmp_path / "with", data=tiny_data, execution={"device": "cpu"})
    monkeypatch.setattr(setup, "warm_up", lambda *_: None)
    train(recipe, out=tmp_path / "without", data=tiny_data, execution={"device": "cpu"})
    with_it, without = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_nothing_is_compiled_after_the_warm_up(tmp_path, tiny_data, monkeypatch):
    """A whole run of the record at reduced size, with windows and scale that change: three graphs and one.

    A micro-batch of the first stage has two rows, those of the others one.
    """
    made, at_start = [], []

    def count(graph_module, inputs):
        made.append(graph_module)
        return graph_module

    def warm_up(*arguments):
        warmup.warm_up(*arguments)
        at_start.append(len(made))

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    monkeypatch.setattr(setup, "warm_up", warm_up)
    size = {"train.lanes": 2, "train.batch_tokens": 256, "model.num_layers": 3}
    recipe = record(**size, **{"eval.every": 3, "eval.at_start": True, "eval.tokens": 512, "eval.batch_tokens": 128})
    execution = {"device": "cpu", "compile": "default", "attention": "reference", "tokens_per_microbatch": 128}
    train(recipe, out=tmp_path / "run", data=tiny_data, execution=execution)
    assert RunRecord.load(tmp_path / "run").status == "finished"
    assert at_start == [len(made)] == [4]
