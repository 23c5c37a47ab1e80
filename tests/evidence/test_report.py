"""Reports: every number again from records and metrics, by numpy and scipy; what does not count is said."""

import json
import shutil
import sys

import numpy as np
import pytest
from races import train_here
from scipy import stats

from nanosprint.config import Execution
from nanosprint.evidence.jobs import Runner
from nanosprint.evidence.outcome import publish
from nanosprint.evidence.race import carry_on, start
from nanosprint.evidence.report import make_report
from nanosprint.evidence.series import load_race, plan_race
from nanosprint.evidence.tally import read_results
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir

STEPS = ("train.num_steps=6", "eval.every=1", "eval.tokens=512")
TARGET = 4.2


@pytest.fixture(scope="module")
def raced_once(tiny_data, tmp_path_factory):
    """A finished race of three runs each."""
    recipes = {"thin": load_recipe("tiny", STEPS), "fat": load_recipe("tiny", (*STEPS, "model.dim=48"))}
    race = plan_race(
        recipes, runs=3, first_seed=5, execution=Execution(device="cpu"), data=str(tiny_data), target=TARGET
    )
    folder = start(race, tmp_path_factory.mktemp("races") / "race")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "train", train_here([]))
        carry_on(folder, print)
    return folder


@pytest.fixture
def raced(raced_once, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(raced_once, tmp_path / "race")


def losses(folder, name):
    return [RunRecord.load(folder / f"{name}-{seed}").val_loss for seed in (5, 6, 7)]


def test_numbers_again_from_records_and_metrics(raced, capsys):
    report = publish(raced, print)
    assert json.loads((raced / "report.json").read_text()) == report
    thin, fat = losses(raced, "thin"), losses(raced, "fat")
    for one, values in zip(report["contestants"], (thin, fat), strict=True):
        loss = one["measures"]["val_loss"]
        assert loss["n"] == 3
        assert (loss["mean"], loss["sd"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
        interval = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        assert (loss["low"], loss["high"]) == pytest.approx(interval)
        expected = stats.ttest_1samp(values, TARGET, alternative="less")
        assert (one["below_target"]["t"], one["below_target"]["p"]) == pytest.approx(tuple(expected))
        seconds = [RunRecord.load(raced / f"{one['name']}-{seed}").train_ms / 1000 for seed in (5, 6, 7)]
        assert one["measures"]["train_s"]["mean"] == pytest.approx(np.mean(seconds))
    (row,) = report["differences"]["val_loss"]
    expected = stats.ttest_rel(fat, thin)
    assert (row["a"], row["b"], row["paired"], row["n"]) == ("fat", "thin", True, [3, 3])
    assert row["estimate"] == pytest.approx(np.mean(fat) - np.mean(thin))
    assert row["p"] == row["p_holm"] == pytest.approx(expected.pvalue)
    assert (row["low"], row["high"]) == pytest.approx(tuple(expected.confidence_interval()))
    assert row["runs_needed"]["0.001"] >= row["runs_needed"]["0.002"] >= row["runs_needed"]["0.005"] >= 2
    said = capsys.readouterr().out
    text = (raced / "report.md").read_text()
    assert f"{np.mean(thin):.4f}" in said
    assert f"| thin | 3/3 | 6 | {np.mean(thin):.4f} |" in text
    assert "512" in text  # validation targets
    page = (raced / "report.html").read_text()
    assert "<title>Race: thin, fat</title>" in page
    assert f"is below {TARGET:g}" in page
    assert "fat-7" in page


def test_without_matplotlib_a_race_still_has_its_report(raced, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = []
    publish(raced, said.append)
    assert (raced / "report.md").exists()
    assert not (raced / "report.html").exists()
    assert any(word.startswith("no report.html: ") and "matplotlib" in word for word in said)


def test_to_target_by_interpolation(raced):
    results, _ = read_results(load_race(raced), raced)
    for result in results:
        lines = [line for line in RunDir(raced / result.dir).read_metrics() if line["kind"] == "val"]
        falling = np.array([line["loss"] for line in lines])
        first = int(np.argmax(falling <= TARGET))
        around = [first, first - 1]  # numpy wants ascending points
        for field, value in (("train_ms", 1000 * result.time_to_target_s), ("tokens", result.tokens_to_target)):
            points = [line[field] for line in lines]
            assert first > 0
            assert value == pytest.approx(np.interp(TARGET, falling[around], np.array(points)[around]))
        assert result.energy_to_target_j is None or "energy_j" in lines[0]


def test_what_does_not_count_is_said(raced):
    (raced / "thin-5/record.json").unlink()
    path = raced / "fat-6/metrics.jsonl"
    path.write_text(path.read_text().replace('"tokens": 512', '"tokens": 513', 1))
    report = make_report(load_race(raced), raced)
    assert {(p["contestant"], p["seed"], p["problem"]) for p in report["problems"]} == {
        ("thin", 5, "not finished"),
        ("fat", 6, "its metrics are not those that its record was made from"),
    }
    (row,) = report["differences"]["val_loss"]  # only seed 7 is shared: no longer paired
    assert (row["paired"], row["n"]) == (False, [2, 2])
    thin, fat = losses_of(raced, "thin", (6, 7)), losses_of(raced, "fat", (5, 7))
    assert row["p"] == pytest.approx(stats.ttest_ind(fat, thin, equal_var=False).pvalue)
    path = raced / "fat-5/record.json"
    path.write_text(path.read_text().replace('"seed": 5', '"seed": 9'))
    report = make_report(load_race(raced), raced)
    assert "its record is that of another run (seed 9" in report["problems"][1]["problem"]
    (row,) = report["differences"]["val_loss"]
    assert (row["estimate"], row["p"]) == (None, None)  # one run shows no spread


def losses_of(folder, name, seeds):
    return [RunRecord.load(folder / f"{name}-{seed}").val_loss for seed in seeds]


def test_runs_of_unlike_recipes_are_refused(raced):
    path = raced / "thin-6/record.json"
    recipe_hash = RunRecord.load(raced / "thin-6").recipe_hash
    path.write_text(path.read_text().replace(recipe_hash, "0" * 12))
    with pytest.raises(ValueError, match=r"thin-6 trained recipe 0{12}, other runs of thin"):
        make_report(load_race(raced), raced)


def test_unlike_conditions_are_said(raced):
    path = raced / "thin-6/record.json"
    path.write_text(path.read_text().replace('"compute": "fp32"', '"compute": "bf16"'))
    assert make_report(load_race(raced), raced)["conditions"]["unlike"] == ["compute"]
