"""What the table of FP8 errors calls common, bias and noise; and that its variants differ in nothing but FP8."""

import argparse

import pytest
import torch

from benchmarks import fp8_error
from nanosprint.results.runs import RunDir

NOISE, BIAS, COMMON, RANDOM = 2.0, -0.1, 0.05, 0.3


def test_what_micro_batches_share_is_told_from_what_they_do_not():
    generator = torch.Generator().manual_seed(0)
    signal, other, *rest = (torch.randn(200, 300, generator=generator) for _ in range(2 + 2 * 4))
    other -= signal * (other * signal).sum() / signal.square().sum()
    gradients = [{"w": signal + NOISE * r} for r in rest[:4]]
    errors = [{"w": BIAS * signal + COMMON * other + RANDOM * r} for r in rest[4:]]
    row = fp8_error.compare(gradients, iter(errors), {"w": "matrix"})["matrix"].row()
    assert row["bias"] == pytest.approx(BIAS, abs=0.01)
    assert row["common"] == pytest.approx((BIAS**2 + COMMON**2) ** 0.5, rel=0.05)
    assert row["noise"] == pytest.approx(NOISE, rel=0.02)
    batch = (BIAS**2 + COMMON**2 + RANDOM**2) / (1 + NOISE**2)
    assert row["batch"] == pytest.approx(batch**0.5, rel=0.02)


def arguments(data, variants, **changes):
    settings = {"recipe": "tiny", "overrides": ["exec.device=cpu", "exec.compile=off"], "data": str(data), "steps": 3}
    settings |= {"run": None, "batches": 2, "seed": 1, "variants": variants}
    return argparse.Namespace(**{**settings, **changes})


def test_variants_on_a_small_recipe(tiny_data):
    lagging = fp8_error._mlp(bootstrap_steps=1)  # after 3 steps the scale of the weights is the one of a step ago
    bf16 = fp8_error.VARIANTS[0]
    rows = fp8_error.run(arguments(tiny_data, [bf16, ("again", bf16[1]), ("mlp", lagging)]))
    found = {(row["variant"], row["group"]): row for row in rows}
    for (name, group), row in found.items():
        assert row["noise"] > 0, group
        if name != "mlp":
            assert row["batch"] == row["common"] == row["bias"] == row["loss"] == 0, (name, group)
    assert abs(found["mlp", "matrix.mlp_down"]["loss"]) < 1e-3
    assert 1e-3 < found["mlp", "matrix.mlp_down"]["batch"] < 0.1
    assert found["mlp", "matrix.qkv"]["batch"] < found["mlp", "matrix.mlp_down"]["batch"]


def test_every_default_variant_is_one_of_the_record():
    for name, words in fp8_error.VARIANTS:
        precision = fp8_error.load_recipe("record-third", words).precision
        assert (precision.fp8_mlp is None) == ("mlp" not in name and name != "all"), name
        assert (precision.fp8_projections is None) == (not name.startswith(("qkv", "out", "all"))), name


def test_a_checkpoint_of_another_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint after --steps 7: the newest is none"):
        fp8_error.saved(RunDir(tmp_path), 7)
