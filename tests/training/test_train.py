"""A run from request to record: what it writes, that it repeats itself, that it can be stopped and resumed."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from nanosprint.errors import DivergedError, Interrupted
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord, check_metrics
from nanosprint.results.runs import RunDir
from nanosprint.sample import load_model
from nanosprint.training import loop as loop_module
from nanosprint.training.api import carry_out, train
from nanosprint.training.request import load_request, save_request


def lines(path, kind):
    return [line for line in RunDir(path).read_metrics() if line["kind"] == kind]


def test_where_start_up_goes(train_tiny):
    path = train_tiny("run")
    (start,) = [line for line in lines(path, "event") if line["name"] == "start"]
    phases = start["phases_s"]
    assert list(phases) == ["import", "data", "resolve", "model", "warm-up"]
    assert 0 < sum(phases.values()) <= start["startup_ms"] / 1000 + 0.01
    assert start["graphs"] == []  # nothing is compiled on a CPU


def test_record_and_metrics_of_a_run(train_tiny):
    path = train_tiny("run", seed=5)
    record = RunRecord.load(path)
    assert (record.status, record.steps, record.tokens, record.seed) == ("finished", 20, 20 * 512, 5)
    assert record.recipe_hash == load_recipe("tiny").hash
    assert record.data.val_tokens == 2048
    assert {len(f.sha256) for f in record.data.files} == {64}
    assert 0 < record.epochs < 0.2
    assert record.tokens_per_s == pytest.approx(record.tokens / record.train_ms * 1000)
    assert record.mfu.value == pytest.approx(record.tokens_per_s * record.mfu.flops_per_token / record.mfu.peak_flops)
    assert record.execution["tokens_per_microbatch"] == 512  # nothing is left to choose
    assert record.execution["compute"] == "fp32"
    assert check_metrics(path)
    assert [line["step"] for line in lines(path, "train")] == list(range(1, 21))
    validations = lines(path, "val")
    assert [line["step"] for line in validations] == [10, 20]
    assert validations[-1]["loss"] == record.val_loss
    assert validations[-1]["loss"] < validations[0]["loss"] < math.log(257)
    assert lines(path, "train")[0]["loss"] == pytest.approx(math.log(257), abs=1e-4)  # a zero head is uniform
    times = [line["train_ms"] for line in lines(path, "train")]
    assert times == sorted(times)
    assert times[-1] <= record.train_ms + 1e-6


def test_a_run_in_fp8_leaves_a_model_without(train_tiny, weights):
    switches = [f"precision.{name}={{}}" for name in ("fp8_head", "fp8_mlp", "fp8_projections")]
    path = train_tiny("run", "train.num_steps=2", *switches)
    saved = weights(path)
    model, _ = load_model(path)
    assert model.state_dict().keys() < saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_validation_loss_is_the_mean_over_every_target(train_tiny, tiny_data, weights):
    """Against a forward pass over all the rows at once, in fp64."""
    from nanosprint.data.shards import find_shards, open_shard
    from nanosprint.model.gpt import GPT

    path = train_tiny("run", "eval.tokens=1000", "eval.batch_tokens=160")
    model = GPT(load_recipe("tiny").model, compute_dtype=torch.float64).double()
    model.load_state_dict(weights(path))
    ids = torch.tensor(open_shard(find_shards(tiny_data, "val")[0])[:1001].astype("int64"))
    total = 0.0
    for start in range(0, 1000, 32):
        stop = min(start + 32, 1000)
        log_p = model(ids[None, start:stop])[0].log_softmax(-1)
        total -= log_p.gather(-1, ids[start + 1 : stop + 1, None]).sum().item()
    assert RunRecord.load(path).val_loss == pytest.approx(total / 1000, rel=1e-5)
    assert RunRecord.load(path).data.val_tokens == 1000


def test_the_same_seed_gives_the_same_bits(train_tiny, weights):
    first, second, other = train_tiny("a"), train_tiny("b"), train_tiny("c", seed=1)
    assert all(torch.equal(weights(first)[k], weights(second)[k]) for k in weights(first))
    assert not torch.equal(weights(first)["embed.weight"], weights(other)["embed.weight"])


@pytest.mark.parametrize("lanes", [1, 2])
def test_micro_batches_change_nothing_but_rounding(train_tiny, weights, lanes):
    exact = ["precision.compute=fp64", "precision.orthogonalize=fp64"]
    whole = weights(train_tiny("whole", *exact))
    parts = weights(train_tiny("parts", *exact, execution={"device": "cpu", "lanes_per_microbatch": lanes}))
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=1e-9)


def test_warm_up_leaves_no_trace(train_tiny, weights, monkeypatch):
    """Training after a warm-up is bit for bit training without one."""
    with_it = weights(train_tiny("with"))
    monkeypatch.setattr("nanosprint.training.setup.warm_up", lambda *_, **__: None)
    without = weights(train_tiny("without"))
    assert all(torch.equal(with_it[k], without[k]) for k in without)


def test_max_steps_stops_early_with_the_schedule_unchanged(train_tiny):
    path = train_tiny("short", max_steps=7)
    record = RunRecord.load(path)
    assert (record.status, record.steps) == ("stopped", 7)
    assert record.recipe["train"]["num_steps"] == 20
    full = lines(train_tiny("full"), "train")
    assert [line["loss"] for line in lines(path, "train")] == [line["loss"] for line in full[:7]]
    assert record.val_loss is not None


def test_accumulation_over_steps_by_groups(train_tiny, weights):
    """A group with every=2 moves on odd steps only, by the sum of both gradients."""
    after_one = weights(train_tiny("one", "groups.2.every=2", max_steps=1))
    after_two = weights(train_tiny("two", "groups.2.every=2", max_steps=2))
    assert not after_one["head.weight"].any()
    assert after_two["head.weight"].any()


def killed_at(path, step, words, tmp_path, signum=signal.SIGKILL):
    """Start `nanosprint train` and send it a signal once its metrics have passed `step`."""
    command = [sys.executable, "-m", "nanosprint", "train", *map(str, words), "--out", str(path), "--device", "cpu"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 100
    metrics = path / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            process.send_signal(signum)
            break
        time.sleep(0.01)
    stderr = process.communicate(timeout=60)[1].decode()
    return process.returncode, stderr


LONG = ("train.num_steps=400", "train.checkpoint_every=50", "eval.every=100", "train.log_every=10")


def test_killed_and_resumed_is_the_uninterrupted_run(tmp_path, tiny_data, train_tiny, weights, nanosprint):
    whole = train_tiny("whole", *LONG)
    path = tmp_path / "killed"
    code, _ = killed_at(path, 120, ("tiny", *LONG, "--data", tiny_data), tmp_path)
    assert code == -signal.SIGKILL
    assert not (path / "record.json").exists()
    result = nanosprint("resume", path)
    assert result.returncode == 0, result.stderr
    resumed = [line for line in lines(path, "event") if line["name"] == "resume"]
    assert resumed[0]["step"] in range(50, 400, 50)
    assert RunRecord.load(path).val_loss == RunRecord.load(whole).val_loss
    assert all(torch.equal(weights(path)[k], weights(whole)[k]) for k in weights(whole))
    assert check_metrics(path)
    again = nanosprint("resume", path)
    assert again.returncode == 0
    assert "is finished: 400 steps" in again.stdout


def test_sigterm_saves_and_says_so(tmp_path, tiny_data, nanosprint):
    path = tmp_path / "run"
    words = ("tiny", "train.num_steps=5000", "train.log_every=5", "--data", tiny_data)
    code, stderr = killed_at(path, 20, words, tmp_path, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert "stopped by signal 15 after step" in stderr
    assert "Traceback" not in stderr
    stopped = [line for line in lines(path, "event") if line["name"] == "stopped"]
    saved = max(int(p.stem[5:]) for p in (path / "checkpoints").glob("step-*.pt"))
    assert stopped[0]["step"] == saved >= 20


def test_resume_without_a_checkpoint_starts_at_step_0(train_tiny, tmp_path, nanosprint):
    path = train_tiny("run")
    expected = RunRecord.load(path).val_loss
    for file in [path / "record.json", *(path / "checkpoints").iterdir()]:
        file.unlink()
    result = nanosprint("resume", path)
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in lines(path, "event") if line["name"] == "resume"] == [0]
    assert RunRecord.load(path).val_loss == expected


def test_the_request_exists_before_torch_is_imported(tmp_path, tiny_data):
    """`import torch` fails here, yet the run directory can be resumed."""
    (tmp_path / "torch.py").write_text("raise SystemExit(77)\n")
    command = [sys.executable, "-m", "nanosprint", "train", "tiny", "--out", "run", "--data", str(tiny_data)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert result.returncode == 77
    assert load_request(RunDir(tmp_path / "run")).recipe == load_recipe("tiny")


def test_interrupted_in_process(train_tiny, monkeypatch, tmp_path):
    """The signal arrives during a step; the state after that very step is saved."""
    real = loop_module.train_step

    def step(*args):
        if args[3].step == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(loop_module, "train_step", step)
    with pytest.raises(Interrupted, match="signal 2 after step 9"):
        train_tiny("run")
    assert (tmp_path / "run" / "checkpoints" / "step-00000009.pt").exists()
    assert not (tmp_path / "run" / "record.json").exists()


def test_divergence_stops_and_keeps_the_last_good_checkpoint(train_tiny, tmp_path, monkeypatch):
    real = loop_module.train_step

    def step(*args):
        loss = real(*args)
        return loss * float("nan") if args[3].step == 13 else loss

    monkeypatch.setattr(loop_module, "train_step", step)
    with pytest.raises(DivergedError, match="became nan at step 14"):
        train_tiny("run", "train.checkpoint_every=5", "train.log_every=3")
    path = tmp_path / "run"
    record = RunRecord.load(path)
    assert (record.status, record.val_loss) == ("diverged", None)
    assert sorted(p.name for p in (path / "checkpoints").glob("*.pt")) == ["step-00000005.pt", "step-00000010.pt"]


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(train_tiny, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nanosprint.training.checkpoint.torch.save", full)
    path = train_tiny("run", "train.checkpoint_every=5")
    assert RunRecord.load(path).status == "finished"
    failed = [line for line in lines(path, "event") if line["name"] == "checkpoint_failed"]
    assert [line["step"] for line in failed] == [5, 10, 15, 20]
    assert "No space left" in failed[0]["message"]
    assert not list((path / "checkpoints").iterdir())


def test_resume_with_another_recipe_is_refused(train_tiny):
    path = train_tiny("run", max_steps=5)
    request = load_request(RunDir(path))

    other = replace(request, recipe=load_recipe("tiny", ["groups.0.lr=0.5"]), max_steps=None)
    save_request(RunDir(path), other)
    with pytest.raises(ValueError, match=r"the checkpoint in .* belongs to recipe .*start a new run"):
        carry_out(other, RunDir(path), resume=True)
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace('"lr": 0.5', '"lr": 0.6'))
    with pytest.raises(ValueError, match=r"run.json was edited"):
        load_request(RunDir(path))


def test_out_of_memory_names_the_settings(train_tiny, monkeypatch):
    def too_much(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr("nanosprint.training.setup.warm_up", too_much)
    with pytest.raises(ValueError, match=r"lower exec.lanes_per_microbatch \(now 1\) or eval.batch_tokens \(now 2048"):
        train_tiny("run", execution={"device": "cpu", "lanes_per_microbatch": 1})


def test_automatic_micro_batch_shrinks_until_it_fits(train_tiny, monkeypatch):
    from nanosprint.training import setup

    real, tried = setup.warm_up, []

    def only_one_lane_fits(state, loss_sum, recipe, execution, backward):
        tried.append(execution.tokens_per_microbatch)
        if execution.tokens_per_microbatch > 128:
            raise torch.OutOfMemoryError("no")
        real(state, loss_sum, recipe, execution, backward)

    monkeypatch.setattr(setup, "warm_up", only_one_lane_fits)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = train_tiny("run")
    assert tried == [512, 256, 128]
    assert RunRecord.load(path).execution["tokens_per_microbatch"] == 128


def test_automatic_micro_batch_shrinks_to_parts_of_a_lane(train_tiny, monkeypatch):
    from nanosprint.training import setup

    real, tried = setup.warm_up, []

    def only_one_row_fits(state, loss_sum, recipe, execution, backward):
        tried.append((execution.tokens_per_microbatch, execution.parts_per_microbatch))
        if tried[-1] != (128, 4):
            raise torch.OutOfMemoryError("no")
        real(state, loss_sum, recipe, execution, backward)

    monkeypatch.setattr(setup, "warm_up", only_one_row_fits)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = train_tiny("run")
    assert tried == [(512, 1), (256, 1), (128, 1), (128, 2), (128, 4)]  # a lane is 4 rows
    execution = RunRecord.load(path).execution
    assert (execution["tokens_per_microbatch"], execution["parts_per_microbatch"]) == (128, 4)
    with pytest.raises(ValueError, match=r"raise exec.parts_per_microbatch \(now 2\)"):
        train_tiny("fixed", execution={"device": "cpu", "parts_per_microbatch": 2})


@pytest.mark.parametrize("parts", [2, 16])
def test_parts_of_a_micro_batch_change_nothing_but_rounding(train_tiny, weights, parts):
    exact = ("precision.compute=fp64", "precision.orthogonalize=fp64", "train.num_steps=5")
    one = weights(train_tiny("one", *exact))
    split = train_tiny("split", *exact, execution={"device": "cpu", "parts_per_microbatch": parts})
    for name, expected in one.items():
        torch.testing.assert_close(weights(split)[name], expected, rtol=1e-9, atol=1e-9)


def test_parts_must_divide_the_rows(train_tiny):
    with pytest.raises(
        ValueError, match=r"parts_per_microbatch=3 does not divide .* 512 tokens: use one of \[1, 2, 4, 8, 16"
    ):
        train_tiny("run", execution={"device": "cpu", "parts_per_microbatch": 3})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"activation_budget": 1.5}, r"exec.activation_budget=1.5 must lie between 0 .* and 1"),
        ({"activation_budget": 0.5, "compile": "off"}, "needs the compiler"),
    ],
)
def test_impossible_activation_budgets(train_tiny, choice, message):
    with pytest.raises(ValueError, match=message):
        train_tiny("run", execution={"device": "cpu", **choice})


def test_a_cap_needs_memory_to_cap(train_tiny):
    with pytest.raises(ValueError, match=r"exec.memory_gb=22: cpu has 0.0 GB of GPU memory"):
        train_tiny("run", execution={"device": "cpu", "memory_gb": 22})


def test_python_face(tmp_path, tiny_data):
    import nanosprint

    record = nanosprint.train(
        nanosprint.load_recipe("tiny", {"train.num_steps": 3}), out=tmp_path / "r", data=tiny_data
    )
    assert isinstance(record, nanosprint.RunRecord)
    assert json.loads((tmp_path / "r" / "record.json").read_text())["val_loss"] == record.val_loss
    with pytest.raises(ValueError, match="already holds a run"):
        train(load_recipe("tiny"), out=tmp_path / "r", data=tiny_data)


def test_resume_goes_beyond_max_steps_and_remembers_it(train_tiny, nanosprint):
    path = train_tiny("run", max_steps=6)
    whole = RunRecord.load(train_tiny("whole"))
    behind = nanosprint("resume", path, "--max-steps", 3)
    assert "is finished: 6 steps" in behind.stdout
    result = nanosprint("resume", path, "--max-steps", 12)
    assert result.returncode == 0, result.stderr
    assert RunRecord.load(path).steps == load_request(RunDir(path)).max_steps == 12
    result = nanosprint("resume", path, "--max-steps", 20)
    assert result.returncode == 0, result.stderr
    assert RunRecord.load(path).val_loss == whole.val_loss
    assert check_metrics(path)


def test_a_checkpoint_with_bad_weights_is_not_written(train_tiny, tmp_path, monkeypatch):
    """The update breaks the weights while the loss before it was fine."""
    real = loop_module.train_step

    def step(*args):
        loss = real(*args)
        if args[3].step == 9:
            with torch.no_grad():
                args[1].engine.parts[0].bank.data[0] = math.inf
        return loss

    monkeypatch.setattr(loop_module, "train_step", step)
    with pytest.raises(DivergedError, match="step 10"):
        train_tiny("run", "train.checkpoint_every=5")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("*.pt")] == ["step-00000005.pt"]


@pytest.mark.parametrize("damage", ["{", "{}", '{"sha256": "0"}'])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(train_tiny, nanosprint, damage):
    path = train_tiny("run", "train.checkpoint_every=5")
    expected = RunRecord.load(path).val_loss
    (path / "record.json").unlink()
    (path / "checkpoints" / "step-00000020.json").write_text(damage)
    result = nanosprint("resume", path)
    assert result.returncode == 0, result.stderr
    assert "step-00000020.pt is damaged" in result.stderr
    assert [line["step"] for line in lines(path, "event") if line["name"] == "resume"] == [15]
    assert RunRecord.load(path).val_loss == expected
    for file in (path / "checkpoints").glob("*.json"):
        file.write_text("{")
    (path / "record.json").unlink()
    result = nanosprint("resume", path)
    assert result.returncode == 2
    assert "every checkpoint in" in result.stderr


def test_one_process_a_run_directory(train_tiny, nanosprint):
    from nanosprint.data.lock import try_lock

    path = train_tiny("run", max_steps=5)
    with try_lock(path / ".lock"):
        result = nanosprint("resume", path, "--max-steps", 9)
    assert result.returncode == 2
    assert "another process is training in" in result.stderr


def test_several_processes_want_a_launcher(train_tiny):
    with pytest.raises(ValueError, match="start several with torchrun"):
        train_tiny("run", execution={"device": "cpu", "gpus": 2})


def test_no_checkpoint_after_the_last_step(train_tiny):
    path = train_tiny("run", "train.checkpoint_every=6", "train.checkpoint_last=false", "train.num_steps=12")
    assert [file.stem for file in (path / "checkpoints").glob("*.pt")] == ["step-00000006"]
    assert RunRecord.load(path).steps == 12
