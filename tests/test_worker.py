"""Races whose seeds share processes, from outside: the same numbers as alone, whatever interrupts them."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanosprint.config import Execution
from nanosprint.errors import OutOfMemory, UserError, lacks_memory
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.training.api import train
from nanosprint.training.request import RunRequest, save_request
from nanosprint.worker import Worker

WORDS = ["race", "tiny", "shakespeare", "--runs", "2", "--seed", "3", "--device", "cpu", "--out", "race"]
STEPS = {"tiny": 30, "shakespeare": 2}
OWN = {"shakespeare": {"model.dim": "32", "model.num_heads": "2", "train.batch_tokens": "2048", "eval.tokens": "512"}}


def recipe_words(name, steps):
    changed = {"train.num_steps": str(steps), "eval.every": "0", "precision.compute": "fp32", **OWN.get(name, {})}
    return changed | {"data.name": "tiny", "data.tokenizer": "bytes", "model.vocab_size": "257"}


def race_words(data, **steps):
    own = {f"{name}:{key}={value}" for name in STEPS for key, value in recipe_words(name, steps[name]).items()}
    return [*WORDS, "--data", str(data), *sorted(own)]


@pytest.fixture(scope="module")
def alone(tiny_data, tmp_path_factory):
    """alone(name, steps, seed): the validation loss of a run that shares nothing."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def loss(name, steps, seed):
        recipe = load_recipe(name, recipe_words(name, steps))
        return train(
            recipe, out=folder / f"{name}-{steps}-{seed}", data=tiny_data, seed=seed, execution={"device": "cpu"}
        ).val_loss

    return loss


def workers_in(folder):
    """Process ids of the workers that were started in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, where = (process / "cmdline").read_bytes().split(b"\0"), os.readlink(process / "cwd")
        except OSError:
            continue
        if b"nanosprint.worker" in words and where == str(folder):
            found.append(int(process.name))
    return found


def test_a_shared_race_has_the_numbers_of_runs_alone(tmp_path, tiny_data, nanosprint, alone):
    result = nanosprint(*race_words(tiny_data, **STEPS), timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    for name, steps in STEPS.items():
        for seed in (3, 4):
            record = RunRecord.load(tmp_path / f"race/{name}-{seed}")
            assert record.val_loss == alone(name, steps, seed)
            assert record.shared_graphs == (seed == 4)
            log = (tmp_path / f"race/{name}-{seed}.log").read_text()
            assert log.count("validation loss") == 2  # its own, in the course and at the end
            assert f"run: race/{name}-{seed}" in log
    assert result.stdout.count("with shared graphs") == 2
    assert not workers_in(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed(signum, tmp_path, tiny_data, nanosprint, alone):
    """A signal comes while the second seed trains in a worker and the other recipe's worker waits: both end.

    What is left goes on in new workers, once with each prepared before.
    """
    steps = {"tiny": 200, "shakespeare": 2}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "nanosprint", *race_words(tiny_data, **steps)],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics, deadline = tmp_path / "race/tiny-4/metrics.jsonl", time.monotonic() + 200
    while time.monotonic() < deadline and not (metrics.exists() and '"kind": "train"' in metrics.read_text()):
        time.sleep(0.02)
    assert len(workers_in(tmp_path)) == 2
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, out + err
    assert "go on with `nanosprint race --resume race`" in err
    assert "tiny seed 4: stopped" in out
    assert not workers_in(tmp_path)
    assert "stopped by signal 2 after step" in (tmp_path / "race/tiny-4.log").read_text()
    assert list((tmp_path / "race/tiny-4/checkpoints").glob("*.pt"))
    assert not (tmp_path / "race/shakespeare-4").exists()
    ahead = ["--prepare", "2"] if signum == signal.SIGTERM else []
    result = nanosprint("race", "--resume", "race", *ahead, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 of 4 runs to do" in result.stdout
    assert ("preparing 2 of 2: tiny, shakespeare\nprepared 2 in" in result.stdout) == bool(ahead)
    for name in STEPS:
        record = RunRecord.load(tmp_path / f"race/{name}-4")
        assert record.val_loss == alone(name, steps[name], 4)
        assert record.shared_graphs == bool(ahead)
    events = [line for line in RunDir(tmp_path / "race/tiny-4").read_metrics() if line["kind"] == "event"]
    assert "resume" in [event["name"] for event in events]


def begun(folder, recipe, **more):
    run = RunDir(folder)
    run.path.mkdir()
    save_request(run, RunRequest(recipe=recipe, execution=Execution(device="cpu"), **more))
    return run


def test_failures_do_not_end_a_worker_that_is_unharmed(tmp_path, tiny_data):
    words = {"train.num_steps": 6}
    runs = [
        begun(tmp_path / "good-1", load_recipe("tiny", words), seed=1, data=str(tiny_data)),
        begun(tmp_path / "lost", load_recipe("tiny", words), data=str(tmp_path / "nowhere")),
        begun(
            tmp_path / "wild",
            load_recipe("tiny", {**words, "groups.0.lr": 1e38, "groups.1.lr": 1e38}),
            data=str(tiny_data),
        ),
        begun(tmp_path / "good-2", load_recipe("tiny", words), seed=2, data=str(tiny_data)),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "nanosprint.worker"],
        input="".join(json.dumps({"run": str(run.path)}) + "\n" for run in runs),
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(answer["code"], answer["goes_on"]) for answer in answers] == [(0, True), (2, True), (3, True), (0, True)]
    assert "error: the loss became" in (tmp_path / "wild.log").read_text()
    assert "nowhere" in (tmp_path / "lost.log").read_text()
    assert RunRecord.load(runs[-1]).shared_graphs


@pytest.mark.parametrize(
    ("error", "code", "memory"),
    [
        (OutOfMemory("out of GPU memory: lower it"), 2, True),
        (RuntimeError("CUDA error: out of memory"), 1, True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 1, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), 1, False),
        (AssertionError("ours"), 1, False),
        (KeyboardInterrupt(), 130, False),
    ],
)
def test_after_others_nothing_goes_on(error, code, memory, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise error

    monkeypatch.setattr(Worker, "_train", broken)
    answer = Worker().carry_out(RunDir(tmp_path))
    assert (answer.code, answer.lacks_memory, answer.goes_on) == (code, memory, False)
    assert "Traceback" in capsys.readouterr().err or code != 1


def test_what_counts_as_a_lack_of_memory():
    assert lacks_memory(OutOfMemory("out of GPU memory"))
    assert not lacks_memory(UserError("--data: out of memory lane"))
    assert not lacks_memory(RuntimeError("CUDA error: an illegal memory access"))
