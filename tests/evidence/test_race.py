"""Races: the plan comes first, turns are taken, nothing is lost to a kill or a failure, budgets are calibrated once."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from nanosprint.config import Execution
from nanosprint.data.lock import try_lock
from nanosprint.evidence import race as race_module
from nanosprint.evidence.jobs import Runner
from nanosprint.evidence.race import carry_on, is_settled, off_budget, start
from nanosprint.evidence.series import load_race, plan_race
from nanosprint.evidence.workers import Workers
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir, Series
from nanosprint.training.request import Budget, load_request, parse_budget

SHORT = ("train.num_steps=3", "eval.every=1")
TWO = {"thin": SHORT, "fat": (*SHORT, "model.dim=48")}


def test_turns_are_taken_and_every_run_knows_its_place(plan, in_process, tmp_path):
    race = plan(TWO, runs=3)
    folder = start(race, tmp_path / "race")
    assert load_race(folder) == race
    carry_on(folder, print)
    assert in_process == ["thin-5", "fat-5", "thin-6", "fat-6", "thin-7", "fat-7"]
    thin = race.contestant("thin").series
    assert thin != race.contestant("fat").series
    for i in range(3):
        record = RunRecord.load(folder / f"thin-{5 + i}")
        assert record.series == Series(id=thin, index=i, size=3)
        assert (record.seed, record.recipe_hash) == (5 + i, load_recipe("tiny", SHORT).hash)
    events = [line for line in RunDir(folder / "thin-5").read_metrics() if line["kind"] == "event"]
    assert "resume" not in [event["name"] for event in events]  # it was begun, not resumed
    assert not list(folder.glob("*/checkpoints"))


def test_the_plan_is_there_before_anything_runs(plan, in_process, tmp_path, monkeypatch):
    folder = start(plan(TWO, keep_checkpoints=True), tmp_path / "race")
    planned = json.loads((folder / "race.json").read_text())
    assert [(one["contestant"], one["seed"], one["index"]) for one in planned["order"]] == [
        ("thin", 5, 0), ("fat", 5, 0), ("thin", 6, 1), ("fat", 6, 1),
    ]  # fmt: skip
    assert in_process == []
    carry_on(folder, print)
    assert len(list(folder.glob("*/checkpoints/*.pt"))) == 4


def test_what_is_finished_is_kept_and_the_rest_made_up_for(plan, in_process, tmp_path):
    folder = start(plan(TWO), tmp_path / "race")
    carry_on(folder, print)
    kept = (folder / "thin-5/record.json").read_bytes()
    expected = RunRecord.load(folder / "fat-5").val_loss
    (folder / "fat-5/record.json").unlink()  # killed
    (folder / "fat-6/record.json").unlink()
    for path in [*(folder / "fat-6").iterdir()]:  # never begun
        path.unlink()
    (folder / "fat-6").rmdir()
    in_process.clear()
    carry_on(folder, print)
    assert in_process == ["fat-5", "fat-6"]
    assert (folder / "thin-5/record.json").read_bytes() == kept
    assert RunRecord.load(folder / "fat-5").val_loss == expected
    in_process.clear()
    carry_on(folder, print)
    assert in_process == []


def test_a_failing_run_is_told_and_stops_no_other(plan, in_process, tmp_path):
    said = []
    wild = (*SHORT, "groups.0.lr=1e38", "groups.1.lr=1e38", "train.num_steps=6")[1:]
    folder = start(plan({"wild": wild, "thin": SHORT}), tmp_path / "race")
    carry_on(folder, said.append)
    assert in_process == ["wild-5", "thin-5", "wild-6", "thin-6"]
    assert any(line.startswith("wild seed 5: failed: the loss became") for line in said)
    assert RunRecord.load(folder / "wild-5").status == "diverged"
    assert RunRecord.load(folder / "thin-6").status == "finished"
    in_process.clear()
    carry_on(folder, said.append)
    assert in_process == []  # divergence is an outcome: trying until it passes would be cheating


def test_a_run_that_failed_is_tried_again(plan, in_process, tmp_path, monkeypatch):
    from nanosprint.training import loop

    def broken(*_):
        raise ValueError("broken")

    folder = start(plan({"thin": SHORT}), tmp_path / "race")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", broken)
        carry_on(folder, print)
    assert RunRecord.load(folder / "thin-5").status == "failed"
    carry_on(folder, print)
    assert [RunRecord.load(folder / f"thin-{seed}").status for seed in (5, 6)] == ["finished", "finished"]


def test_a_time_budget_is_calibrated_once_for_each_recipe(plan, in_process, tmp_path, monkeypatch):
    from nanosprint.training import setup

    measured = iter([50.0, 100.0])
    monkeypatch.setattr(setup, "measure_step_ms", lambda *_, **__: next(measured))
    folder = start(plan(TWO, runs=3, budget=parse_budget("0.5s")), tmp_path / "race")
    carry_on(folder, print)
    steps = {name: [RunRecord.load(folder / f"{name}-{seed}").steps for seed in (5, 6, 7)] for name in TWO}
    assert steps == {"thin": [10, 10, 10], "fat": [5, 5, 5]}
    assert len({RunRecord.load(folder / f"thin-{seed}").recipe_hash for seed in (5, 6, 7)}) == 1


def test_those_with_runs_to_do_are_prepared(plan, tmp_path, monkeypatch):
    """From the request that the run will have; whatever comes of it, turns are taken as ever."""
    asked, trained, settled, said = [], [], set(), []

    def prepare(self, runs, at_once):
        asked.append({group: (run.name, load_request(RunDir(run)).budget, at_once) for group, run in runs.items()})
        return {"thin": 1}, {"load": 1.0}

    def train(self, run, **_):
        trained.append(run.name)
        raise ValueError("not today")

    monkeypatch.setattr(Workers, "prepare", prepare)
    monkeypatch.setattr(Runner, "train", train)
    monkeypatch.setattr(race_module, "is_settled", lambda run: run.name in settled)
    budget = parse_budget("5s")
    race = plan({**TWO, "tall": (*SHORT, "model.num_layers=3")}, budget=budget)
    folder = start(race, tmp_path / "race")
    carry_on(folder, said.append, prepare=2)
    assert asked == [{name: (f"{name}-5", budget, 2) for name in ("thin", "fat", "tall")}]
    assert said[1] == "preparing 3 of 3: thin, fat, tall"
    assert said[2].startswith("thin: could not be prepared, its runs start by themselves: ")
    assert said[3] == "prepared 2 in 1 s (load 1)"
    assert trained == [entry.dir for entry in race.order]
    settled |= {"thin-5", "fat-5", "fat-6"}
    asked.clear()
    carry_on(folder, said.append, prepare=2)
    assert asked == [{"tall": ("tall-5", budget, 2), "thin": ("thin-6", budget, 2)}]
    settled |= {"tall-5", "tall-6"}
    carry_on(folder, said.append, prepare=2)
    assert len(asked) == 1  # one alone has nobody beside it


def test_nothing_to_prepare_where_runs_share_no_process(plan, tmp_path):
    folder = start(plan(TWO, processes="each"), tmp_path / "race")
    with pytest.raises(ValueError, match="--prepare 2 is for runs that share a process"):
        carry_on(folder, print, prepare=2)


def test_who_shares_a_process(plan, tmp_path):
    shared, each = plan(TWO), plan(TWO, processes="each")
    assert [shared.group(entry) for entry in shared.order] == ["thin", "fat", "thin", "fat"]
    assert {each.group(entry) for entry in each.order} == {None}
    several = replace(shared, execution=replace(shared.execution, gpus=2))
    assert {several.group(entry) for entry in several.order} == {None}
    assert load_race(start(each, tmp_path / "race")).processes == "each"  # also where it is resumed


def test_a_run_stopped_by_max_steps_is_settled(plan, in_process, tmp_path):
    folder = start(plan({"thin": SHORT}, max_steps=2), tmp_path / "race")
    carry_on(folder, print)
    run = RunDir(folder / "thin-5")
    assert (RunRecord.load(run).status, RunRecord.load(run).steps) == ("stopped", 2)
    assert is_settled(run)
    assert load_request(run).max_steps == 2


def test_refusals(plan, tmp_path, tiny_data):
    with pytest.raises(ValueError, match="--runs 1: how much seeds scatter takes at least 2"):
        plan({"thin": SHORT}, runs=1)
    with pytest.raises(ValueError, match="names give no folder of its own"):
        plan({"a b": SHORT, "a-b": SHORT})
    folder = start(plan({"thin": SHORT}), tmp_path / "race")
    with pytest.raises(ValueError, match="already holds a race: choose another folder, or go on with --resume"):
        start(plan({"thin": SHORT}), folder)
    with pytest.raises(ValueError, match="is not empty"):
        start(plan({"thin": SHORT}), tmp_path)
    with pytest.raises(ValueError, match="holds no race"):
        carry_on(tmp_path, print)
    recipe = load_recipe("tiny", ["data.name=nothing"])
    race = plan_race({"lost": recipe}, runs=2, first_seed=1, execution=Execution())
    with pytest.raises(ValueError, match="the data set 'nothing' is not here"):
        start(race, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    lock = try_lock(folder / ".lock")
    with lock, pytest.raises(ValueError, match="another process is carrying out the race"):
        carry_on(folder, print)
    text = (folder / "race.json").read_text()
    (folder / "race.json").write_text(text.replace('"num_steps": 3', '"num_steps": 4'))
    with pytest.raises(ValueError, match=r"race.json was edited: the recipe of thin has hash"):
        load_race(folder)


def test_killed_and_resumed_by_the_command_line(tmp_path, tiny_data, nanosprint):
    """The race is killed while a run trains. That run ends by itself, and --resume waits for it and adds the others."""
    words = ["race", "tiny", "--runs", "2", "--seed", "3", "--out", "race", "--device", "cpu", "--data", str(tiny_data)]
    words += ["--target", "5", "train.num_steps=100"]
    command = [sys.executable, "-m", "nanosprint", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "race/tiny-3/metrics.jsonl", time.monotonic() + 100
    while time.monotonic() < deadline and not (metrics.exists() and '"kind": "train"' in metrics.read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    result = nanosprint("race", "--resume", "race")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2/2" in result.stdout
    report = json.loads((tmp_path / "race/report.json").read_text())
    records = [RunRecord.load(tmp_path / f"race/tiny-{seed}") for seed in (3, 4)]
    assert [row["val_loss"] for row in report["results"]] == [record.val_loss for record in records]
    assert [(record.steps, record.series.index) for record in records] == [(100, 0), (100, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["race"], "give a RECIPE or more, or --resume DIR"),
        (["race", "tiny"], "say how many --runs each recipe gets"),
        (["race", "tiny", "tiny", "--runs", "2"], "recipe 'tiny' is named twice"),
        (["race", "tinny", "--runs", "2"], "did you mean 'tiny'?"),
        (["race", "tiny", "--runs", "1"], "1 is not in the range x>=2"),
        (["race", "--resume", "nowhere"], "nowhere holds no race"),
        (["race", "tiny", "--resume", "nowhere"], "'tiny' has no place beside --resume"),
    ],
)
def test_mistakes(words, message, nanosprint):
    result = nanosprint(*words)
    assert message in result.stderr
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_several_at_a_time_each_contestant_on_one_gpu(plan, tmp_path, monkeypatch):
    """With processes of their own, since two runs in one would share its random state."""
    real, places = Runner.train, []

    def train(self, run, *, gpu=None, **options):
        places.append((run.name.split("-")[0], gpu))
        real(self, run, gpu=gpu, **options)

    monkeypatch.setattr(Runner, "train", train)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    folder = start(plan(TWO, processes="each", budget=parse_budget("0.001M")), tmp_path / "race")
    race = carry_on(folder, print, 2)
    assert sorted(set(places)) in ([("fat", "3"), ("thin", "5")], [("fat", "5"), ("thin", "3")])
    assert len(places) == 4
    steps = [RunRecord.load(folder / entry.dir).steps for entry in race.order]
    assert len(set(steps)) == 1
    with pytest.raises(ValueError, match="names 2"):
        carry_on(folder, print, 3)


def test_several_at_a_time_are_of_one_process_each(plan, tmp_path):
    race = replace(plan(TWO), execution=Execution(device="cpu", gpus=2))
    folder = start(race, tmp_path / "race")
    with pytest.raises(ValueError, match=r"--gpus-parallel 2 is for runs of one process: this race has --gpus 2"):
        carry_on(folder, print, 2)


def test_a_run_far_from_its_budget_is_told():
    """A tenth is the limit, either way; tokens are met exactly, and without a budget there is nothing to say."""
    budget = Budget(amount=30, unit="seconds")
    assert [off_budget(budget, seconds, 300, 300) for seconds in (27.5, 30.0, 32.5)] == ["", "", ""]
    assert all("FAR FROM ITS BUDGET of 30 s" in off_budget(budget, seconds, 300, 300) for seconds in (16.6, 36.9))
    assert off_budget(Budget(amount=30, unit="tokens"), 1.0, 300, 300) == off_budget(None, 1.0, 300, 300) == ""
    assert off_budget(budget, 16.6, 2, 2) != off_budget(budget, 20.0, 2, 2) == ""  # a third step would take 30 s
    assert off_budget(budget, 16.6, 150, 300) == ""  # --max-steps, or stopped
