"""Claims: a sound one is accepted; every edit, gap and mixture is refused, by the rule that it breaks."""

import json
import math
import re
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest

from nanosprint.config.edit import to_dict
from nanosprint.config.recipe import Execution
from nanosprint.recipes import load_recipe
from nanosprint.results.metrics import metrics_sha256
from nanosprint.results.record import OUTCOME, DataRecord, Mfu, RunRecord, ShardFile, outcome_of
from nanosprint.results.runs import RunDir, Series, claim_run_dir
from nanosprint.results.verify import ALPHA, TARGET, beats, verify
from nanosprint.training.log import RunLog
from nanosprint.training.request import RunRequest, save_request

LOSSES = (3.2771, 3.2764, 3.2769, 3.2775)
RECIPE = load_recipe("tiny", ["train.num_steps=6", "eval.every=2", "eval.at_start=true"])
EXECUTION = Execution(device="cpu", compute="fp32", compile="off", tokens_per_microbatch=512, parts_per_microbatch=1)
FILES = (
    ShardFile(name="tiny_train_0.bin", tokens=180_798, sha256="ab"),
    ShardFile(name="tiny_val_0.bin", tokens=2_049, sha256="cd"),
)


def write_run(path, loss, *, index=0, size=4, recipe=RECIPE, seed=None, series="s", status="finished", **changes):
    """A run as the training loop leaves it, with a loss of our choice."""
    run = claim_run_dir(path)
    place = None if series is None else Series(id=series, index=index, size=size)
    request = RunRequest(recipe=recipe, execution=EXECUTION, seed=index if seed is None else seed, series=place)
    save_request(run, request)
    batch, steps = recipe.train.batch_tokens, recipe.train.num_steps
    targets = recipe.eval.tokens or 2048
    with RunLog(run, rank=0, console=None) as log:
        log.event("start", startup_ms=4000.5)
        for step in range(steps + 1):
            train_ms, tokens = 12.5 * step + index / 8, step * batch
            if step:
                log.train(step=step, tokens=tokens, loss=5 - step / 8, train_ms=train_ms, memory_bytes=1000)
            if step in recipe.validation_steps:
                ms = train_ms + 0.25 if step else 0.0
                at_step = loss if step == steps else 4 - step / 8
                log.val(step=step, tokens=tokens, loss=at_step, train_ms=ms, val_tokens=targets, val_ms=3.5)
        values = {
            "status": status,
            "recipe": to_dict(recipe),
            "recipe_hash": recipe.hash,
            "execution": to_dict(request.execution),
            "seed": request.seed,
            "world_size": 1,
            "devices": ({"name": "a CPU", "cores": 2},),
            "versions": {"torch": "2.13.0", "cuda": None},
            "commit": "f" * 40,
            "dirty": False,
            "data": DataRecord(dir="data/tiny", files=FILES, val_tokens=targets),
            "epochs": 0.25,
            "steps": steps,
            "tokens": steps * batch,
            "train_ms": ms,
            "startup_ms": 4000.5,
            "val_loss": loss if math.isfinite(loss) else None,
            "peak_memory_bytes": 1000,
            "tokens_per_s": 1000 * steps * batch / ms,
            "mfu": Mfu(value=0.3, peak_flops=1e12, peak_source="measured", flops_per_token=6e6),
            "energy_j": 12.25,
            "energy_reason": None,
            "wait_fraction": 0.01,
            "metrics_sha256": "",
            "series": place,
            "created": "",
            "clock_graphs": 0,
            "mean_watts": 1000 * 12.25 / ms,
            "tokens_per_kwh": steps * batch * 3.6e6 / 12.25,
        }
        record = RunRecord(**{**values, **changes})
        log.event(OUTCOME, step=steps, record=outcome_of(to_dict(record)))
    replace(record, metrics_sha256=metrics_sha256(run.metrics_path)).save(run)
    return path


@pytest.fixture
def claim(tmp_path):
    """claim(loss, ..., changes of all runs): the folder of a series."""

    def make(*losses, **changes):
        for index, loss in enumerate(losses or LOSSES):
            options = {"index": index, "size": len(losses or LOSSES), **changes}
            write_run(tmp_path / "series" / f"run-{index}", loss, **options)
        return tmp_path / "series"

    return make


