"""From a plan and a batch to what the model is called with; which plans need a graph of their own; a run in stages."""

import json
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanosprint.config import LossWeights, RotarySpec, Stage, StageSchedule, Windows
from nanosprint.config.edit import to_dict
from nanosprint.data.documents import DocumentEnds, document_ends
from nanosprint.data.loader import Batch
from nanosprint.model.context import Context
from nanosprint.ops.attention import Documents, check_documents
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.training.batch import ModelStage, context_of, model_inputs, random_input, split_rows
from nanosprint.training.request import Budget, RunRequest
from nanosprint.training.setup import fit_to_budget

CPU = torch.device("cpu")
START = 9


def stage(batch_tokens, longest, short, long, **rest):
    return Stage(batch_tokens=batch_tokens, max_document=longest, windows=Windows(short=short, long=long), **rest)


STAGES = StageSchedule(
    stages=(
        stage(128, 24, 4, 8, loss=LossWeights(tokens=(1, 0.5)), loss_end=LossWeights(tokens=(1, 0))),
        stage(256, 40, 8, 16, lr=1.5, loss=LossWeights(prefix=0.2), loss_end=LossWeights()),
        stage(512, 40, 16, 32),
    ),
    extension=stage(512, 40, 16, 48),
    extension_steps=2,
    eval_windows=Windows(short=16, long=64),
)
STAGED = (
    "data.order=documents",
    "model.document_start=256",
    "data.mean_document=8",
    "schedule.stages=" + json.dumps(to_dict(STAGES)),
    "schedule.lr={}",
    "model.layers.0.mixer.window=short",
    "model.layers.1.mixer.window=long",
)


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("tiny", STAGED)


def test_context_follows_the_plan(recipe):
    tokens = torch.zeros(1, 32, dtype=torch.int32)
    batches = [Batch(tokens, tokens.long(), DocumentEnds(torch.tensor([0, 20, 32]), 20))] * 2
    first, second = (found.context for found in model_inputs(batches, recipe.plan(3), 0.3))
    assert (first.short, first.long, first.attn_scale) == (4, 8, 0.3)
    assert first.documents.max_seq_len == 20
    assert first.loss.tokens.tolist() == [1.0, 0.25]
    assert first.loss.tokens.dtype == torch.float32
    assert first.loss.prefix is None
    assert second.loss is first.loss
    (middle,) = model_inputs(batches[:1], recipe.plan(6))
    assert float(middle.context.loss.prefix) == pytest.approx(0.2)
    assert middle.context.loss.prefix.shape == ()
    (last,) = model_inputs(batches[:1], recipe.plan(19))
    assert last.context.loss.tokens.tolist() == [1.0]


def test_validation_is_plain(recipe):
    documents = DocumentEnds(torch.tensor([0, 32]), 32)
    context = context_of(documents, recipe.eval_plan(20))
    assert (context.loss, context.long, context.documents.max_seq_len) == (None, 64, 32)
    assert context_of(documents, load_recipe("longwindow").plan(0)).loss is None


@pytest.mark.parametrize(("longest", "bound"), [(32, 2048), (2048, 2048), (2049, 4096)])
def test_what_a_graph_is_called_with(longest, bound):
    """Limits as data are what they were; as ints the longest document is a round number, for fewer graphs."""
    documents = Documents(torch.tensor([0, longest], dtype=torch.int32), longest)
    context = Context(documents=documents, short=4, long=None, attn_scale=0.5)
    data, ints = context.with_data(), context.with_ints()
    assert (data.attn_scale.dtype, data.attn_scale.shape, data.attn_scale.device.type) == (torch.float32, (), "cpu")
    for limit, value in ((data.short, 4), (data.documents.max_seq_len, longest)):
        assert (limit.dtype, limit.shape, limit.device.type, int(limit)) == (torch.int32, (), "cpu", value)
    assert (data.long, float(data.attn_scale), data.documents.cu_seqlens) == (None, 0.5, documents.cu_seqlens)
    assert ints == data.with_ints() == context._replace(documents=documents._replace(max_seq_len=bound))
    assert Context().with_data() == Context().with_ints() == Context()


