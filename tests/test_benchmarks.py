"""The ladder's evidence: its jobs are recipes that exist, its runner loses nothing, its tables say what rows say."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import ladder, ladder_runs, ladder_table
from nanosprint.evidence.jobs import Runner
from nanosprint.evidence.workers import Workers
from nanosprint.recipes import load_recipe
from nanosprint.training.request import parse_budget

ROOT = Path(__file__).parent.parent
ARGS = argparse.Namespace(
    rungs=ladder.RUNGS, data="D", seeds=(1, 2), steps=30, cold=False, seconds="60s", tokens="20M", step_tokens=65_536
)
TINY = {"train.num_steps": "2", "eval.tokens": "512", "exec.device": "cpu"}


def row(rung, seed, loss, setting="60s", kind="worth", **more):
    return {
        "kind": kind, "rung": rung, "setting": setting, "seed": seed, "overrides": {}, "cold": False, "steps": 300,
        "tokens": 19_660_800, "train_s": 60.04, "startup_s": 41.2, "tokens_per_s": 327_680.4, "mfu": 0.4236,
        "memory_gib": 26.61, "val_loss": loss, "val_tokens": 1_048_576, "devices": [{"name": "H200"}],
        "versions": {"torch": "2.11"}, "commit": "abcdef0123", "dirty": False,
        "execution": {"attention": "fa2", "tokens_per_microbatch": 65_536}, **more,
    }  # fmt: skip


def test_help():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ladder", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--gpus-parallel" in done.stdout


def test_every_rung_can_be_run_in_both_ways():
    for one in ladder.full_jobs(ARGS, {}):
        recipe = one.request().recipe
        assert recipe.train.num_steps == 30
        assert recipe.train.batch_tokens == load_recipe(one.rung).train.batch_tokens
    jobs = ladder.worth_jobs(ARGS, {"exec.attention": "sdpa"})
    assert len(jobs) == len({one.name for one in jobs}) == 4 * len(ladder.RUNGS)
    for one in jobs:
        request = one.request()
        assert (request.budget, request.execution.attention) == (parse_budget(one.setting), "sdpa")
        recipe = request.recipe
        assert (recipe.train.lanes, recipe.eval.tokens) == (8, 1_048_576)
        assert recipe.with_num_steps(305).validate().groups == load_recipe(one.rung).groups  # rates stay


@pytest.mark.parametrize("step_tokens", [65_536, 32_768])
@pytest.mark.parametrize("rung", ladder.RUNGS)
def test_a_step_of_every_rung_has_as_many_tokens_on_average(rung, step_tokens):
    recipe = load_recipe(rung, ladder.small_batch(rung, step_tokens)).validate()
    stages = [recipe.plan(step).batch_tokens for step in range(recipe.train.num_steps)]
    assert sum(stages) / len(stages) == pytest.approx(step_tokens, rel=0.02)  # a few last steps have the largest batch
    assert {tokens // recipe.train.lanes % 128 for tokens in stages} == {0}


def job(rung, words=None, **more):
    words = TINY if words is None else words
    return ladder_runs.Job(**{"kind": "worth", "rung": rung, "setting": "60s", "seed": 1, "overrides": words, **more})


@pytest.fixture
def trained(monkeypatch):
    """Runs that only say what they were given; a list of (rung, GPU, group)."""
    ran = []

    def train(self, path, *, gpu=None, group=None, environment=None):
        ran.append((path.name.split("-")[1], gpu, group))
        if "muon" in path.name:
            raise ValueError("no such thing (code 1, log)")
        time.sleep(0.2)

    monkeypatch.setattr(Runner, "train", train)
    monkeypatch.setattr(ladder_runs, "row_of", lambda one, folder: row(one.rung, 1, 3.5, overrides=one.overrides))
    return ran


def test_a_failure_costs_no_other_run_and_a_finished_one_is_not_repeated(tmp_path, trained, capsys):
    jobs = [job("muon", {}), job("gpt2", {"train.num_stops": "3"}), job("modern", {}), job("soap", {})]
    ladder_runs.run_jobs(jobs, tmp_path / "rows", tmp_path / "runs", parallel=2)
    ladder_runs.run_jobs(jobs, tmp_path / "rows", tmp_path / "runs")
    assert sorted(rung for rung, *_ in trained) == ["modern", "muon", "muon", "soap"]
    said = capsys.readouterr().out
    assert "worth-muon-60s-1: failed: no such thing (code 1" in said
    assert "worth-gpt2-60s-1: failed: unknown key 'train.num_stops'" in said
    assert "2 of 4 runs to do" in said
    changed = job("modern", {"train.num_steps": "7"})
    ladder_runs.run_jobs([changed], tmp_path / "rows", tmp_path / "runs")
    assert len(trained) == 5


def test_a_rung_stays_on_one_gpu(tmp_path, trained, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    jobs = [job(rung, {}, seed=seed) for rung in ("gpt2", "soap", "modern") for seed in (1, 2)]
    ladder_runs.run_jobs(jobs, tmp_path / "rows", tmp_path / "runs", parallel=2)
    assert {group for *_, group in trained} == {"gpt2", "soap", "modern"}
    assert len(set(trained)) == 3
    assert {gpu for _, gpu, _ in trained} == {"4", "6"}
    with pytest.raises(ValueError, match="--gpus-parallel 3, but CUDA_VISIBLE_DEVICES=4,6 names 2"):
        ladder_runs.run_jobs([job("muon")], tmp_path / "rows", tmp_path / "runs", parallel=3)


def test_rungs_are_prepared_where_they_will_run(tmp_path, trained, monkeypatch):
    asked = {}

    def prepare(self, runs, at_once):
        asked.update(runs)
        return {}, {"load": 0.0}

    monkeypatch.setattr(Workers, "prepare", prepare)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    jobs = [job(rung, {}, seed=seed) for rung in ("gpt2", "soap", "modern", "normuon") for seed in (1, 2)]
    ladder_runs.run_jobs(jobs, tmp_path / "rows", tmp_path / "runs", parallel=2, prepare=2)
    assert {rung: path.name for rung, path in asked.items()} == {one.rung: one.name for one in jobs[::2]}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {one.name for one in jobs}  # each was begun once
    assert sorted(gpu for _, gpu, _ in set(trained)) == ["4", "4", "6", "6"]
    cold = [job("gpt2", cold=True), job("soap", cold=True)]
    with pytest.raises(ValueError, match="--prepare 2 is for runs that share a process"):
        ladder_runs.run_jobs(cold, tmp_path / "rows", tmp_path / "runs", prepare=2)


def test_some_runs_share_with_none():
    assert job("muon").group == "muon"
    assert job("muon", cold=True).group is None
    assert job("muon", {"exec.gpus": "2"}).group is None


def test_runs_of_a_rung_share_what_is_compiled(tmp_path, tiny_data, capsys):
    jobs = [job("tiny", seed=seed, setting="2 steps", data=str(tiny_data)) for seed in (1, 2)]
    jobs.append(job("tiny", kind="full", cold=True, data=str(tiny_data)))
    ladder_runs.run_jobs(jobs, tmp_path / "rows", tmp_path / "runs")
    rows = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "rows").glob("*.json")}
    assert {name: one["shared_graphs"] for name, one in rows.items()} == {
        "worth-tiny-2-steps-1": False, "worth-tiny-2-steps-2": True, "full-tiny-60s-1": False,
    }  # fmt: skip
    assert rows["full-tiny-60s-1"]["val_loss"] == rows["worth-tiny-2-steps-1"]["val_loss"]
    assert "validation loss" in (tmp_path / "runs/worth-tiny-2-steps-2.log").read_text()


def test_nothing_is_started_after_the_limit(tmp_path, capsys):
    ladder_runs.run_jobs([job("muon")], tmp_path / "rows", tmp_path / "runs", stop_after_s=0)
    assert "1 runs were not started" in capsys.readouterr().out


def test_steady_rate_leaves_the_first_steps_out():
    slow = [{"tokens": 100 * i, "train_ms": 1000.0 * i} for i in range(6)]
    fast = [{"tokens": 500 + 100 * i, "train_ms": 5000 + 10.0 * i} for i in range(1, 11)]
    assert ladder_runs.steady_rate(slow + fast) == pytest.approx(10_000)
    assert ladder_runs.steady_rate(slow) is None


def test_tables_from_rows(tmp_path):
    rows = [row("gpt2", 1, 5.0), row("gpt2", 2, 5.1), row("gpt2-rotary", 1, 4.5), row("gpt2-rotary", 2, 4.7)]
    rows += [row("muon", 1, 4.75), row("muon", 1, 4.2, "20M"), row("sub3", 7, 3.9, kind="full", mfu=None)]
    results = tmp_path / "rows"
    results.mkdir()
    for i, one in enumerate(reversed(rows)):
        (results / f"{i}.json").write_text(json.dumps(one))
    doc = tmp_path / "ladder.md"
    doc.write_text("# The ladder\n<!-- full --><!-- /full -->\n<!-- worth -->old<!-- /worth -->\n")
    ladder_table.write_table(results, doc)
    first = doc.read_text()
    assert "| `gpt2` | 5.0000 | 5.1000 | 5.0500 | 0.1000 | - | - | 19.7 | 60.0 |" in first
    assert "| `gpt2-rotary` | 4.5000 | 4.7000 | 4.6000 | 0.2000 | -0.4500 (`gpt2`) | -0.4500 (`gpt2`) |" in first
    assert "| `muon` | 4.7500 | - | 4.7500 | - | +0.1500 (`gpt2-rotary`) | -0.3000 (`gpt2`) |" in first
    assert "| `sub3` | 327,680 | - | 26.6 | 41 (cached) | 300 | fa2 | 65,536 |" in first
    assert first.index("Budget 60s") < first.index("Budget 20M")
    doc.write_text(first.replace("# The ladder", "# My words"))
    ladder_table.write_table(results, doc)
    assert doc.read_text() == first.replace("# The ladder", "# My words")
    doc.write_text("no marks")
    with pytest.raises(ValueError, match=r"no <!-- full --> \.\.\. <!-- /full --> to write a table between"):
        ladder_table.write_table(results, doc)


def test_the_doc_in_the_repository_has_its_marks(tmp_path):
    copy = tmp_path / "ladder.md"
    copy.write_text((ROOT / "docs/ladder.md").read_text())
    ladder_table.write_table(tmp_path, copy)
