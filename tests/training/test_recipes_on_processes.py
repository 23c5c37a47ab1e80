"""The recipes that are raced, small, on several processes, eight at most, train what one process trains. CPU, gloo.

In float64, where order of summation shows below 1e-12. Stages, batches that grow, sparse tables, banks that are padded
and the head's split are as in the recipes.
"""

import pytest
import torch

from nanosprint.results.record import RunRecord

SMALL = (
    "model.dim=32", "model.num_heads=2", "model.vocab_size=512", "train.batch_tokens=768", "train.num_steps=9",
    "eval.tokens=1000", "eval.batch_tokens=512", "data.tokenizer=bytes", "precision.compute=fp64",
    "precision.orthogonalize=fp64", "exec.compile=off", "exec.attention=reference", "exec.threads=1",
)  # fmt: skip
PACKED = ("model.document_start=10", "model.seq_len=96")
NO_FP8 = ("precision.fp8_head=none", "precision.fp8_mlp=none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "processes", "more"),
    [
        ("sub3", 2, (*PACKED, NO_FP8[0], "model.num_layers=4", "data.mean_document=4")),
        ("record-third", 8, (*PACKED, *NO_FP8, "model.num_layers=3")),
    ],
)
def test_a_recipe_on_several_processes(recipe, processes, more, nanosprint, weights, tiny_data, tmp_path):
    words = (recipe, *SMALL, *more, "--device", "cpu", "--data", tiny_data)
    for gpus in (1, processes):
        done = nanosprint("train", *words, "--gpus", gpus, "--out", f"on-{gpus}", timeout=400)
        assert done.returncode == 0, done.stderr
    alone, many = tmp_path / "on-1", tmp_path / f"on-{processes}"
    assert RunRecord.load(many).world_size == processes
    assert RunRecord.load(many).val_loss == pytest.approx(RunRecord.load(alone).val_loss, abs=1e-9)
    for name, weight in weights(alone).items():
        torch.testing.assert_close(weights(many)[name], weight, rtol=0, atol=1e-9)
