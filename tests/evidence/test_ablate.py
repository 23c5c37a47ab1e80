"""Ablations: which variants there are, and a table that says what could and what could not be told."""

import copy
import json

import click
import pytest

from nanosprint import cli
from nanosprint.config import Execution
from nanosprint.evidence.ablate import ablation_markdown, ancestors, effects, grid, load_all, without_each
from nanosprint.evidence.outcome import publish
from nanosprint.evidence.race import carry_on, start
from nanosprint.evidence.series import load_race, plan_race
from nanosprint.recipes import load_recipe
from nanosprint.recipes.switches import one_out

SHORT = {"train.num_steps": "4", "eval.tokens": "512"}


def test_one_out_is_the_recipe_and_one_variant_for_each_technique():
    variants, left_out = without_each("tiny", SHORT, (), everything=True)
    expected, _ = one_out(load_recipe("tiny", SHORT))
    assert list(variants) == ["tiny", *(f"no-{name}" for name in expected)]
    assert all(recipe.train.num_steps == 4 for recipe in variants.values())
    assert "xsa" in left_out


def test_named_switches_and_ones_own():
    variants, _ = without_each("tiny", SHORT, ("rotary", "wide=model.dim=16", "wide=groups.0.lr=0.1"), everything=False)
    assert list(variants) == ["tiny", "no-rotary", "no-wide"]
    wide = variants["no-wide"]
    assert (wide.model.dim, wide.model.layers[0].mlp.hidden, wide.groups[0].lr) == (16, 64, 0.1)  # dials follow
    with pytest.raises(ValueError, match="switch 'xsa' changes nothing in recipe 'tiny'"):
        without_each("tiny", SHORT, ("xsa",), everything=False)
    with pytest.raises(ValueError, match="switch 'same' changes nothing"):
        without_each("tiny", SHORT, ("same=model.dim=32",), everything=False)
    with pytest.raises(ValueError, match=r"unknown key 'model\.dmi'"):
        without_each("tiny", SHORT, ("typo=model.dmi=32",), everything=False)


def test_the_ladder_is_walked_to_its_foot():
    assert list(ancestors("modern", {})[0]) == ["modern", "muon", "gpt2-rotary", "gpt2"]
    with pytest.raises(ValueError, match="recipe 'tiny' has no parent"):
        ancestors("tiny", {})
    with pytest.raises(ValueError, match="unknown recipe 'mdern'"):
        ancestors("mdern", {})


def test_overrides_for_one_recipe():
    words = {"train.batch_tokens": "65536", "sub3:model.seq_len": "8192", "sub3:eval.batch_tokens": "65536"}
    made = load_all(["modern", "sub3"], words)
    assert [recipe.train.batch_tokens for recipe in made.values()] == [65_536, 65_536]
    assert (made["modern"].model.seq_len, made["sub3"].model.seq_len) == (1024, 8192)
    walked, _ = ancestors("muon", {"gpt2:train.lanes": "4"})
    assert [recipe.train.lanes for recipe in walked.values()] == [8, 8, 4]
    with pytest.raises(ValueError, match=r"'soap:train.lanes' is for a recipe that does not take part: there are mod"):
        load_all(["modern"], {"soap:train.lanes": "4"})


def test_grids():
    variants, _ = grid("tiny", SHORT, ["train.batch_tokens=256,512", "groups.0.rule.momentum=0.9,0.95"])
    assert list(variants) == [
        "tiny",
        "train.batch_tokens=256,groups.0.rule.momentum=0.9",
        "train.batch_tokens=256,groups.0.rule.momentum=0.95",
        "train.batch_tokens=512,groups.0.rule.momentum=0.9",
    ]  # and the fourth is the recipe itself
    assert variants["train.batch_tokens=256,groups.0.rule.momentum=0.9"].train.batch_tokens == 256
    betas, _ = grid("tiny", SHORT, ["groups.1.rule.betas=[0.5,0.9],[0.6,0.9]"])
    assert [recipe.groups[1].rule.betas for recipe in betas.values()] == [(0.9, 0.95), (0.5, 0.9), (0.6, 0.9)]
    with pytest.raises(ValueError, match=r"--grid 'train.lanes' is not of the form KEY=A,B,C"):
        grid("tiny", {}, ["train.lanes"])
    with pytest.raises(ValueError, match="every value is the one that recipe 'tiny' has already"):
        grid("tiny", {}, ["train.batch_tokens=512"])


