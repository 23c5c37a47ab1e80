"""Ten seeds of `shakespeare`, as a claim is made: raced by the command in one process, verified, and shown as a page.

Cut to a size for CI: two layers of 32, thirty steps, a part of the validation text.
"""

import json

import pytest

from nanosprint.results.record import RunRecord

SIZE = ("model.dim=32", "model.num_layers=2", "train.num_steps=30", "eval.tokens=8192", "exec.compile=off")


@pytest.mark.slow
def test_ten_seeds_of_shakespeare(nanosprint, tmp_path):
    options = ("--runs", 10, "--target", 3.2, "--device", "cpu", "--out", "race")
    raced = nanosprint("race", "shakespeare", *SIZE, *options, timeout=400)
    assert raced.returncode == 0, raced.stderr
    report = json.loads((tmp_path / "race/report.json").read_text())
    (one,) = report["contestants"]
    assert one["finished"] == 10
    assert len({result["seed"] for result in report["results"]}) == 10
    assert 0 < one["measures"]["val_loss"]["sd"] < 0.05
    assert one["below_target"]["p"] < 1e-6
    assert one["measures"]["time_to_target_s"]["n"] == 10
    assert (tmp_path / "race/report.html").stat().st_size > 10_000
    runs = sorted(path for path in (tmp_path / "race").iterdir() if path.is_dir())
    assert sum(bool(RunRecord.load(run).shared_graphs) for run in runs) in (0, 9)  # the first is the others' process
    judged = nanosprint("verify", *runs, "--target", 3.2)
    assert judged.returncode == 0, judged.stdout
    assert nanosprint("verify", *runs[1:], "--target", 3.2).returncode == 1  # one left out
    assert nanosprint("verify", *runs, "--target", 1.5).returncode == 1
