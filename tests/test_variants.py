"""Variants in one process: what is run, what is not run again, and what the table says."""

import argparse
from types import SimpleNamespace

import pytest

from benchmarks import variants


def arguments(tmp_path, data, *named, seeds=(1, 2)):
    return argparse.Namespace(
        recipe="tiny", overrides=["train.num_steps=3", "exec.device=cpu"], data=str(data), seeds=list(seeds),
        runs=tmp_path / "runs", variants=[variants.parse_variant(text) for text in named],
    )  # fmt: skip


def test_runs_once(tmp_path, tiny_data, capsys, monkeypatch):
    args = arguments(tmp_path, tiny_data, "base", "short: train.num_steps=2")
    records = variants.run(args)
    assert {key: record.steps for key, record in records.items()} == {
        ("base", 1): 3, ("short", 1): 2, ("base", 2): 3, ("short", 2): 2,
    }  # fmt: skip
    assert capsys.readouterr().out.count("start-up") == 4
    monkeypatch.setattr(variants, "carry_out_in_turn", lambda requests, dirs: iter([*requests]))
    assert variants.run(args) == records


def test_differences_are_taken_seed_by_seed():
    def record(loss):
        return SimpleNamespace(val_loss=loss, train_ms=2000.0)

    records = {("a", 1): record(3.0), ("a", 2): record(5.0), ("b", 2): record(4.5), ("c", 1): record(None)}
    shown = variants.table([("a", {}), ("b", {}), ("c", {})], [1, 2], records).splitlines()
    assert shown[1].split() == ["a", "2", "4.0000", "1.4142", "-", "2.0"]
    assert shown[2].split() == ["b", "1", "4.5000", "-", "-0.5000", "2.0"]
    assert len(shown) == 3


def test_a_variant_needs_a_name():
    assert variants.parse_variant("x: a=1 b=2") == ("x", {"a": "1", "b": "2"})
    with pytest.raises(ValueError, match="expected NAME"):
        variants.parse_variant(": a=1")