def broken(verdict):
    return {rule.name: rule.detail for rule in verdict.rules if not rule.passed}


def test_a_sound_claim(claim):
    folder = claim()
    verdict = verify([folder])
    assert broken(verdict) == {}
    assert verdict.accepted
    assert (verdict.losses.mean, verdict.losses.n) == (pytest.approx(np.mean(LOSSES)), 4)
    assert 0 < verdict.p < 0.01
    assert verify(sorted(folder.iterdir())).rules == verdict.rules
    assert broken(verify([folder], target=3.2770)).keys() == {"target"}


def test_a_recipe_that_scores_the_whole_split(claim):
    assert verify([claim(recipe=load_recipe("tiny", ["train.num_steps=3", "eval.tokens=none"]))]).accepted


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ((3.2790, 3.2805, 3.2798, 3.2801), r"a margin of 0\.00015 takes about \d+ runs"),
        ((3.2812, 3.2804), r"the mean is not below 3\.28"),
        ((3.2771,), "n=1: a claim takes at least 2 runs"),
        ((3.2771, 3.2771), "different seeds do not give equal losses"),
        ((3.2771, 3.2773, math.nan), "1 of 3 runs have no final validation loss"),
    ],
)
def test_losses_that_do_not_suffice(claim, losses, reason):
    verdict = verify([claim(*losses)])
    assert not verdict.accepted
    assert re.search(reason, broken(verdict)["target"])


@pytest.mark.parametrize("n", [2, 5, 13])
def test_false_acceptance_is_what_alpha_says(n):
    """2,000 series whose true mean is the target: one in a hundred is accepted, give or take half."""
    losses = np.random.default_rng(89).normal(TARGET, 0.0014, (2000, n)).tolist()
    accepted = sum(beats(row, TARGET, ALPHA) for row in losses)
    assert 0.005 <= accepted / 2000 <= 0.015


# --- edits ------------------------------------------------------------------------------------------------------------


