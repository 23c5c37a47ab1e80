"""Graphs compiled ahead: which there are, that nothing runs, that the run finds them, and what is said of failures."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._functorch._aot_autograd import autograd_cache

from nanosprint.config import Execution
from nanosprint.errors import UserError
from nanosprint.recipes import load_recipe
from nanosprint.training import precompile
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World
from nanosprint.training.request import RunRequest
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state, compiled
from nanosprint.training.warmup import graphs_of, warm_up_eagerly
from tests.recipes.test_ladder import small
from tests.training.test_batch import STAGED

ONE = World(0, 1, torch.device("cpu"))
CHOICES = {"device": "cpu", "compute": "fp32", "attention": "sdpa", "fp8": "off", "parts_per_microbatch": 1}
COMPILED = Execution(**CHOICES, compile="default", tokens_per_microbatch=1 << 20, activation_budget=1.0, threads=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def test_a_graph_for_each_stage_and_one_for_validation():
    graphs = graphs_of(load_recipe("record-third"), replace(COMPILED, attention="fa2"))
    assert [graph.trained for graph in graphs] == [True, True, True, False]
    assert len({graph.plan.batch_tokens for graph in graphs[:3]}) == 3


def test_the_run_asks_the_caches_for_what_was_compiled_ahead(monkeypatch):
    """The same graphs of the same shapes, all of which may be cached. Nothing is compiled, let alone run."""
    recipe = load_recipe("tiny", STAGED)
    asked = []

    def record(graph, inputs):
        autograd_cache.check_cacheable(graph)
        asked.append((graph.print_readable(print_output=False), [getattr(i, "shape", i) for i in inputs]))
        return graph

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: record)
    first, *_, last = graphs_of(recipe, COMPILED)
    graphs = [first, last]
    assert [graph.trained for graph in graphs] == [True, False]
    precompile.compile_graphs(RunRequest(recipe=recipe, execution=COMPILED), graphs)
    ahead = asked[:]
    asked.clear()
    assert len(ahead) == len(graphs)
    torch._dynamo.reset()
    model = build_state(recipe, COMPILED, 1, ONE.device).model
    loss_sum = compiled(model, COMPILED, record)
    for plan, rows, parts, trained in graphs:
        with torch.set_grad_enabled(trained):
            loss_sum(*random_input(recipe, plan, rows, ONE.device, None, parts))
    assert asked == ahead


def test_a_process_that_fails_is_told(caplog):
    broken = replace(COMPILED, attention="fa3", compilers=1)  # which a CPU has not
    request = RunRequest(recipe=load_recipe("tiny"), execution=broken)
    compilers = precompile.compile_ahead(request)
    with caplog.at_level(logging.WARNING):
        compilers.wait()
    assert "could not be compiled ahead" in caplog.text
    assert "fa3" in caplog.text


def test_no_processes_where_the_files_are(cache):
    request = RunRequest(recipe=load_recipe("tiny"), execution=replace(COMPILED, compilers=1))
    mark = precompile._mark_of(request)
    assert Path(cache) in mark.parents
    mark.parent.mkdir()
    mark.touch()
    assert precompile.compile_ahead(request) is None
    other = precompile._mark_of(replace(request, execution=replace(request.execution, fp8="auto")))
    assert other != mark


def test_choices():
    tiny = load_recipe("tiny")
    assert resolve(COMPILED, tiny, ONE).compilers == 0  # not on a CPU by itself
    assert resolve(replace(COMPILED, compilers=3), tiny, ONE).compilers == 3
    for wrong in ({"compilers": -1}, {"compilers": 1, "compile": "off"}):
        with pytest.raises(UserError, match=r"exec\.compilers"):
            resolve(replace(COMPILED, **wrong), tiny, ONE)


def test_an_eager_step_leaves_no_trace():
    recipe = load_recipe("record-third", small("record-third"))
    state = build_state(recipe, COMPILED, 0, ONE.device)
    before = state.snapshot()
    warm_up_eagerly(state, recipe)
    torch.testing.assert_close(state.snapshot(), before, rtol=0, atol=0)
