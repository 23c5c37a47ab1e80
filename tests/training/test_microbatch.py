"""How many lanes go into a micro-batch, and that a step's gradient does not depend on it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.data.loader import TokenLoader
from nanosprint.data.shards import find_shards
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import ModelStage, model_inputs
from nanosprint.training.distributed import World
from nanosprint.training.microbatch import (
    lanes_of,
    micro_batches_of,
    part_choices,
    resolve_micro_batches,
    rows_of,
    smaller,
    tokens_that_fit,
    tokens_worth_it,
)
from nanosprint.training.request import RunRequest, resumed
from nanosprint.training.setup import build_state
from tests.recipes.test_ladder import small

CPU = torch.device("cpu")
STAGES = (131_072, 262_144, 393_216)  # tokens of a step of the record
GIB = 2**30


def resolved(recipe, processes=1, **choices):
    return resolve_micro_batches(Execution(**choices), recipe, World(0, processes, CPU))


@pytest.mark.parametrize(
    ("tokens", "processes", "lanes", "largest"),
    [
        (196_608, 1, (8, 4, 4), 196_608),
        (400_000, 1, (8, 8, 8), 393_216),
        (65_536, 1, (4, 2, 1), 65_536),
        (49_152, 1, (2, 1, 1), 49_152),
        (196_608, 2, (4, 4, 4), 196_608),
        (400_000, 8, (1, 1, 1), 49_152),
    ],
)
def test_as_many_lanes_as_have_room(tokens, processes, lanes, largest):
    execution = resolved(load_recipe("record-third"), processes, tokens_per_microbatch=tokens)
    assert tuple(lanes_of(batch, 8, execution) for batch in STAGES) == lanes
    assert tuple(micro_batches_of(batch, 8, execution) for batch in STAGES) == tuple(8 // processes // k for k in lanes)
    assert (execution.lanes_per_microbatch, execution.tokens_per_microbatch) == ("auto", largest)
    assert resolve_micro_batches(execution, load_recipe("record-third"), World(0, processes, CPU)) == execution


def test_a_number_of_lanes_is_for_all_plans():
    execution = resolved(load_recipe("record"), lanes_per_microbatch=2)
    assert [lanes_of(batch, 8, execution) for batch in STAGES] == [2, 2, 2]
    assert execution.tokens_per_microbatch == 98_304


def test_rows_and_parts():
    recipe = load_recipe("gpt2")
    assert rows_of(recipe.train.batch_tokens, recipe, resolved(recipe, lanes_per_microbatch=2)) == 128
    record = load_recipe("record")
    execution = resolved(record, tokens_per_microbatch=196_608)
    assert [rows_of(batch, record, execution) for batch in STAGES] == [8, 4, 4]  # a lane is one row
    assert part_choices(record, execution) == [1, 2, 4]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tokens_per_microbatch": 49_151}, "tokens_per_microbatch=49151 is less than a lane .* 49152 tokens"),
        ({"lanes_per_microbatch": 3}, r"lanes_per_microbatch=3 does not divide .* use one of \[1, 2, 4, 8\]"),
        (
            {"lanes_per_microbatch": 2, "tokens_per_microbatch": 65_536},
            "lanes_per_microbatch=2 makes micro-batches of up to 98304 tokens, more than .*=65536: leave one",
        ),
    ],
)
def test_what_cannot_be_dealt(choices, message):
    with pytest.raises(ValueError, match=message):
        resolved(load_recipe("record"), **choices)


def test_resuming_with_another_choice():
    recipe = load_recipe("record")
    before = RunRequest(recipe=recipe, execution=resolved(recipe, lanes_per_microbatch=1))
    changed = replace(before.execution, lanes_per_microbatch=4)
    execution = resolve_micro_batches(resumed(before, changed).execution, recipe, World(0, 1, CPU))
    assert (execution.lanes_per_microbatch, execution.tokens_per_microbatch) == (4, 196_608)
    execution = resumed(before, replace(before.execution, gpus=2)).execution
    assert (execution.lanes_per_microbatch, execution.tokens_per_microbatch) == ("auto", "auto")


def test_the_estimate_is_below_what_was_measured():
    """gpt2 took 26.6 GiB with 65,536 tokens and 51.0 GiB with 131,072 on an H200."""
    recipe, parameters = load_recipe("gpt2"), 124_439_808
    for tokens, peak in ((65_536, 26.6), (131_072, 51.0)):
        assert 0.55 * tokens < tokens_that_fit(recipe, parameters, peak * GIB) < 0.65 * tokens
    assert tokens_that_fit(recipe, parameters, 1e9) == 0


@pytest.mark.parametrize(
    ("name", "gib", "lanes"),
    [("gpt2", 139, [1]), ("gpt2", 16, [1]), ("record", 139, [8, 4, 4, 4]), ("record", 80, [4, 2, 2, 2])],
)
def test_what_a_gpu_gets(name, gib, lanes, monkeypatch):
    """A token for every 2,048 parameters, 65,536 at least, as far as they fit."""
    recipe, gpu = load_recipe(name), SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gib * GIB, gib * GIB))
    execution = resolve_micro_batches(Execution(), recipe, World(0, 1, gpu))
    assert [lanes_of(batch, 8, execution) for batch in recipe.batches().values()] == lanes


def test_a_cap_on_memory_counts(monkeypatch):
    recipe, gpu = load_recipe("record"), SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (139 * GIB, 139 * GIB))
    parameters = 635_885_375
    assert tokens_worth_it(Execution(memory_gb=40), recipe, gpu) == tokens_that_fit(recipe, parameters, 40e9) < 40_000


def test_less_memory_step_by_step():
    """Half the tokens until a lane is left, then parts of its rows, then fewer activations."""
    recipe, wanted = load_recipe("tiny"), Execution()
    execution = resolved(recipe, tokens_per_microbatch=256, compile="default")
    execution = replace(execution, activation_budget=1.0)
    seen = []
    while (less := smaller(recipe, execution, wanted)) is not None:
        execution = less
        seen.append((execution.tokens_per_microbatch, execution.parts_per_microbatch, execution.activation_budget))
    assert seen == [(128, 1, 1.0), (128, 2, 1.0), (128, 4, 1.0), (128, 4, 0.5), (128, 4, 0.25), (128, 4, 0.1)]
    assert smaller(recipe, replace(execution, compile="off", activation_budget=1.0), wanted) is None
    record, first = load_recipe("record"), resolved(load_recipe("record"), tokens_per_microbatch=196_608)
    halved = smaller(record, first, wanted)
    assert [lanes_of(batch, 8, halved) for batch in STAGES] == [4, 2, 2]
    for fixed in ({"tokens_per_microbatch": 196_608}, {"lanes_per_microbatch": 4}):
        assert smaller(record, first, Execution(**fixed)).tokens_per_microbatch == 196_608


# The record's layers look across tokens: smear, hashed pairs, shifted keys, paired heads, composed maps, three targets.
EXACT = {
    "precision.compute": "fp64",
    "precision.orthogonalize": "fp64",
    "precision.fp8_head": "none",
    "precision.fp8_mlp": "none",
}


@pytest.mark.parametrize("tokens", [256, 512])
def test_the_gradient_of_a_step_in_every_stage(tokens, tiny_data):
    recipe = load_recipe("record", small("record", **EXACT))
    execution = Execution(device="cpu", compute="fp64", attention="reference", compile="off", fp8="off")
    state = build_state(recipe, execution, 0, CPU)
    with torch.no_grad():  # zeros would hide differences
        for i, p in enumerate(state.model.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))
    singly = gradients(state.model, recipe, replace(execution, lanes_per_microbatch=1), tiny_data)
    execution = resolve_micro_batches(replace(execution, tokens_per_microbatch=tokens), recipe, World(0, 1, CPU))
    for (alone, counted), (together, few) in zip(
        singly, gradients(state.model, recipe, execution, tiny_data), strict=True
    ):
        assert counted == 8
        assert few < 8
        for name, gradient in alone.items():
            assert gradient.any(), name
            torch.testing.assert_close(
                together[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


def gradients(model, recipe, execution, data):
    """Of a step in each stage: gradients by name, and in how many micro-batches."""
    plans = [recipe.plan(step) for step in (0, 12, 29)]
    assert len({plan.batch_tokens for plan in plans}) == 3
    loader = TokenLoader(
        find_shards(data, "train"), plans.__getitem__, num_steps=3, lanes=8,
        lanes_per_microbatch=lambda tokens: lanes_of(tokens, 8, execution), vocab_size=257, order="documents",
        document_start=256, history=recipe.model.history, mean_document=4, epochs=100.0,
    )  # fmt: skip
    entering, found = ModelStage(model), []
    with loader as steps:
        for plan, data in zip(plans, steps, strict=True):
            model.zero_grad()
            for inputs in model_inputs(data.micro_batches, plan, entering.enter(plan)):
                model.loss_sum(*inputs).backward()
            found.append(({n: p.grad.clone() for n, p in model.named_parameters()}, len(data.micro_batches)))
    return found
