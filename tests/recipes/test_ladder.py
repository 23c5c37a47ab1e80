"""The ladder: published sizes, one-line diffs, and every rung trained at reduced size by overrides alone."""

import pytest
import torch

from nanosprint.config.edit import diff_lines, to_dict
from nanosprint.model.gpt import GPT
from nanosprint.recipes import all_recipes, load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.training.api import train

SMALL = {
    "model.dim": 48,
    "model.num_heads": 3,
    "model.num_layers": 4,
    "model.vocab_size": 257,
    "model.seq_len": 32,
    "train.batch_tokens": 1024,
    "train.num_steps": 30,
    "data.tokenizer": "bytes",
    "data.epochs": 100,
    "eval.tokens": 2048,
    "eval.seq_len": 32,
    "eval.every": 0,
    "precision.compute": "fp32",
    "precision.orthogonalize": "fp32",
}
PACKED = {"model.document_start": 256, "data.mean_document": 4, "model.seq_len": 128, "eval.seq_len": 128}
LADDER = ["gpt2", "gpt2-rotary", "muon", "modern", "residuals", "soap", "longwindow", "sub3"]
UPPER = ["normuon", "paired", "record", "record-third", "fast"]


def small(name, **more):
    """Overrides that make a recipe of the ladder small enough for tests."""
    packed = PACKED if name in ("longwindow", "sub3", *UPPER) else {"eval.batch_tokens": 2048}
    heads = {"model.num_heads": 2, "model.num_layers": 6} if name in UPPER else {}  # paired heads come by twos
    return {**SMALL, **packed, **heads, **more}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-rotary", 123_532_032), ("muon", 123_532_032), ("modern", 123_568_128)],
)
def test_published_sizes(name, parameters):
    with torch.device("meta"):
        assert GPT(load_recipe(name).model).num_parameters() == parameters


def test_residuals_adds_a_head_and_its_scalars():
    with torch.device("meta"):
        sizes = {name: GPT(load_recipe(name).model).num_parameters() for name in ("modern", "residuals")}
    assert sizes["residuals"] - sizes["modern"] == 50_304 * 768 + 12 * 2 + 11


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("muon", {"groups.matrix.lr: 0.0018 -> 0.00036", "train.num_steps: 9536 -> 6200"}),
        ("modern", {"model.vocab_size: 50257 -> 50304", "model.qk_norm: false -> true"}),
        ("soap", {"groups.matrix.lr: 0.02 -> 0.0018"}),
    ],
)
def test_each_rung_is_its_parent_plus_a_diff(child, expected):
    parent = all_recipes()[child].parent
    lines = diff_lines(to_dict(load_recipe(parent)), to_dict(load_recipe(child)))
    assert expected <= set(lines)
    assert len(lines) < 30


@pytest.mark.parametrize("name", [*LADDER, *UPPER])
def test_every_rung_trains_at_reduced_size_by_overrides_alone(name, tmp_path, tiny_data):
    recipe = load_recipe(name, small(name))
    train(recipe, out=tmp_path / "run", data=tiny_data, execution={"device": "cpu"})
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "finished"
    assert record.val_loss < (5.0 if name == "gpt2" else 4.0)  # uniform is 5.55; gpt2 is still warming up
