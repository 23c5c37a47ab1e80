"""Every recipe's loss is one graph, and the compiled model is the eager one.

On a CPU the eager model runs hand-written backward passes where the compiled one traces plain formulas, so this also
holds the two against each other.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._functorch.config

from nanosprint.config import Execution
from nanosprint.model import gpt
from nanosprint.model.techniques import bigram
from nanosprint.ops.embedding import sort_rows
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import random_input
from nanosprint.training.setup import build_state, compiled
from tests.recipes.test_ladder import LADDER, UPPER, small


def wide(recipe):
    """The recipe's groups in fp32: gradients would be rounded to bf16."""
    return tuple(replace(group, storage="fp32") for group in recipe.groups)


SAME_MODEL = {"muon": "gpt2-rotary", "soap": "residuals", "record-third": "record", "fast": "record"}


@pytest.mark.parametrize(("name", "other"), SAME_MODEL.items())
def test_recipes_whose_graph_is_anothers(name, other):
    assert load_recipe(name, small(name)).model == load_recipe(other, small(other)).model


@pytest.mark.parametrize("name", [n for n in (*LADDER, *UPPER) if n not in SAME_MODEL])
def test_one_graph_and_the_same_numbers(name):
    recipe = load_recipe(name, small(name))
    recipe = replace(recipe, groups=wide(recipe))
    execution = Execution(device="cpu", compute="fp32", attention="sdpa", compile="off", fp8="off")
    state = build_state(recipe, execution, 0, torch.device("cpu"))
    model = state.model
    with torch.no_grad():  # zeros would hide differences
        for i, p in enumerate(model.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    arguments = random_input(recipe, recipe.plan(0), 2, torch.device("cpu"))
    graphs = []

    def count(graph_module, inputs):
        graphs.append(graph_module)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model.loss_sum, dynamic=False, fullgraph=True, backend=count)
    losses, gradients = [], []
    for loss_sum in (model.loss_sum, compiled, compiled):
        model.zero_grad()
        loss = loss_sum(*arguments)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert len(graphs) == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for n, expected in gradients[0].items():
        scale = float(expected.abs().max()) + 1e-12
        torch.testing.assert_close(gradients[1][n] / scale, expected / scale, rtol=0, atol=1e-4)


def test_sorted_look_ups_are_the_plain_ones(monkeypatch):
    """Tokens, hashed pairs and value tables by the operator that a GPU has, in one graph, against torch's gradients."""
    recipe = load_recipe("record", small("record"))
    execution = Execution(device="cpu", compute="fp32", attention="sdpa", compile="off", fp8="off")
    gradients, sorts = [], []

    def count(graph_module, inputs):
        sorts.append(sum(node.target is torch.sort for node in graph_module.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)

    for sort in (False, True):
        model = build_state(replace(recipe, groups=wide(recipe)), execution, 0, torch.device("cpu")).model
        tables = {
            n: p for n, p in model.named_parameters() if n in ("embed.weight", "bigram.weight", "value_tables.weight")
        }
        assert len(tables) == 3
        arguments = random_input(recipe, recipe.plan(0), 2, torch.device("cpu"))
        loss_sum = model.loss_sum
        if sort:
            for module in (gpt, bigram):
                monkeypatch.setattr(module, "rows_of", sort_rows)
            torch._dynamo.reset()
            loss_sum = torch.compile(loss_sum, dynamic=False, fullgraph=True, backend=count)
        with torch.no_grad():  # zeros would hide differences
            for i, p in enumerate(model.parameters()):
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        loss_sum(*arguments).backward()
        gradients.append({n: p.grad for n, p in tables.items()})
    assert sorts == [2]  # of the tokens and of their pairs
    for n, expected in gradients[0].items():
        scale = float(expected.abs().max())
        assert scale > 0
        torch.testing.assert_close(gradients[1][n] / scale, expected / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("attention", "graphs_expected"), [("reference", 1), ("sdpa", 3)])
def test_windows_are_arguments_or_constants_of_the_graph(attention, graphs_expected, monkeypatch):
    """Three steps whose windows and documents differ; the numbers are those of the eager model with ints."""
    recipe = load_recipe("sub3", small("sub3"))
    execution = Execution(
        device="cpu", compute="fp32", attention=attention, compile="default", fp8="off", activation_budget=1.0
    )
    model = build_state(recipe, execution, 0, torch.device("cpu")).model
    graphs = []

    def count(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    loss_sum = compiled(model, execution)
    for i, (short, long) in enumerate(((2, 4), (4, 8), (8, 200))):
        tokens, targets, context = random_input(recipe, recipe.plan(0), 2, torch.device("cpu"))
        ends = context.documents.cu_seqlens
        documents = context.documents._replace(cu_seqlens=torch.where(ends % 128 < 64 * i, ends - ends % 128, ends))
        context = context._replace(short=short, long=long, documents=documents._replace(max_seq_len=4 + 64 * i))
        with torch.no_grad():
            torch.testing.assert_close(loss_sum(tokens, targets, context), model.loss_sum(tokens, targets, context))
    assert len(graphs) == graphs_expected


@torch._functorch.config.patch(activation_memory_budget=1.0)  # what is set within is put back
@pytest.mark.parametrize("name", ["gpt2", "sub3"])
def test_fewer_activations_kept_are_the_same_gradients(name, monkeypatch):
    recipe = load_recipe(name, small(name))
    kept, gradients = {}, {}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    for budget in (1.0, 0.1):
        execution = Execution(
            device="cpu", compute="fp32", attention="reference", compile="default", fp8="off", activation_budget=budget
        )
        model = build_state(recipe, execution, 0, torch.device("cpu")).model
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        torch._dynamo.reset()
        loss_sum = compiled(model, execution)
        loss = loss_sum(*random_input(recipe, recipe.plan(0), 2, torch.device("cpu")))
        known = {p.data_ptr() for p in model.parameters()}
        saved = [t for t in loss.grad_fn.saved_tensors if t.data_ptr() not in known]
        kept[budget] = sum(t.numel() * t.element_size() for t in saved)
        loss.backward()
        gradients[budget] = [p.grad for p in model.parameters()]
    assert kept[0.1] < 0.6 * kept[1.0], kept
    torch.testing.assert_close(gradients[0.1], gradients[1.0], rtol=1e-4, atol=1e-5)
