"""The table and the picture of batch size against energy."""

import json

import pytest

from benchmarks import energy


def row(**changes):
    base = {"seed": 1, "tokens": 2_000_000, "energy_j": 4000.0, "train_ms": 8000.0, "val_loss": 3.5}
    return {**base, **changes}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "record").mkdir()
    (tmp_path / "batch").mkdir()
    whole = row(recipe={"train": {"batch_tokens": 400}}, tokens=3_000_000)
    (tmp_path / "record" / "a.json").write_text(json.dumps(whole))
    smaller = [
        row(overrides=["train.batch_tokens=100", "schedule.stages.stages.0.lr=0.5"]),
        row(overrides=["train.batch_tokens=100", "precision.fp8_projections={}"]),
        row(overrides=["train.batch_tokens=100"], energy_j=None),
    ]
    (tmp_path / "batch" / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in smaller))
    return tmp_path


def test_rows(results):
    """Runs without a count, and those that differ in more than the batch, are left out."""
    first, second = energy.load(results)
    assert (first.batch, first.rate, second.batch, second.rate) == (400, 1.0, 100, 0.5)
    assert second.per_million == 2000.0
    assert second.per_kwh == pytest.approx(3.6e6 * 500)  # a joule trains 500 tokens
    assert second.watts == 500.0
    assert (
        energy.as_table([second]).splitlines()[-1].startswith("| 100 | 0.5 | 1 | 2.0 | 3.5000 | 4.0 | 2,000 | 1.80e9 |")
    )


def test_picture(results, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "energy.svg"
    energy.draw(energy.load(results), out)
    assert "<svg" in out.read_text()


def test_the_page_is_up_to_date():
    assert energy.as_table(energy.load(energy.RESULTS)) in energy.DOC.read_text()