def leaves(value, path=()):
    """Every scalar in a tree of JSON with its place."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    elif value is not None:
        yield path, value


def changed(tree, path, value):
    """A copy with one leaf replaced."""
    copy = json.loads(json.dumps(tree))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return copy


def other(value):
    if isinstance(value, bool):
        return not value
    return value + "0" if isinstance(value, str) else value * 0.9999 - 1e-9 if isinstance(value, float) else value + 1


def read_lines(run):
    return [json.loads(line) for line in RunDir(run).metrics_path.read_text().splitlines()]


def write_lines(run, lines):
    RunDir(run).metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reseal(run):
    """What a careful forger does: the checksum is that of the edited log."""
    path = RunDir(run).record_path
    record = {**json.loads(path.read_text()), "metrics_sha256": metrics_sha256(RunDir(run).metrics_path)}
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("name", [f.name for f in fields(RunRecord)])
def test_any_edit_of_the_record_is_refused(claim, name):
    folder = claim(3.2771, 3.2772)
    assert verify([folder]).accepted
    path = RunDir(folder / "run-0").record_path
    original = json.loads(path.read_text())
    found = [place for place in leaves(original) if place[0][0] == name]
    assert found or original[name] in (None, ""), name
    for place, value in found:
        path.write_text(json.dumps(changed(original, place, other(value))))
        verdict = verify([folder])
        assert broken(verdict), (place, value)
        assert not verdict.accepted


def test_any_edit_of_the_log_is_refused(claim):
    folder = claim(3.2771, 3.2772)
    run, lines = folder / "run-1", read_lines(folder / "run-1")
    places = [place for place in leaves(lines) if place[0][1] != "record"]
    assert len(places) > 60
    for place, value in places:
        write_lines(run, changed(lines, place, other(value)))
        assert broken(verify([folder])), (place, value)


@pytest.mark.parametrize(
    ("place", "value", "rule"),
    [
        (("steps",), 5, "steps"),
        (("tokens",), 3000, "steps"),
        (("train_ms",), 60.0, "clock"),
        (("tokens_per_s",), 1e6, "clock"),
        (("clock_graphs",), 1, "clock"),
        (("clock_graphs",), None, "clock"),
        (("mean_watts",), 5.0, "clock"),
        (("tokens_per_kwh",), 1e9, "clock"),
        (("val_loss",), 3.2, "validation"),
        (("data", "val_tokens"), 2049, "validation"),
        (("data", "files", 1, "sha256"), "ce", "data"),
        (("data", "files"), [], "data"),
        (("recipe_hash",), "0123456789ab", "recipe"),
        (("recipe", "groups", 0, "lr"), 0.03, "recipe"),
        (("recipe", "eval", "every"), 3, "validation"),
        (("execution", "compute"), "bf16", "precision"),
        (("execution", "fp8"), "off", "precision"),
        (("devices", 0, "name"), "another", "machine"),
        (("world_size",), 2, "machine"),
        (("versions", "torch"), "2.14.0", "software"),
        (("dirty",), True, "software"),
        (("seed",), 1, "seeds"),
        (("series", "index"), 1, "series"),
        (("series", "size"), 1, "series"),
        (("status",), "stopped", "finished"),
    ],
)
def test_an_edit_in_record_and_log_alike_contradicts_the_lines(claim, place, value, rule):
    """With all checksums renewed: what is left are the lines, the request and the other runs."""
    folder = claim(3.2771, 3.2772)
    run = RunDir(folder / "run-0")
    record = changed(json.loads(run.record_path.read_text()), place, value)
    lines = read_lines(run.path)
    lines[-1] = {**lines[-1], "record": outcome_of(record)}
    write_lines(run.path, lines)
    run.record_path.write_text(json.dumps(record))
    reseal(run.path)
    assert rule in broken(verify([folder]))


def without(kind, step):
    return lambda lines: [line for line in lines if (line["kind"], line.get("step")) != (kind, step)]


def with_field(kind, step, key, value):
    def edit(lines):
        return [{**li, key: value} if (li["kind"], li.get("step")) == (kind, step) else li for li in lines]

    return edit


@pytest.mark.parametrize(
    ("edit", "rule", "reason"),
    [
        (without("val", 0), "validation", "no validation at step 0"),
        (without("val", 4), "validation", "no validation at step 4"),
        (without("val", 6), "validation", r"the log has loss None over 2048, the record 3\.2771 over 2048"),
        (without("train", 3), "steps", "the log has 5 steps, the recipe steps 1 to 6"),
        (without("event", None), "clock", "no warm-up on record before the first step"),
        (lambda lines: [*lines[1:-1], lines[0], lines[-1]], "clock", "no warm-up on record before"),
        (lambda lines: lines[:-1], "unedited", "does not end with the outcome"),
        (lambda lines: [*lines, lines[0]], "unedited", "does not end with the outcome"),
        (with_field("val", 6, "loss", 3.2), "validation", "the log has loss 3.2 over 2048, the record 3.2771"),
        (with_field("val", 2, "val_tokens", 2047), "validation", "2,047 targets at step 2, the recipe asks for 2,048"),
        (with_field("val", 6, "train_ms", 75.1), "clock", r"the log has 75\.1 ms of training, the record 75\.25 ms"),
        (with_field("train", 2, "train_ms", 2.0), "clock", "the clock goes back at step 2"),
        (with_field("train", 2, "tokens", 1000), "steps", "tokens other than the recipe's from step 2 on"),
        (with_field("val", 6, "energy_j", 12.0), "clock", r"the log has 12\.0 J, the record 12\.25 J"),
        (with_field("val", 2, "step", 3), "validation", "no validation at step 2"),
    ],
)
def test_an_edited_log_with_a_new_checksum(claim, edit, rule, reason):
    folder = claim(3.2771, 3.2772)
    write_lines(folder / "run-0", edit(read_lines(folder / "run-0")))
    reseal(folder / "run-0")
    verdict = verify([folder])
    assert re.search(f"run-0: .*{reason}", broken(verdict)[rule])


# --- gaps and mixtures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_a_run_left_out(claim, index):
    folder = claim()
    shutil.rmtree(folder / f"run-{index}")
    assert broken(verify([folder])) == {"series": f"run {index} of 4 (counted from 0) left out of series s"}


@pytest.mark.parametrize("status", ["failed", "diverged", "stopped"])
def test_a_run_that_did_not_finish_counts(claim, status):
    folder = claim()
    shutil.rmtree(folder / "run-2")
    write_run(folder / "run-2", 3.27, index=2, status=status)
    assert re.search(f"run-2 has {status}", broken(verify([folder]))["finished"])


def test_mixtures(claim, tmp_path):
    folder = claim(3.2771, 3.2772, 3.2774)
    parts = [folder / "run-0", folder / "run-1"]

    def with_another(name, **changes):
        return broken(verify([*parts, write_run(tmp_path / name, 3.2773, index=2, size=3, **changes)]))

    recipe = load_recipe("tiny", ["train.num_steps=6", "groups.0.lr=0.03", "eval.every=2", "eval.at_start=true"])
    found = with_another("a", recipe=recipe)
    assert found.keys() == {"recipe"}
    assert re.search("2 different recipes: tiny .* in run-0, run-1; tiny .* in a", found["recipe"])
    assert with_another("b", seed=1) == {"seeds": "seed 1 in run-1, b"}
    assert with_another("c", series="t") == {"series": "2 different series: s of 3 runs; t of 3 runs"}
    assert broken(verify([folder, folder / "run-1"])) == {
        "seeds": "seed 1 in run-1, run-1; the same log in run-1, run-1",
        "series": "run 1 more than once",
    }


def test_runs_of_no_series(claim):
    assert "nanosprint race" in broken(verify([claim(series=None)]))["series"]


def test_a_run_of_an_older_version_is_told_from_an_edited_one(claim):
    folder = claim()
    write_lines(folder / "run-0", read_lines(folder / "run-0")[:-1])
    reseal(folder / "run-0")
    assert "older runs cannot be verified" in broken(verify([folder]))["unedited"]


# --- damage -----------------------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def garble(path):
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 1))


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("metrics.jsonl", cut, "is torn"),
        ("metrics.jsonl", garble, "line 1, is damaged"),
        ("metrics.jsonl", lambda path: path.unlink(), "does not exist"),
        ("metrics.jsonl", lambda p: p.write_text(p.read_text().replace("2048", '"2048"')), "val_tokens='2048', which"),
        ("record.json", cut, "is damaged at line"),
        ("record.json", lambda path: path.unlink(), "has no record yet"),
        ("record.json", lambda p: p.write_text(p.read_text().replace("num_steps", "steps")), "recipe.train.steps"),
        ("run.json", cut, "is damaged at line"),
    ],
)
def test_damaged_files(claim, name, damage, reason):
    folder = claim()
    damage(folder / "run-1" / name)
    verdict = verify([folder])
    assert not verdict.accepted
    assert broken(verdict).keys() == {"readable"}
    assert re.search(f"run-1.*{reason}", broken(verdict)["readable"])


def test_an_empty_log(claim):
    folder = claim()
    (folder / "run-1" / "metrics.jsonl").write_text("")
    assert {"unedited", "steps", "validation", "clock", "target"} <= broken(verify([folder])).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"target": math.nan}, "target=nan"), ({"alpha": 0.0}, "alpha=0.0"), ({"alpha": 0.7}, "alpha=0.7")],
)
def test_bad_options(claim, options, message):
    with pytest.raises(ValueError, match=message):
        verify([claim()], **options)


def test_what_processes_said_beside_the_runs_is_no_run(claim):
    folder = claim()
    (folder / "run-0.log").write_text("step 1\n")
    assert verify(sorted(folder.glob("run-*"))).accepted
    with pytest.raises(ValueError, match="no run among them"):
        verify([folder / "run-0.log"])


def test_a_path_without_runs(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run\.json"):
        verify([tmp_path])
    with pytest.raises(ValueError, match="there is no such folder"):
        verify([tmp_path / "no"])
