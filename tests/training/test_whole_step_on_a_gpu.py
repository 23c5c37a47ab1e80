"""The record's gradients on a GPU, with its kernels, compiled or not, against the reference operators in float32.

Single operators have tests of their own; this is for what goes wrong between them, such as a compiler that drops what a
kernel wrote.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import ModelInput, ModelStage, random_input
from nanosprint.training.distributed import World
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_loss_sum, build_state, compiled
from nanosprint.training.stored import GraphStore, converter

FEW = 2000  # numbers
SIZE = {
    "model.num_layers": 6,
    "model.vocab_size": 5000,
    "model.document_start": 7,
    "model.seq_len": 3072,
    "train.lanes": 1,
    "train.batch_tokens": 3072,
    "eval.seq_len": 8192,
    "eval.batch_tokens": 8192,
}


def gradients(recipe: Recipe, execution: Execution, stage: int, *, stored: bool = False) -> dict[str, torch.Tensor]:
    """Of a step's loss by every parameter, from weights in which nothing is zero; on the CPU, in float64.

    stored: the graph goes through a file.
    """
    torch._dynamo.reset()
    device = torch.device(execution.device)
    state = build_state(recipe, execution, 0, device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in state.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator).to(p))
    state.model.refresh(0)
    loss_sum: Any = compiled(state.model, execution)
    schedule = recipe.schedule.stages
    assert schedule is not None
    plan = recipe.plan(schedule.spans(recipe.train.num_steps)[stage].start)
    given: ModelInput = random_input(recipe, plan, 1, device, ModelStage(state.model).enter(plan))
    if stored:
        converted = given._replace(context=converter(execution)(given.context))
        GraphStore(state.model, recipe, execution).save(converted)
        torch._dynamo.reset()
        loss_sum = build_loss_sum(state.model, recipe, execution)
    for p in state.model.parameters():
        p.grad.zero_()  # not None: look-ups add to it
    (loss_sum(*given) / plan.batch_tokens).backward()
    assert not stored or [first.stored for first in loss_sum.first_calls] == [True]
    return {n: p.grad.double().cpu() for n, p in state.model.named_parameters() if p.grad.any()}


def different(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative distances that rounding does not explain, by parameter; what has a few numbers is taken as one.

    Of single numbers, sums over a thousand tokens that nearly cancel, bf16 leaves little.
    """
    assert got.keys() == expected.keys()
    few = {name for name, g in expected.items() if g.numel() < FEW}
    apart = {name: distance([got[name]], [g]) for name, g in expected.items() if name not in few}
    apart["all small ones"] = distance([got[name] for name in few], [expected[name] for name in few])
    return {name: d for name, d in apart.items() if not d < (0.4 if name not in expected else 0.25)}


def distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    one, other = (torch.cat([t.flatten() for t in tensors]) for tensors in (got, expected))
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("attention", ["triton", "fa2"])
def test_compiled_and_eager_agree_with_float32(stage, attention):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    recipe = load_recipe("record-third", SIZE)
    world = World(0, 1, torch.device("cuda"))
    wanted = Execution(attention=attention)
    on_gpu = resolve(wanted, recipe, world)
    eager = gradients(recipe, replace(on_gpu, compile="off"), stage)
    in_graphs = gradients(recipe, on_gpu, stage)
    assert not different(in_graphs, eager)
    exact = Execution(device="cpu", compute="fp32", attention="reference", compile="off", fp8="off")
    expected = gradients(recipe, resolve(exact, recipe, World(0, 1, torch.device("cpu"))), stage)
    assert not different(eager, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("weights", [False, True])
def test_nothing_is_read_that_nobody_wrote(device, weights):
    """With NaN in all memory that an operator of ours is given, gradients are what they are without."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    words = {"precision.fp8_mlp.weights": weights, "train.lanes": 1, "train.batch_tokens": 3072}
    less = {"model.dim": 192, "model.num_heads": 2} if device == "cpu" else {}
    recipe = load_recipe("fast", {**SIZE, **words, **less})
    attention = "triton" if device == "cuda" else "reference"
    wanted = Execution(device=device, attention=attention, compile="off")
    execution = resolve(wanted, recipe, World(0, 1, torch.device(device)))
    expected = gradients(recipe, execution, 0)
    with poisoned_memory():
        got = gradients(recipe, execution, 0)
    assert got.keys() == expected.keys()
    apart = {name: distance([got[name]], [expected[name]]) for name in got if expected[name].any()}
    assert {name: d for name, d in apart.items() if not d < 0.02} == {}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, in integers the largest number; operators that cannot repeat themselves only warn."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.gpu
def test_a_stored_graph_agrees_with_one_compiled_here(tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    recipe = load_recipe("record-third", SIZE)
    execution = resolve(Execution(attention="triton"), recipe, World(0, 1, torch.device("cuda")))
    expected = gradients(recipe, execution, 0)
    got = gradients(recipe, execution, 0, stored=True)
    assert not different(got, expected)
    large = [name for name in expected if expected[name].numel() >= FEW]
    apart = {name: distance([got[name]], [expected[name]]) for name in large}
    assert {name: d for name, d in apart.items() if not d < 0.02} == {}  # sums in another order, no more
