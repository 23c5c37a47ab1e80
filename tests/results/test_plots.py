"""Pictures of runs: what is drawn is checked on its parts, the file by its format."""

import itertools
import math
import os
import random
import sys
import xml.etree.ElementTree as ET

import pytest

from nanosprint.results import RunDir, encode_line, plot_runs
from nanosprint.results.curves import Curve, load_curves, smooth
from nanosprint.results.plots import loss_range, spread


def make_run(path, train=(), val=(), recipe="tiny", seed=0, fields=True):
    path.mkdir()
    run = RunDir(path)
    run.write_request({"recipe": {"name": recipe}, "seed": seed})
    lines = []
    for kind, points in (("train", train), ("val", val)):
        for step, loss in points:
            extra = {"tokens": step * 512, "train_ms": step * 20.0} if fields else {}
            lines.append({"kind": kind, "step": step, "loss": loss, **extra})
    run.metrics_path.write_text("".join(encode_line(line) + "\n" for line in lines))
    return run


def falling(steps, seed=0, floor=1.5):
    noise = random.Random(seed)
    return [(s, floor + 3 * math.exp(-s / 40) + noise.gauss(0, 0.05)) for s in steps]


ODD_RUNS = {
    "ordinary": (falling(range(1, 400)), falling(range(50, 400, 50))),
    "one point of each": ([(1, 4.0)], [(1, 4.1)]),
    "training only": (falling(range(10, 30, 10)), []),
    "validation only": ([], [(5, 3.0)]),
    "constant": ([(s, 2.0) for s in range(1, 50)], [(49, 2.0)]),
    "zero": ([(0, 0.0)], []),
    "diverged": ([(1, 3.0), (2, math.nan), (3, math.inf)], []),
    "spike": ([(s, 1e9 if s == 25 else 2 + 1 / s) for s in range(1, 50)], [(49, 2.0)]),
}


@pytest.mark.parametrize("name", ODD_RUNS)
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_odd_runs_give_a_picture(tmp_path, name, suffix):
    run = make_run(tmp_path / "run", *ODD_RUNS[name])
    out = plot_runs([run], tmp_path / f"loss{suffix}")
    data = out.read_bytes()
    assert len(data) > 3000
    if suffix == ".png":
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert data.rstrip().endswith(b"IEND\xaeB`\x82")
    else:
        assert "tiny" in "".join(ET.fromstring(data).itertext())
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"loss{suffix}", "run"]


@pytest.mark.parametrize("x", ["step", "tokens", "seconds"])
def test_svg_text_tells_the_outcome(tmp_path, x):
    run = make_run(tmp_path / "run", falling(range(1, 101)), [(50, 2.5), (100, 1.2345)])
    plot_runs([run.path], tmp_path / "a.svg", x)
    words = " ".join(ET.fromstring((tmp_path / "a.svg").read_bytes()).itertext())
    assert "validation loss 1.234 after 2.0 s of training and 51,200 tokens" in words
    assert {"step": "optimizer steps", "tokens": "training tokens", "seconds": "seconds of training"}[x] in words
    plot_runs([run.path], tmp_path / "b.svg", x)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("count", [2, 5, 20])
def test_several_runs_are_each_named(tmp_path, count):
    runs = [make_run(tmp_path / f"r{i}", falling(range(1, 60), i), [(59, 1.5 + i / 100)], seed=i) for i in range(count)]
    plot_runs(runs, tmp_path / "all.svg", title="Ten seeds", bands=False)
    words = " ".join(ET.fromstring((tmp_path / "all.svg").read_bytes()).itertext())
    assert "Ten seeds" in words
    for i in range(count):
        assert f"tiny, seed {i}" in words
        assert f"{1.5 + i / 100:.3f}" in words


