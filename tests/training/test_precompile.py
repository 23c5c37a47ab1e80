"""Graphs compiled ahead: which there are, that nothing runs, that the run finds them, and what is said of failures."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._functorch._aot_autograd import autograd_cache

from nanosprint.config import Execution
from nanosprint.errors import UserError
from nanosprint.recipes import load_recipe
from nanosprint.training import precompile, setup
from nanosprint.training import resolve as resolving
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World, local_place
from nanosprint.training.request import RunRequest, resumed
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state, compiled
from nanosprint.training.stored import GraphStore
from nanosprint.training.warmup import graphs_of, warm_up, warm_up_eagerly
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
    recorded = replace(COMPILED, attention="fa2", cuda_graphs="on")  # once for every window, of the same graphs
    assert graphs_of(load_recipe("record-third"), recorded) == graphs


def test_the_run_asks_the_caches_for_what_was_compiled_ahead(monkeypatch):
    """The same graphs of the same shapes, all of which may be cached, where none can be stored. None is run."""
    recipe = load_recipe("tiny", STAGED)
    asked = []

    def record(graph, inputs):
        autograd_cache.check_cacheable(graph)
        asked.append((graph.print_readable(print_output=False), [getattr(i, "shape", i) for i in inputs]))
        return graph

    def fail(*_):
        raise RuntimeError("not stored today")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: record)
    monkeypatch.setattr(GraphStore, "save", fail)
    first, *_, last = graphs_of(recipe, COMPILED)
    graphs = [first, last]
    assert [graph.trained for graph in graphs] == [True, False]
    errors = precompile.compile_graphs(RunRequest(recipe=recipe, execution=COMPILED), graphs)
    assert [str(error) for error in errors] == ["not stored today"] * 2
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


def test_the_run_finds_what_is_stored_ahead(monkeypatch):
    """Under the names that it looks for; compiled is nothing here."""
    recipe = load_recipe("tiny", STAGED)
    saved, graphs = [], graphs_of(recipe, COMPILED)
    monkeypatch.setattr(GraphStore, "save", lambda store, inputs: saved.append(store.path(inputs)))
    assert precompile.compile_graphs(RunRequest(recipe=recipe, execution=COMPILED), graphs) == []
    assert len({path.name for path in saved}) == len(graphs) > 2
    asked = []
    monkeypatch.setattr(GraphStore, "load", lambda store, inputs: asked.append(store.path(inputs)))
    state = build_state(recipe, COMPILED, 1, ONE.device)
    monkeypatch.setattr(setup, "compiled", lambda model, *_: model.loss_sum)
    warm_up(state, setup.build_loss_sum(state.model, recipe, COMPILED), recipe, COMPILED)
    assert set(asked) == set(saved)
    for path in saved:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    saved.clear()
    precompile.compile_graphs(RunRequest(recipe=recipe, execution=COMPILED), graphs)
    assert saved == []  # they are there


def test_ends_of_processes(caplog, cache):
    request = RunRequest(recipe=load_recipe("tiny"), execution=replace(COMPILED, compilers=1))
    compilers = precompile.Compilers(request, 0)
    for said, code, ready in (("odd: it cannot be pickled", 3, True), ("", 0, True), ("broken", 1, False)):
        caplog.clear()
        script = f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"
        stderr = (cache / "stderr").open("w+b")
        compilers._processes = [(subprocess.Popen([sys.executable, "-c", script], stderr=stderr), stderr)]
        precompile._mark_of(request).unlink(missing_ok=True)
        compilers.wait()
        stderr.close()
        assert said in caplog.text
        assert bool(caplog.text) == bool(said)
        assert ("traces them" in caplog.text) == (code == 3)
        assert precompile._mark_of(request).exists() == ready


def test_no_processes_where_the_files_are(cache):
    request = RunRequest(recipe=load_recipe("tiny"), execution=replace(COMPILED, compilers=1))
    mark = precompile._mark_of(request)
    assert Path(cache) in mark.parents
    mark.parent.mkdir()
    mark.touch()
    assert precompile.compile_ahead(request) is None
    other = precompile._mark_of(replace(request, execution=replace(request.execution, fp8="auto")))
    assert other != mark
    more = replace(request, seed=7, execution=replace(request.execution, compilers=3))
    assert precompile._mark_of(more) == mark
    longer = replace(request, recipe=load_recipe("tiny", {"train.num_steps": 7}))
    assert precompile._mark_of(longer) == mark


@pytest.mark.parametrize(("cores", "count"), [(4, 0), (8, 2), (16, 4), (128, 4)])
def test_as_many_as_graphs_and_cores_allow(cores, count, monkeypatch):
    monkeypatch.setattr(resolving, "usable_cores", lambda: cores)
    execution = replace(COMPILED, device="cuda", attention="fa2", compilers="auto")
    for recipe, most in ((load_recipe("record-third"), 4), (load_recipe("gpt2"), 2)):  # graphs
        assert resolving._compilers(execution, recipe, ONE) == min(count, most)
        for other in ({"compile": "max-autotune"}, {"compile": "off"}, {"device": "cpu"}, {"compilers": 0}):
            assert resolving._compilers(replace(execution, **other), recipe, ONE) == 0
        assert resolving._compilers(replace(execution, compilers=7), recipe, ONE) == 7


@pytest.mark.parametrize(("devices", "count"), [(("cuda:0", "cuda:0"), 4), (("cuda:0", "cuda:1"), 0)])
def test_several_processes_compile_ahead_where_each_sees_its_gpu_as_the_first(devices, count, monkeypatch):
    monkeypatch.setattr(resolving, "usable_cores", lambda: 64)
    monkeypatch.setattr(resolving, "from_all", lambda _: devices)
    execution = replace(COMPILED, device="cuda", attention="fa2", gpus=2, compilers="auto")
    world = World(1, 2, torch.device("cuda:0"), 1, 2)
    assert resolving._compilers(execution, load_recipe("record-third"), world) == count
    if not count:
        with pytest.raises(UserError, match="see its GPU as the first"):
            resolving._check_compilers(replace(execution, compilers=2), world)


def test_one_process_of_a_host_compiles():
    request = RunRequest(recipe=load_recipe("tiny"), execution=replace(COMPILED, compilers=1))
    assert precompile.compile_ahead(request, local_rank=1) is None


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (1, 4)),
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "GPU-1"}, (1, 4)),
        ({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "3"}, (0, 1)),
    ],
)
def test_place_among_the_processes_of_a_host(environment, place, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_place() == place


def test_resuming_elsewhere_chooses_anew():
    """What was resolved for one process, or for compiled graphs, is refused for several and for none."""
    settled = replace(COMPILED, compilers=4)
    request = RunRequest(recipe=load_recipe("tiny"), execution=settled)
    assert resumed(request, settled).execution.compilers == 4
    for change in ({"gpus": 2}, {"compile": "off"}, {"device": "auto"}):
        assert resumed(request, replace(settled, **change)).execution.compilers == Execution().compilers
    assert resumed(request, replace(settled, gpus=2, compilers=0)).execution.compilers == 0


def test_choices():
    tiny = load_recipe("tiny")
    assert Execution().compilers == "auto"
    assert resolve(replace(COMPILED, compilers="auto"), tiny, ONE).compilers == 0
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
