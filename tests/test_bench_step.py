"""`bench_step`: which places of a run it measures, the steps that it does there, its rows; on a CPU, not compiled."""

import argparse
import json

import pytest
import torch

from benchmarks import bench_step, harness
from nanosprint.recipes import load_recipe

STAGED = {  # the record, small
    "model.dim": 32, "model.num_heads": 2, "model.num_layers": 3, "model.vocab_size": 512, "model.document_start": 511,
    "model.seq_len": 96, "train.batch_tokens": 768, "train.num_steps": 90, "eval.batch_tokens": 512,
    "precision.compute": "fp32", "precision.orthogonalize": "fp32",
}  # fmt: skip
ON_CPU = {"exec.device": "cpu", "exec.compile": "off", "exec.attention": "reference", "exec.threads": "1"}


@pytest.fixture(autouse=True, scope="module")
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def words(settings):
    return [f"{key}={value}" for key, value in settings.items()]


def arguments(recipe, overrides, **more):
    defaults = {"sweep": [], "stages": None, "stage": None, "steps": 1, "profile": None, "top": 3, "out": None}
    return argparse.Namespace(recipe=recipe, overrides=words(overrides), **{**defaults, **more})


def test_places():
    record = load_recipe("record")
    scheduled = bench_step.places(record, "scheduled", None)
    assert [(p.name, p.start, p.end) for p in scheduled] == [
        ("stage 0", 0, 423), ("stage 1", 423, 847), ("stage 2", 847, 1270)
    ]  # fmt: skip
    (extension,) = bench_step.places(record, "all", None)[3:]
    assert (extension.name, extension.start, extension.end) == ("extension", 1270, 1285)
    assert bench_step.places(record, None, 1) == scheduled[1:2]
    assert [p.start for p in bench_step.places(record, None, None)] == [642]
    short = load_recipe("record", {"train.num_steps": 2})  # which leaves a stage out
    assert len(bench_step.places(short, "scheduled", None)) == 2
    with pytest.raises(ValueError, match="--stage 3: recipe 'record' has stages 0 to 2"):
        bench_step.places(record, None, 3)
    with pytest.raises(ValueError, match=r"recipe 'gpt2' has no schedule\.stages: leave out --stages"):
        bench_step.places(load_recipe("gpt2"), "all", None)


def test_a_row_for_each_stage(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_step, "WARM_UP", 0)
    out = tmp_path / "rows.jsonl"
    args = arguments("record", {**STAGED, **ON_CPU}, stages="scheduled", out=out)
    assert bench_step.run(args) == 3
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["stage"], row["step"], row["batch_tokens"]) for row in rows] == [
        ("stage 0", 0, 256), ("stage 1", 30, 512), ("stage 2", 59, 768)
    ]  # fmt: skip
    for row in rows:
        assert row["ms"] == pytest.approx(row["us_per_token"] * row["batch_tokens"] / 1000)
        assert row["tokens_per_s"] == pytest.approx(1e6 / row["us_per_token"])
        assert row["first_step_s"] > 0
        assert row["compile_s"].keys() == {"dynamo", "aot", "inductor"}
        assert row["groups_ms"]["matrix products"] > 0
        assert [kernel["ms"] for kernel in row["kernels"]] == sorted((k["ms"] for k in row["kernels"]), reverse=True)
        assert len(row["kernels"]) == 3
        assert (row["idle"], row["floors_ms"], row["memory_gib"]) == (None, {}, None)  # a CPU has none of it
        assert row["devices"]
    said = capsys.readouterr().out
    assert said.count("us/token") == said.count("of it dynamo") == said.count("\nmatrix products ") == 3
    assert "in no group, besides the above" in said


def test_the_middle_by_default_and_what_cannot_be_built_is_said(capsys):
    args = arguments("tiny", {"exec.device": "cpu"}, sweep=["exec.lanes_per_microbatch=3,1"])
    assert bench_step.run(args) == 1
    said = capsys.readouterr().out
    assert "exec.lanes_per_microbatch=3: UserError: exec.lanes_per_microbatch=3 does not divide" in said
    assert "middle: " in said
    assert "micro-batches of 128  " in said
    assert "ms/step" not in said  # no profile unless asked for


@pytest.fixture(scope="module")
def bench():
    return bench_step.Bench("record", {k: str(v) for k, v in {**STAGED, **ON_CPU}.items()})


def test_steps_follow_each_other_as_in_a_run(bench, monkeypatch):
    """From a stage's first step on, so that groups that wait for their turn get it."""
    seen = []
    monkeypatch.setattr(bench_step, "train_step", lambda loss, state, inputs, plan, train: seen.append((plan, inputs)))
    place = bench_step.Place("extension", 88, 90)
    step, inputs = bench.steps(place)
    for _ in range(4):
        step()
    plans = [plan for plan, _ in seen]
    assert [plan.step for plan in plans] == [88, 89, 90, 91]
    assert plans[1] == bench.recipe.plan(89)
    assert plans[3].windows == bench.recipe.plan(89).windows
    assert all(given is inputs for _, given in seen)
    assert bench.period == 2


