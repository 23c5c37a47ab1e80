"""The ladder's evidence: its jobs are recipes that exist, its runner loses nothing, its tables say what rows say."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ladder, ladder_runs, ladder_table
from nanosprint.config.edit import parse_overrides
from nanosprint.recipes import load_recipe
from nanosprint.training.request import parse_budget

ROOT = Path(__file__).parent.parent
ARGS = argparse.Namespace(rungs=ladder.RUNGS, data="D", seeds=(1, 2), steps=30, cold=False, seconds="60s", tokens="20M")


def recipe_words(one):
    """The overrides that a job's command line gives to its recipe."""
    words = one.command[one.command.index(one.rung) + 1 : one.command.index("--seed")]
    return parse_overrides(words)


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
        recipe = load_recipe(one.rung, recipe_words(one))
        assert recipe.train.num_steps == 30
        assert recipe.train.batch_tokens == load_recipe(one.rung).train.batch_tokens
    jobs = ladder.worth_jobs(ARGS, {})
    assert len(jobs) == len({one.name for one in jobs}) == 4 * len(ladder.RUNGS)
    for one in jobs:
        parse_budget(one.setting)
        recipe = load_recipe(one.rung, recipe_words(one))
        assert (recipe.train.batch_tokens, recipe.train.lanes, recipe.eval.tokens) == (65_536, 8, 1_048_576)
        assert recipe.with_num_steps(305).validate().groups == load_recipe(one.rung).groups  # rates stay


def fake(name, code):
    return ladder_runs.Job("worth", name, "60s", 1, {"a": "1"}, (sys.executable, "-c", code))


def test_a_failure_costs_no_other_run_and_a_finished_one_is_not_repeated(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(
        ladder_runs,
        "row_of",
        lambda one, folder: ran.append(one.rung) or row(one.rung, 1, 3.5, overrides=one.overrides),
    )
    jobs = [fake("bad", "raise SystemExit('no such thing')"), fake("good", "pass"), fake("late", "pass")]
    ladder_runs.run_jobs(jobs, tmp_path / "rows", tmp_path / "runs", parallel=2)
    ladder_runs.run_jobs(jobs, tmp_path / "rows", tmp_path / "runs")
    assert sorted(ran) == ["good", "late"]
    said = capsys.readouterr().out
    assert "worth-bad-60s-1: failed: no such thing (code 1" in said
    assert "1 of 3 runs to do" in said
    changed = ladder_runs.Job("worth", "good", "60s", 1, {"a": "2"}, jobs[1].command)
    ladder_runs.run_jobs([changed], tmp_path / "rows", tmp_path / "runs")
    assert len(ran) == 3


def test_each_worker_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(ladder_runs, "row_of", lambda one, folder: row(one.rung, 1, 3.5))
    say = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.5)"
    ladder_runs.run_jobs([fake("a", say), fake("b", say)], tmp_path / "rows", tmp_path / "runs", parallel=2)
    assert sorted(path.read_text().strip() for path in (tmp_path / "runs").glob("*.log")) == ["4", "6"]
    with pytest.raises(ValueError, match="--gpus-parallel 3, but CUDA_VISIBLE_DEVICES=4,6 names 2"):
        ladder_runs.run_jobs([fake("c", say)], tmp_path / "rows", tmp_path / "runs", parallel=3)


def test_nothing_is_started_after_the_limit(tmp_path, capsys):
    ladder_runs.run_jobs([fake("a", "pass")], tmp_path / "rows", tmp_path / "runs", stop_after_s=0)
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
