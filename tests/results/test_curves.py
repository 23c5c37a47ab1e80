"""Curves as numbers: bands over seeds, and joules by step."""

import xml.etree.ElementTree as ET

import pytest

from nanosprint.results import RunDir, encode_line, plot_runs
from nanosprint.results.curves import banded, load_curves


def make_run(path, losses, *, hash="aaa", seed=0, pace=1.0, val=(), energy=()):
    """A run with loss `losses[i]` at step i + 1, `pace` seconds a step; `energy`: joules by step."""
    path.mkdir()
    run = RunDir(path)
    run.write_request({"recipe": {"name": "tiny"}, "recipe_hash": hash, "seed": seed})
    lines = [{"kind": "train", "step": i, "loss": loss} for i, loss in enumerate(losses, start=1)]
    lines += [{"kind": "val", "step": step, "loss": loss} for step, loss in val]
    for line in lines:
        line.update(tokens=line["step"] * 8, train_ms=line["step"] * 1000 * pace)
        if line["step"] in dict(energy):
            line["energy_j"] = dict(energy)[line["step"]]
    run.metrics_path.write_text("".join(encode_line(line) + "\n" for line in lines))
    return run


def test_a_band_is_mean_lowest_and_highest_at_common_steps(tmp_path):
    seeds = [(3.0, 2.0), (5.0, 2.5), (4.0, 1.5)]
    runs = [
        make_run(tmp_path / f"{i}", y, seed=i, pace=1 + i, val=[(2, y[1] + 1), *([(1, 9.0)] if i else [])])
        for i, y in enumerate(seeds)
    ]
    (band,) = banded([load_curves(run, "seconds") for run in runs])
    assert (band.num_runs, band.line.y, band.line.low, band.line.high) == (3, [4.0, 2.0], [3.0, 1.5], [5.0, 2.5])
    assert band.line.x == [2.0, 4.0]  # steps stand at their mean time
    assert (band.val.steps, band.val.y, band.val.low, band.val.high) == ([2], [3.0], [2.5], [3.5])
    assert band.seconds == 4.0


def test_only_runs_of_one_recipe_that_end_together_share_a_band(tmp_path):
    def load(name, losses, **options):
        return load_curves(make_run(tmp_path / name, losses, **options), "step")

    full = [load(f"full{i}", (3.0, 2.0), seed=i) for i in range(3)]
    short, other = load("short", (3.0,)), load("other", (3.0, 2.0), hash="bbb")
    assert [c.num_runs for c in banded([other, *full, short])] == [1, 3, 1]
    assert banded([*full[:2], short, other]) == [*full[:2], short, other]


def words_of(path):
    return " ".join(ET.fromstring(path.read_bytes()).itertext())


def test_bands_in_a_picture(tmp_path):
    runs = [make_run(tmp_path / f"{i}", (3.0, 2.0), seed=i, val=[(2, 1.5 + i / 10)]) for i in range(3)]
    runs.append(make_run(tmp_path / "rival", (3.0, 2.0), hash="bbb", seed=9, val=[(2, 1.9)]))
    plot_runs(runs, tmp_path / "on.svg")
    assert "tiny, 3 seeds  1.600" in words_of(tmp_path / "on.svg")
    assert "4 runs" in words_of(tmp_path / "on.svg")
    assert "bands: lowest to highest run" in words_of(tmp_path / "on.svg")
    plot_runs(runs, tmp_path / "off.svg", bands=False)
    assert "tiny, seed 2  1.700" in words_of(tmp_path / "off.svg")
    assert "band" not in words_of(tmp_path / "off.svg")
    plot_runs(runs[:3], tmp_path / "one.svg", "seconds")
    assert "mean validation loss 1.600 of 3 runs after 2.0 s of training" in words_of(tmp_path / "one.svg")


def test_names_are_no_formulas(tmp_path):
    runs = [make_run(tmp_path / f"{i}$\\x$", (3.0, 2.0), hash=f"{i}") for i in range(20)]
    plot_runs(runs[:2], tmp_path / "two.svg", title=r"50 $\x$")
    plot_runs(runs, tmp_path / "many.svg")
    assert r"50 $\x$" in words_of(tmp_path / "two.svg")
    assert r"19$\x$" in words_of(tmp_path / "many.svg")


def test_joules_between_readings_lie_on_a_line_over_time(tmp_path):
    run = make_run(tmp_path / "run", (5.0, 4.0, 3.0, 2.0, 1.0), val=[(4, 2.5)], energy=[(2, 100.0), (4, 400.0)])
    curves = load_curves(run, "joules")
    assert curves.train.x == [50.0, 100.0, 250.0, 400.0]  # step 5 lies beyond the last reading
    assert (curves.val.x, curves.val.y) == ([400.0], [2.5])
    plot_runs([run], tmp_path / "j.svg", "joules")
    assert "joules of training" in words_of(tmp_path / "j.svg")


def test_a_run_without_energy_is_refused_for_joules(tmp_path):
    run = make_run(tmp_path / "run", (2.0,))
    with pytest.raises(ValueError, match=r"run has no energy by step, which x='joules' needs: its log was written"):
        plot_runs([run], tmp_path / "j.svg", "joules")
    assert not (tmp_path / "j.svg").exists()
