"""Stored graphs: their names, that a found one computes the same untraced, and what is said of bad files."""

import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from nanosprint.config import Execution
from nanosprint.config.edit import to_dict
from nanosprint.model import gpt
from nanosprint.ops.embedding import sort_rows
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import kind_of, random_input
from nanosprint.training.setup import build_loss_sum, build_state, compiled
from nanosprint.training.stored import GraphStore, StoredLossSum, converter
from tests.recipes.test_ladder import small

CPU = torch.device("cpu")
EXECUTION = Execution(
    device="cpu", compute="fp32", attention="sdpa", compile="default", fp8="off", activation_budget=1.0, threads=1
)
SMALL = small("gpt2", **{"model.num_layers": 1, "model.dim": 32, "model.num_heads": 2, "model.vocab_size": 64})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield tmp_path
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def recipe_of(**overrides):
    return load_recipe("gpt2", {**SMALL, **overrides})


def model_of(recipe, execution=EXECUTION, seed=1):
    return build_state(recipe, execution, seed, CPU).model


def inputs_of(recipe, rows=2, execution=EXECUTION):
    inputs = random_input(recipe, recipe.plan(0), rows, CPU)
    return inputs._replace(context=converter(execution)(inputs.context))


@pytest.mark.parametrize("sort", [False, True])
def test_a_stored_graph_is_found_by_another_model_and_is_not_traced(sort, monkeypatch):
    """With other weights, and both directions against autograd without a compiler.

    Where look-ups are sorted, as on a GPU, the graph adds to the gradient of the other model's table.
    """
    if sort:
        monkeypatch.setattr(gpt, "rows_of", sort_rows)
    recipe = recipe_of()
    model = model_of(recipe)
    compiled(model, EXECUTION)  # its settings are in the name
    inputs = inputs_of(recipe)
    GraphStore(model, recipe, EXECUTION).save(inputs)
    other = model_of(recipe, seed=2)
    loss_sum, traced = build_loss_sum(other, recipe, EXECUTION), counters["stats"]["unique_graphs"]
    loss = loss_sum(*inputs)
    (loss / 64).backward()
    assert [(first.stored, first.trained, first.tokens) for first in loss_sum.first_calls] == [(True, True, 64)]
    assert counters["stats"]["unique_graphs"] == traced
    gradients = {name: parameter.grad.clone() for name, parameter in other.named_parameters()}
    other.zero_grad(set_to_none=False)
    expected = other.loss_sum(*inputs)
    (expected / 64).backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad():
        assert GraphStore(other, recipe, EXECUTION).load(inputs) is None  # that one has no gradients


def test_names_tell_apart_what_graphs_depend_on():
    def path(recipe, execution=EXECUTION, rows=2, trained=True):
        model = model_of(recipe, execution)
        with torch.set_grad_enabled(trained):
            return GraphStore(model, recipe, execution).path(inputs_of(recipe, rows, execution)).name

    recipe = recipe_of()
    longer = {"train.num_steps": 60, "schedule.lr.floor": 0.1}
    assert path(recipe) == path(recipe_of(**longer)) == path(recipe, replace(EXECUTION, compilers=3))
    names = [
        path(recipe),
        path(recipe, rows=3),
        path(recipe, trained=False),
        path(recipe, replace(EXECUTION, attention="reference")),
        path(recipe, replace(EXECUTION, compute="bf16")),
        path(recipe, replace(EXECUTION, activation_budget=0.5)),
        path(recipe_of(**{"precision.compute": "fp64"})),
        path(recipe_of(**{"model.qk_norm": True})),
        path(recipe_of(**{"train.objective": "lane_mean"})),
    ]
    with torch._inductor.config.patch(max_autotune=True):
        names.append(path(recipe))
    with torch.no_grad():
        model = model_of(recipe)
        model.head.requires_grad_(False)
        model.embed.requires_grad_(False)
        names.append(GraphStore(model, recipe, EXECUTION).path(inputs_of(recipe)).name)
    assert len(set(names)) == len(names)


def test_another_process_gives_the_same_name():
    recipe = recipe_of()
    model = model_of(recipe)
    compiled(model, EXECUTION)
    name = GraphStore(model, recipe, EXECUTION).path(inputs_of(recipe)).name
    code = """
import json, sys, torch
from nanosprint.config.edit import from_dict
from nanosprint.config.recipe import Execution, Recipe
from nanosprint.training.setup import build_state, compiled, set_threads
from nanosprint.training.distributed import World
from nanosprint.training.stored import GraphStore
from tests.training.test_stored import inputs_of
recipe, execution = json.load(sys.stdin)
recipe, execution = from_dict(Recipe, recipe), from_dict(Execution, execution)
set_threads(execution, World(0, 1, torch.device("cpu")))
model = build_state(recipe, execution, None, torch.device("cpu")).model
compiled(model, execution)
print(GraphStore(model, recipe, execution).path(inputs_of(recipe)).name)
"""
    given = json.dumps([to_dict(recipe), to_dict(EXECUTION)])
    said = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == name


def test_a_file_that_cannot_be_used_is_told_and_the_graph_compiled(caplog):
    recipe = recipe_of()
    model, inputs = model_of(recipe), inputs_of(recipe)
    store = GraphStore(model, recipe, EXECUTION)
    store.path(inputs).parent.mkdir()
    store.path(inputs).write_bytes(b"no graph")
    loss_sum = StoredLossSum(store, model, EXECUTION, model.loss_sum)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(loss_sum(*inputs), model.loss_sum(*inputs))
        loss_sum(*inputs)
    assert caplog.text.count("cannot be used") == 1
    assert [first.stored for first in loss_sum.first_calls] == [False]


def test_each_shape_has_a_first_call_and_one_only(monkeypatch):
    recipe = recipe_of()
    model = model_of(recipe)
    loss_sum = StoredLossSum(GraphStore(model, recipe, EXECUTION), model, EXECUTION, model.loss_sum)
    for rows in (2, 3, 2):
        loss_sum(*inputs_of(recipe, rows))
    with torch.no_grad():
        loss_sum(*inputs_of(recipe, 2))
    assert [(first.tokens, first.trained) for first in loss_sum.first_calls] == [(64, True), (96, True), (64, False)]


def test_documents_and_limits_are_part_of_a_kind():
    recipe = load_recipe("sub3", small("sub3"))
    inputs = random_input(recipe, recipe.plan(0), 2, CPU)
    assert inputs.context.documents is not None
    kinds = {kind_of(inputs._replace(context=change)) for change in (
        inputs.context.with_data(),
        inputs.context.with_ints(),
        inputs.context._replace(long=7).with_ints(),
        inputs.context._replace(documents=None).with_data(),
    )}  # fmt: skip
    assert len(kinds) == 4
    assert kind_of(inputs._replace(context=inputs.context._replace(long=7).with_data())) in kinds
