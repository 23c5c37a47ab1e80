"""`nanosprint verify` on runs that were really trained: table, JSON, exit codes."""

import json
import shutil
from dataclasses import replace

import pytest

from nanosprint.config.recipe import Execution
from nanosprint.recipes import load_recipe
from nanosprint.results.metrics import metrics_sha256
from nanosprint.results.runs import RunDir, Series
from nanosprint.results.verify import verify
from nanosprint.training.api import carry_out
from nanosprint.training.request import RunRequest, load_request, start_run, timestamp

TARGET = 3.0  # half of what the tiny recipe starts from, so that a few steps beat it by far


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_data):
    """A folder with a series of three short runs."""
    folder = tmp_path_factory.mktemp("claim") / "series"
    for index in range(3):
        request = RunRequest(
            recipe=load_recipe("tiny"),
            execution=Execution(device="cpu", compile="off"),
            seed=10 + index,
            data=str(tiny_data),
            series=Series(id="tiny-1", index=index, size=3),
            created=timestamp(),
        )
        carry_out(request, start_run(request, folder / f"run-{index}"))
    return folder


@pytest.fixture
def series(trained, tmp_path):
    """The same to be damaged."""
    return shutil.copytree(trained, tmp_path / "series")


def test_trained_runs_are_accepted(series, nanosprint):
    result = nanosprint("verify", series, "--target", TARGET)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout
    assert result.stdout.count("pass") == 14
    assert "accepted: mean validation loss below 3 at p < 0.01, 3 runs" in result.stdout
    assert nanosprint("verify", *sorted(series.iterdir()), "--target", TARGET).stdout == result.stdout


def test_a_target_that_was_missed(series, nanosprint):
    result = nanosprint("verify", series, "--target", 1.0)
    assert result.returncode == 1
    assert "refused (target): mean validation loss below 1 at p < 0.01" in result.stdout
    assert result.stderr == ""


def test_json(series, nanosprint):
    result = nanosprint("verify", series, "--target", TARGET, "--alpha", "0.001", "--json")
    verdict = json.loads(result.stdout)
    rules = {rule["name"]: rule["passed"] for rule in verdict["rules"]}
    assert (verdict["target"], verdict["alpha"], verdict["losses"]["n"]) == (TARGET, 0.001, 3)
    assert verdict["accepted"] == all(rules.values()) == (result.returncode == 0)
    assert rules["target"] == (verdict["p"] < 0.001)
    assert len(verdict["runs"]) == 3


def test_an_edited_loss_and_a_run_left_out(series, nanosprint):
    log = RunDir(series / "run-1").metrics_path
    log.write_text(log.read_text().replace('"loss": 2.', '"loss": 1.', 1))
    shutil.rmtree(series / "run-2")
    result = nanosprint("verify", series, "--target", TARGET)
    assert result.returncode == 1
    assert "refused (unedited, series)" in result.stdout
    assert "run-1: metrics.jsonl is not the one" in result.stdout
    assert "run 2 of 3 (counted from 0) left out" in result.stdout


def test_damage_is_a_refusal(series, nanosprint):
    (series / "run-0" / "record.json").write_text("{")
    result = nanosprint("verify", series, "--target", TARGET, "--json")
    assert result.returncode == 1
    verdict = json.loads(result.stdout)
    assert [rule["name"] for rule in verdict["rules"]] == ["readable"]
    assert "record.json is damaged at line 1" in verdict["rules"][0]["detail"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify"], "Missing argument 'RUNS...'"),
        (["verify", "nowhere"], "nowhere is not a run directory"),
        (["verify", ".", "--alpha", "2"], "alpha=2.0 must lie between 0 and 0.5"),
        (["verify", ".", "--target", "nan"], "target=nan is not a loss"),
        (["verify", ".", "--target", "low"], "'low' is not a valid float"),
    ],
)
def test_mistakes_are_usage_errors(words, message, nanosprint):
    result = nanosprint(*words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_was_stopped_and_resumed(trained, tiny_data, tmp_path):
    """Its log repeats steps and has a validation more; what holds is what counts."""
    series = shutil.copytree(trained, tmp_path / "series", ignore=shutil.ignore_patterns("run-2"))
    request = replace(load_request(RunDir(trained / "run-2")), max_steps=7)
    run = start_run(request, series / "run-2")
    carry_out(request, run)
    assert not verify([series], TARGET).accepted
    carry_out(replace(request, max_steps=None), run, resume=True)
    verdict = verify([series], TARGET)
    assert verdict.accepted, verdict.rules


def test_the_log_ends_with_the_record(trained):
    run = RunDir(trained / "run-0")
    record, last = json.loads(run.record_path.read_text()), run.read_metrics()[-1]
    assert (last["name"], record["status"]) == ("record", "finished")
    assert record.pop("metrics_sha256") == metrics_sha256(run.metrics_path)
    assert last["record"] == record
    assert record["clock_graphs"] == 0
