"""Records: round trip, strict loading, the checksum of the metrics."""

import dataclasses
import json
import math
import os

import pytest

from nanosprint.results import DataRecord, Mfu, RunDir, RunRecord, Series, ShardFile, check_metrics, metrics_sha256
from nanosprint.results.record import mean_watts, tokens_per_kwh


def record(**changes):
    values = {
        "status": "finished",
        "recipe": {"name": "tiny", "model": {"dim": 64, "layers": [{"mlp": None}]}},
        "recipe_hash": "0123456789ab",
        "execution": {"device": "cpu", "gpus": 1},
        "seed": 1337,
        "world_size": 1,
        "devices": ({"name": "a CPU", "cores": 2},),
        "versions": {"torch": "2.13.0", "cuda": None},
        "commit": "f" * 40,
        "dirty": False,
        "data": DataRecord(
            dir="data/x", files=(ShardFile(name="x_train_0.bin", tokens=10, sha256="aa"),), val_tokens=9
        ),
        "epochs": 0.5,
        "steps": 10,
        "tokens": 1000,
        "train_ms": 12.5,
        "startup_ms": 3.0,
        "val_loss": 1.75,
        "peak_memory_bytes": 123,
        "tokens_per_s": 80_000.0,
        "mfu": Mfu(value=0.31, peak_flops=1e12, peak_source="measured", flops_per_token=6e6),
        "energy_j": None,
        "energy_reason": "no counter",
        "wait_fraction": 0.01,
        "metrics_sha256": "",
        "series": Series(id="s", index=0, size=3),
        "created": "2026-01-01T00:00:00+00:00",
    }
    return RunRecord(**{**values, **changes})


def run_with(tmp_path, **changes):
    run = RunDir(tmp_path)
    run.write_request({"recipe": {"name": "tiny"}})
    run.metrics_path.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    record(metrics_sha256=metrics_sha256(run.metrics_path), **changes).save(run)
    return run


FIELDS_OF_THE_ISSUE = [
    "schema",
    "status",
    "recipe",
    "recipe_hash",
    "execution",
    "seed",
    "world_size",
    "devices",
    "versions",
    "commit",
    "dirty",
    "data",
    "epochs",
    "steps",
    "tokens",
    "train_ms",
    "startup_ms",
    "val_loss",
    "peak_memory_bytes",
    "tokens_per_s",
    "mfu",
    "energy_j",
    "mean_watts",
    "tokens_per_kwh",
    "metrics_sha256",
    "series",
]


def test_json_holds_the_fields_of_the_issue():
    raw = json.loads(record().to_json())
    assert set(FIELDS_OF_THE_ISSUE) <= raw.keys()
    assert raw["data"]["files"][0] == {"name": "x_train_0.bin", "tokens": 10, "sha256": "aa"}
    assert raw["series"] == {"id": "s", "index": 0, "size": 3}
    assert raw["mfu"]["peak_source"] == "measured"


@pytest.mark.parametrize(
    "changes",
    [{}, {"series": None, "mfu": None, "val_loss": None, "commit": None, "dirty": None}, {"status": "diverged"},
     {"energy_j": 5.0, "energy_reason": None}],
)  # fmt: skip
def test_round_trip(tmp_path, changes):
    original = record(**changes)
    assert RunRecord.from_json(original.to_json()) == original
    path = original.save(tmp_path)
    assert path == tmp_path / "record.json"
    assert RunRecord.load(path) == RunRecord.load(tmp_path) == RunRecord.load(RunDir(tmp_path)) == original


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().val_loss = 1.0


def edited(**changes):
    raw = json.loads(record().to_json())
    raw.update(changes)
    return json.dumps({k: v for k, v in raw.items() if v != "REMOVE"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited(schema=2, joules=1), "newer nanosprint .schema 2, this one reads up to 1.*fields unknown here: joules"),
        (edited(joules=1), "record: unknown key 'joules'"),
        (edited(seed="REMOVE", steps="REMOVE"), "record lacks seed, steps"),
        (edited(schema="REMOVE"), "schema=None is not a schema number"),
        (edited(status="won"), "status='won': expected one of finished, stopped, failed, diverged"),
        (edited(steps="many"), "steps='many': expected a whole number"),
        (edited(data={"dir": "x", "files": [{"name": "a"}], "val_tokens": 1}), "data.files.0"),
        (edited(series={"id": "a", "index": 5, "size": 2}), "series.index=5"),
        ('{"schema": 1,', "record is damaged at line 1, column"),
    ],
)
def test_bad_records_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        RunRecord.from_json(text)


def test_nonfinite_numbers_are_named():
    with pytest.raises(ValueError, match="val_loss=nan is not finite"):
        record(val_loss=math.nan).to_json()
    with pytest.raises(ValueError, match=r"mfu\.value=inf is not finite"):
        record(mfu=Mfu(value=math.inf, peak_flops=None, peak_source="x", flops_per_token=1.0)).to_json()


def test_energy_is_a_number_or_a_reason():
    with pytest.raises(ValueError, match="energy_j=None with energy_reason=None"):
        record(energy_reason=None)
    with pytest.raises(ValueError, match=r"energy_j=1\.0 with"):
        record(energy_j=1.0)


def test_power_follows_from_energy():
    assert mean_watts(690.0 * 120, 120_000.0) == 690.0
    assert tokens_per_kwh(83_000_000, 81_200.0) == pytest.approx(3.68e9, rel=1e-3)
    assert mean_watts(None, 1.0) is mean_watts(5.0, 0.0) is tokens_per_kwh(9, None) is tokens_per_kwh(9, 0.0) is None


def test_run_without_a_record(tmp_path):
    with pytest.raises(ValueError, match="not a run directory"):
        RunRecord.load(tmp_path)
    RunDir(tmp_path).write_request({})
    with pytest.raises(ValueError, match=r"has no record yet.*nanosprint resume"):
        RunRecord.load(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        RunRecord.load(tmp_path / "other.json")


def test_crash_while_saving_keeps_the_old_record(tmp_path, monkeypatch):
    record(seed=1).save(tmp_path)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        record(seed=2).save(tmp_path)
    assert RunRecord.load(tmp_path).seed == 1
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_check_metrics_notices_one_changed_digit(tmp_path):
    run = run_with(tmp_path)
    assert check_metrics(run)
    assert check_metrics(str(tmp_path))
    text = run.metrics_path.read_text()
    run.metrics_path.write_text(text.replace("2.0", "1.0"))
    assert not check_metrics(run)
    run.metrics_path.write_text(text + text)
    assert not check_metrics(run)
    run.metrics_path.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        check_metrics(run)
