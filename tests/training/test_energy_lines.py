"""Energy by step: which lines of a run's log carry the joules so far."""

import pytest

from nanosprint.results import RunDir, RunRecord, plot_runs
from nanosprint.training import loop
from nanosprint.training.energy import EnergyMeter


class Counter:
    """A source that has used seven more joules at every read."""

    name, poll_s = "fake", None

    def __init__(self):
        self.total = 0.0

    def joules(self):
        self.total += 7.0
        return self.total

    def close(self):
        pass


@pytest.mark.parametrize(("every_s", "steps_with_joules"), [(0.0, {2, 4, 5}), (1e9, set())])
def test_which_lines_have_joules(train_tiny, tmp_path, monkeypatch, every_s, steps_with_joules):
    monkeypatch.setattr("nanosprint.training.api.open_meter", lambda device, gpus=(): EnergyMeter(Counter()))
    monkeypatch.setattr(loop, "ENERGY_EVERY_S", every_s)
    path = train_tiny("run", "train.num_steps=5", "train.log_every=2", "eval.every=5")
    lines = [line for line in RunDir(path).read_metrics() if line["kind"] in ("train", "val")]
    assert {line["step"] for line in lines if line["kind"] == "train" and "energy_j" in line} == steps_with_joules
    val = [line["energy_j"] for line in lines if line["kind"] == "val"]
    assert val[-1] == RunRecord.load(path).energy_j > 0
    record = RunRecord.load(path)
    assert record.mean_watts == pytest.approx(1000 * record.energy_j / record.train_ms)
    assert record.tokens_per_kwh == pytest.approx(record.tokens / (record.energy_j / 3.6e6))
    measured = [line["energy_j"] for line in lines if "energy_j" in line]
    assert measured == sorted(measured)
    assert any(line.get("watts", 0) > 0 for line in lines)
    plot_runs([path], tmp_path / "j.svg", "joules")


def test_unmeasured_runs_say_why_there_is_no_axis_of_joules(train_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("nanosprint.training.api.open_meter", lambda device, gpus=(): EnergyMeter("no counter here"))
    path = train_tiny("run", "train.num_steps=2")
    assert RunRecord.load(path).mean_watts is RunRecord.load(path).tokens_per_kwh is None
    assert not any("energy_j" in line or "watts" in line for line in RunDir(path).read_metrics())
    with pytest.raises(ValueError, match="x='joules' needs: no counter here"):
        plot_runs([path], tmp_path / "j.svg", "joules")