def test_random_input_has_the_plans_shape(recipe):
    for step in (0, 10, 19):
        found = random_input(recipe, recipe.plan(step), 2, CPU)
        assert found.tokens.shape == found.targets.shape == (2, recipe.plan(step).batch_tokens // 4)
        assert len(found.context.loss.tokens) == len(recipe.plan(step).loss.tokens)


def test_random_documents_are_like_those_of_the_web():
    """In the record's first stage: cut at 896 tokens, median 424, different in every row and for every seed."""
    recipe = load_recipe("record")
    plan = recipe.plan(0)
    found = random_input(recipe, plan, 4, CPU)
    documents = found.context.documents
    check_documents(documents, 4, plan.seq_len)
    lengths = documents.cu_seqlens.diff()
    assert documents.cu_seqlens.shape == (4 * (16_384 // 128 + 1) + 1,)  # what the loader makes room for
    assert int(lengths.max()) == documents.max_seq_len == plan.max_document == 896
    lengths = lengths[lengths > 0].tolist()
    assert 380 < statistics.median(lengths) < 470
    assert 110 < len(lengths) < 190
    first, second = lengths[:10], lengths[-10:]
    assert len(set(first)) > 5
    assert first != second
    again, other = (random_input(recipe, plan, 4, CPU, seed=seed) for seed in (0, 1))
    assert torch.equal(again.context.documents.cu_seqlens, documents.cu_seqlens)
    assert not torch.equal(other.context.documents.cu_seqlens, documents.cu_seqlens)
    assert not torch.equal(other.tokens, found.tokens)


@pytest.mark.parametrize("mean", [1, 8, 600, 4096])
def test_random_documents_fit_the_room_that_a_recipe_makes(mean):
    words = {"model.document_start": 256, "data.mean_document": mean, "model.seq_len": 5000, "eval.seq_len": 5000}
    recipe = load_recipe("tiny", {**words, "train.batch_tokens": 40_000, "eval.batch_tokens": 5000})
    assert recipe.plan(0).max_document is None
    documents = random_input(recipe, recipe.plan(0), 2, CPU).context.documents
    check_documents(documents, 2, 5000)
    assert documents.max_seq_len <= max(2048, mean)


def test_the_model_is_told_of_new_windows_only(recipe):
    calls = []

    def set_windows(windows):
        calls.append(windows)
        return 1 + 0.2 * math.log(windows[-1] / windows[0])

    config = replace(recipe.model, rotary=RotarySpec(yarn=True), attn_scale=0.1)
    model = SimpleNamespace(config=config, set_windows=set_windows)
    entering = ModelStage(model)
    scales = [entering.enter(recipe.plan(step)) for step in (*range(20), 3)]
    assert calls == [(8,), (8, 16), (8, 16, 32), (8, 16, 32, 48), (8,)]
    assert scales[0] == scales[-1] == 0.1
    assert scales[18] == pytest.approx(0.1 * (1 + 0.2 * math.log(6)))
    model.config = replace(config, attn_scale=None)
    assert ModelStage(model).enter(recipe.plan(0)) == pytest.approx(recipe.model.head_dim**-0.5)
    assert ModelStage(SimpleNamespace(config=recipe.model)).enter(recipe.plan(0)) is None


def test_a_run_in_stages(train_tiny, weights):
    """Batches change on the way; parts of a step, and a warm-up for every graph, change nothing but rounding."""
    exact = (*STAGED, "precision.compute=fp64", "precision.orthogonalize=fp64", "data.spare_documents=8")
    whole = train_tiny("whole", *exact)
    record = RunRecord.load(whole)
    tokens = 6 * (128 + 256) + 8 * 512
    assert (record.steps, record.tokens) == (20, tokens)
    log = [line for line in RunDir(whole).read_metrics() if line["kind"] == "train"]
    assert [line["tokens"] for line in log[5:13]] == [768, 1024, 1280, 1536, 1792, 2048, 2304, 2816]
    parts = weights(train_tiny("parts", *exact, execution={"device": "cpu", "lanes_per_microbatch": 1}))
    for name, weight in weights(whole).items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=1e-9)


def test_a_budget_of_tokens_counts_stages(recipe):
    """20 steps have 6,400 tokens, 320 on average."""
    budgeted = RunRequest(recipe=recipe, budget=Budget(unit="tokens", amount=2 * recipe.tokens))
    assert fit_to_budget(budgeted, None, None, None, None).recipe.train.num_steps == 40


# Parts of a micro-batch


def packed(rows, seq_len, history=0):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(START - 2, START + 1, (rows, history + seq_len)))
    ends = torch.empty(rows * seq_len + 1, dtype=torch.int32)
    longest = document_ends(tokens[:, history:].numpy(), START, ends.numpy())
    return Batch(tokens, tokens[:, history:] + 1, DocumentEnds(ends, longest))


@pytest.mark.parametrize(("rows", "parts"), [(6, 1), (6, 2), (6, 3), (6, 6), (1, 1)])
@pytest.mark.parametrize("history", [0, 3])
def test_parts_hold_whole_rows_and_their_documents(rows, parts, history):
    whole = packed(rows, 7, history)
    split = list(split_rows(whole, parts))
    assert len(split) == parts
    assert torch.equal(torch.cat([part.tokens for part in split]), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in split]), whole.targets)
    for part in split:
        own = torch.empty_like(whole.documents.ends)
        longest = document_ends(part.tokens[:, history:].numpy(), START, own.numpy())
        assert part.documents.ends.shape == whole.documents.ends.shape  # one graph
        assert part.documents.ends.unique().tolist() == own.unique().tolist()
        assert part.documents.longest >= longest
        check_documents(Documents(part.documents.ends, part.documents.longest), rows // parts, 7)


def test_without_documents():
    whole = packed(4, 5)._replace(documents=None)
    assert [part.documents for part in split_rows(whole, 2)] == [None, None]


def test_rows_that_cannot_be_shared():
    with pytest.raises(ValueError, match="6 rows cannot be split into 4 equal parts"):
        list(split_rows(packed(6, 7), 4))
