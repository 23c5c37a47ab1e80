"""The measurement of a whole host, small, with gloo in place of GPUs: what is launched, when, and what is kept."""

import json
import sys

import pytest

from benchmarks import eight_gpus, scaling
from benchmarks.eight_gpus import Job, differing, plan, words_for
from nanosprint.results.record import RunRecord
from tests.test_scaling_bench import launch

SMALL = (
    "model.dim=32", "model.num_heads=2", "model.num_layers=3", "model.vocab_size=512", "model.document_start=10",
    "model.seq_len=96", "train.batch_tokens=768", "train.num_steps=9", "eval.batch_tokens=512", "eval.tokens=1000",
    "precision.compute=fp32", "precision.orthogonalize=fp32", "data.tokenizer=bytes", "exec.attention=reference",
)  # fmt: skip


@pytest.fixture
def call(monkeypatch, capsys):
    """call(*words): the program, its launches in forked processes; the exit code or last words, stdout and stderr."""
    monkeypatch.setattr(scaling, "run", launch)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["eight_gpus", *map(str, words)])
        ended = 0
        try:
            eight_gpus.main()
        except SystemExit as said:
            ended = said.code
        return ended, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_all_of_it_on_two_processes(tmp_path, tiny_data, call):
    out = tmp_path / "out"
    words = ["exec.device=cpu", "exec.compile=off", "exec.threads=1", *(f"record-third:{word}" for word in SMALL)]
    words += ["--gpus", 2, "--trained", "record-third", "--steps-only", "tiny", "--data", tiny_data]
    words += ["--runs", tmp_path / "runs", "--out", out, "--steps", 1, "--profile", 0]
    left, _, _ = call(*words, "--within", 0)
    assert left.count("left, call again") == 6
    ended, stdout, stderr = call(*words)
    assert ended == 0, stderr
    rows = [json.loads(line) for line in (out / "record-third.jsonl").read_text().splitlines()]
    stages = [(row["gpus"], row["stage"]) for row in rows if row["benchmark"] == "scaling"]
    assert stages == [(gpus, f"stage {i}") for gpus in (2, 1) for i in range(3)]
    assert not any("kernels" in row for row in rows)  # no profile was asked for; test_scaling_bench has one
    trained = {row["gpus"]: row for row in rows if row["benchmark"] == "training"}
    assert trained[2]["warm_start_s"] > 0
    assert trained[2]["differing"] == []
    assert trained[2]["val_loss"] == pytest.approx(trained[1]["val_loss"], abs=0.01)
    assert RunRecord.load(out / "record-third-1337-2gpu.record.json").world_size == 2
    table = (out / "scaling.md").read_text()
    assert "At the end of training on 2 GPUs all parameters are the same bits on every rank." in table
    assert table.count("| stage 2 | 2 |") == table.count("| middle | 2 |") == 1
    assert table.strip() in stdout
    ended, stdout, stderr = call(*words, "--within", 0)
    assert ended == 0, stderr
    assert stdout.count("done before") == 6


def test_what_matters_most_comes_first():
    jobs = plan(8, ["record-third", "fast"], ["gpt2"])
    assert jobs[0] == Job("record-third", "training", 8)
    assert len(set(jobs)) == len(jobs) == 16
    assert {job.gpus for job in jobs[-6:]} == {4, 2}
    assert {(job.recipe, job.kind, job.gpus) for job in jobs} >= {
        (recipe, kind, gpus) for recipe in ("record-third", "fast") for kind in ("training", "steps") for gpus in (1, 8)
    }
    assert [job.gpus for job in plan(4, [], ["gpt2"])] == [4, 1, 2]


def test_recipes_that_are_not_registered_are_not_asked_for():
    args = eight_gpus.parser().parse_intermixed_args(["--out", "x"])
    assert args.trained[0] == "record-third"
    assert args.steps_only == ("gpt2",)
    assert eight_gpus._registered(("fast of another world", "tiny")) == ("tiny",)


def test_words_for_all_and_for_one():
    words = ["exec.compile=off", "gpt2:train.lanes=4", "tiny:data.name=a:b", "train.lanes=2"]
    assert words_for("gpt2", words) == ["exec.compile=off", "train.lanes=4", "train.lanes=2"]
    assert words_for("tiny", words) == ["exec.compile=off", "data.name=a:b", "train.lanes=2"]
    assert words_for("tiny", ["data.dir=C:x"]) == ["data.dir=C:x"]


def test_parameters_that_differ_are_a_failure(tmp_path):
    row = {"benchmark": "agreement", "recipe": "gpt2", "gpus": 8, "differing": ["head.weight"]}
    (tmp_path / "gpt2.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "differing": []}) + "\n")
    assert differing(tmp_path) == ["gpt2 on 8: 1 parameters differ between processes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trained", "nonesuch", "--gpus", 2), "there is no recipe nonesuch"),
        (("--trained", "tiny", "--steps-only", "none", "--gpus", 2, "train.num_stepz=3"), "num_stepz"),
    ],
)
def test_mistakes(words, message, tmp_path, call):
    ended, _, stderr = call(*words, "--out", tmp_path / "out")
    assert ended == 2
    assert message in stderr
    assert not list(tmp_path.rglob("*.jsonl"))