def test_same_recipe_and_seed_are_told_apart_by_folder(tmp_path):
    runs = [make_run(tmp_path / name, falling(range(1, 9))) for name in ("first", "second")]
    plot_runs(runs, tmp_path / "x.svg")
    words = " ".join(ET.fromstring((tmp_path / "x.svg").read_bytes()).itertext())
    assert "first" in words
    assert "second" in words


def test_curves_follow_resumes_and_leave_out_nan(tmp_path):
    run = make_run(tmp_path / "run", [(1, 4.0), (2, math.nan), (3, 3.0), (4, 9.0)])
    with run.metrics_path.open("a") as file:
        file.write(encode_line({"kind": "event", "name": "resume", "step": 3}) + "\n")
    curves = load_curves(run, "seconds")
    assert curves.train == Curve([0.02, 0.06], [4.0, 3.0])


def test_bad_input(tmp_path):
    run = make_run(tmp_path / "run", [(1, 2.0)])
    with pytest.raises(ValueError, match="x='hours': the axes are step, tokens, seconds, joules"):
        plot_runs([run], tmp_path / "a.png", "hours")
    with pytest.raises(ValueError, match=r"a\.pdf: a plot is a \.png or a \.svg file"):
        plot_runs([run], tmp_path / "a.pdf")
    with pytest.raises(ValueError, match="no run was given"):
        plot_runs([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="not a run directory"):
        plot_runs([tmp_path], tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"nothing to plot: no line of its metrics\.jsonl"):
        plot_runs([make_run(tmp_path / "empty")], tmp_path / "a.png")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_runs([make_run(tmp_path / "nan", [(1, math.nan)])], tmp_path / "a.png")
    with pytest.raises(ValueError, match="step 1 has no 'tokens', which x='tokens' needs"):
        plot_runs([make_run(tmp_path / "bare", [(1, 2.0)], fields=False)], tmp_path / "a.png", "tokens")
    run.metrics_path.unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist: the run has logged nothing yet"):
        plot_runs([run], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'nanosprint\[quickstart\]'"):
        plot_runs([make_run(tmp_path / "run", [(1, 2.0)])], tmp_path / "a.png")


def test_crash_keeps_the_old_picture(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [(1, 2.0)])
    (tmp_path / "a.png").write_bytes(b"old")

    def crash(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="No space"):
        plot_runs([run], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == b"old"


def test_nothing_global_is_touched(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot_runs([make_run(tmp_path / "run", [(1, 2.0)])], tmp_path / "a.svg")
    assert dict(matplotlib.rcParams) == before


def test_smooth_is_a_centred_mean():
    y = [1.0, 5.0, 3.0, 8.0, 0.0, 2.0]
    assert smooth(y, 1) == y
    assert smooth(y, 3) == pytest.approx([1.0, 3.0, 16 / 3, 11 / 3, 10 / 3, 2.0])
    assert smooth([2.0 * i for i in range(50)], 9) == pytest.approx([2.0 * i for i in range(50)])  # a line stays one


def test_range_ignores_the_plunge_and_spikes_but_shows_all_lows():
    low, high = loss_range([Curve([], [10.9, 9.0, *[3.0 - i / 1000 for i in range(200)]])])
    assert low < 2.801
    assert 3.0 < high < 3.2
    low, high = loss_range([Curve([], [3.0 - i / 1000 if i != 150 else 50.0 for i in range(200)])])
    assert high < 3.2
    low, high = loss_range([Curve([], [2.0])])
    assert low < 2.0 < high


def test_labels_are_moved_apart_no_more_than_needed():
    assert spread([0.1, 0.9], 0.05) == [0.1, 0.9]
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    for seed in range(50):
        rng = random.Random(seed)
        wanted = [rng.random() for _ in range(12)]
        placed = spread(wanted, 0.06)
        order = sorted(range(12), key=lambda i: wanted[i])
        heights = [placed[i] for i in order]
        assert all(b - a >= 0.06 - 1e-9 for a, b in itertools.pairwise(heights))
        assert heights[0] >= -1e-9
        assert heights[-1] <= 1 + 1e-9