def test_micro_batches_make_up_the_step(bench):
    for start in (0, 30, 59):
        plan = bench.recipe.plan(start)
        inputs = bench.inputs(plan)
        assert sum(given.targets.numel() for given in inputs) == plan.batch_tokens
        rows = {given.targets.size(0) for given in inputs}
        assert len(rows) == 1
    one = bench_step.Bench("tiny", {"exec.device": "cpu", "exec.lanes_per_microbatch": "1"})
    first, second, *_ = one.inputs(one.recipe.plan(0))
    assert not torch.equal(first.tokens, second.tokens)


def test_a_step_is_the_mean_over_its_kinds(bench, monkeypatch):
    """Every second step is 3 ms longer, one takes a second."""
    clock = iter([0, 1, 5, 6, 10, 11, 1000])
    monkeypatch.setattr(bench_step, "mark", lambda device: next(clock))
    monkeypatch.setattr(bench_step, "elapsed_ms", lambda start, stop: stop - start)
    assert bench._time(lambda: None, 3) == 2.5
    seconds = iter([0.0, 0.001, 1.0, 1.004, 2.0, 2.002, 3.0, 3.004, 4.0, 4.009, 5.0, 5.004])
    monkeypatch.setattr(bench_step.time, "perf_counter", lambda: next(seconds))
    assert bench._host(lambda: None) == pytest.approx(3.0)  # (1, 2, 9) and (4, 4, 4)


def test_seconds_of_compilation(monkeypatch):
    spent = {"entire_frame_compile": 10.0, "backend_compile": 7.0, "inductor_compile": 6.0}
    monkeypatch.setattr(torch._dynamo.utils, "calculate_time_spent", lambda: dict(spent))

    def compiles_more():
        spent.update(entire_frame_compile=14.0, backend_compile=10.0, inductor_compile=9.0, entire_backward_compile=2.5)

    took, phases = bench_step.first_call(compiles_more)
    assert took > 0
    assert phases == {"dynamo": 1.0, "aot": 2.5, "inductor": 3.0}


def test_a_gpus_row_shows_floors_and_idle_time():
    row = {
        "stage": "stage 2", "ms": 10.0, "us_per_token": 1.0, "tokens_per_s": 1e6, "mfu": 0.5, "memory_gib": 2.0,
        "idle": 0.25, "tokens_per_microbatch": 4096, "compute": "bf16", "mean_document": 480.4, "build_s": 1.0,
        "first_step_s": 2.0, "compile_s": {"dynamo": 0.5}, "groups_ms": {"bf16 products": 7.5},
        "floors_ms": {"bf16 products": 5.0}, "recorded": True, "recording_failure": None,
        "kernels": [bench_step.profile.Kernel("nvjet_tst_1", 7.5, 3)],
    }  # fmt: skip
    shown = bench_step.show(row, 5)
    assert "MFU 50.0%  2.0 GiB  idle 25.0%  micro-batches of 4,096  documents of 480  bf16" in shown
    assert "\n  steps recorded\n" in shown
    assert "idle                         2.500   25.0%" in shown
    assert shown.endswith("7.500 ms, floor 5.000, ratio 1.50")
    assert bench_step.stored(row, 5)["kernels"] == [{"name": "nvjet_tst_1", "ms": 7.5, "calls": 3}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_kernels_have_groups_and_fill_no_more_than_the_time(tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = {"model.num_layers": 3, "train.num_steps": 90, "eval.batch_tokens": 262_144}
    args = arguments("record", {**sizes, "exec.compile": "off"}, stage=0, steps=3, out=out)
    assert bench_step.run(args) == 1
    row = json.loads(out.read_text())
    groups = row["groups_ms"]
    assert {"attention", "bf16 products", "fp8 products", "softmax and loss", "optimizer"} <= groups.keys()
    assert groups.get("other", 0.0) < 0.05 * sum(groups.values())
    assert sum(groups.values()) < 1.1 * row["ms"]
    assert 0 <= row["idle"] < 1
    if row["floors_ms"]:  # of devices whose ceilings are known
        assert row["floors_ms"]["softmax and loss"] < 1.1 * groups["softmax and loss"]
    assert row["memory_gib"] > 1


def test_marks_on_the_hosts_time_line():
    start, stop = (harness.mark(torch.device("cpu")) for _ in range(2))
    assert 0 <= harness.elapsed_ms(start, stop) < 1000