def test_an_ablation_from_race_to_picture(in_process, tiny_data, tmp_path, capsys):
    variants, left_out = without_each("tiny", SHORT, ("rotary", "muon"), everything=False)
    race = plan_race(
        variants, runs=2, first_seed=1, execution=Execution(device="cpu"), data=str(tiny_data),
        baseline="tiny", left_out=left_out,
    )  # fmt: skip
    folder = start(race, tmp_path / "ablation")
    carry_on(folder, print)
    report = publish(folder, print)
    assert load_race(folder).baseline == "tiny"
    assert [(d["a"], d["b"]) for d in report["differences"]["val_loss"]] == [("no-rotary", "tiny"), ("no-muon", "tiny")]
    mean = {one["name"]: one["measures"]["val_loss"]["mean"] for one in report["contestants"]}
    for row in report["differences"]["val_loss"]:
        assert row["estimate"] == pytest.approx(mean[row["a"]] - mean["tiny"])
    assert (folder / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert "rotary positions; none in their place" in (folder / "ablation.md").read_text()
    assert "| tiny | 2/2 |" in (folder / "ablation.md").read_text().partition("All that was measured")[2]
    assert "no-muon" in capsys.readouterr().out
    check_table(report)


def check_table(report):
    """Order, verdicts and what is left unsaid, with numbers put in by hand."""
    report = copy.deepcopy(report)
    rotary, muon = report["differences"]["val_loss"]
    rotary.update(estimate=0.001, low=-0.01, high=0.012, p=0.5, p_holm=0.5)
    muon.update(estimate=0.2, low=0.1, high=0.3, p=0.001, p_holm=0.002)
    report["left_out"] = {"xsa": "switch 'xsa' changes nothing ...", "odd": "switch 'odd' makes no sense: because"}
    assert [row["a"] for row in effects(report)] == ["no-muon", "no-rotary"]
    text = ablation_markdown(report)
    assert "| +0.2000 | +0.1000 .. +0.3000 | 0.002 | higher |" in text
    assert "| +0.0010 | -0.0100 .. +0.0120 | 0.5 | not told from zero |" in text
    assert "Could not be told from zero by these runs: no-rotary." in text
    assert "Not in this recipe: xsa." in text
    assert "- switch 'odd' makes no sense: because" in text
    muon.update(estimate=None, low=None, high=None, p=None, p_holm=None)
    assert [row["a"] for row in effects(report)] == ["no-rotary", "no-muon"]
    assert "unknown: too few runs" in ablation_markdown(report)


def test_the_command(in_process, tmp_path, tiny_data, capsys):
    options = ["--runs", "2", "--device", "cpu", "--data", str(tiny_data), "--out", str(tmp_path / "a")]
    command = ["ablate", "tiny", "--grid", "train.lanes=2,4", *options, "train.num_steps=2"]
    assert cli.cli.main(command, standalone_mode=False) == 0
    assert in_process == ["tiny-1337", "train.lanes=2-1337", "tiny-1338", "train.lanes=2-1338"]  # 4 are its own
    assert cli.cli.main(["ablate", "--resume", str(tmp_path / "a")], standalone_mode=False) == 0
    assert "0 of 4 runs to do" in capsys.readouterr().out
    assert json.loads((tmp_path / "a/report.json").read_text())["baseline"] == "tiny"
    (tmp_path / "a/tiny-1338/record.json").write_text("{}")
    with pytest.raises(ValueError, match="schema=None is not a schema number"):
        cli.cli.main(["ablate", "--resume", str(tmp_path / "a")], standalone_mode=False)
    cli.cli.main(["ablate", "--list", "tiny"], standalone_mode=False)
    listed = capsys.readouterr().out.splitlines()[-len(one_out(load_recipe("tiny"))[0]) :]
    assert {line.split()[0] for line in listed} == set(one_out(load_recipe("tiny"))[0])
    with pytest.raises(click.UsageError, match=r"choose one of --one-out"):
        cli.cli.main(["ablate", "tiny", "--ladder", "--grid", "train.lanes=1", "--runs", "2"], standalone_mode=False)
