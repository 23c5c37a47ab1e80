"""Several processes train what one trains: by --gpus, and by torchrun as on two nodes. CPU, gloo."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.training.api import train
from nanosprint.training.distributed import World
from nanosprint.training.resolve import resolve
from tests.recipes.test_ladder import small

EXACT = ("precision.compute=fp64", "precision.orthogonalize=fp64")
SHORT = ("train.num_steps=20", "eval.tokens=1000", "train.grad_clip=1.0")


@pytest.fixture
def one_process(train_tiny, weights):
    return lambda *overrides: weights(train_tiny("one", *overrides))


@pytest.mark.parametrize(
    ("processes", "others"), [(4, ()), (2, ("groups.1.every=2", "groups.2.every=3", "train.grad_clip=none"))]
)
def test_gpus_option_trains_what_one_process_trains(
    processes, others, one_process, weights, nanosprint, tmp_path, tiny_data
):
    overrides = (*EXACT, *(SHORT[:-1] if others else SHORT), *others)
    words = ("tiny", *overrides, "--device", "cpu", "--data", tiny_data, "--out", tmp_path / "many")
    result = nanosprint("train", *words, "--gpus", processes)
    assert result.returncode == 0, result.stderr
    record = RunRecord.load(tmp_path / "many")
    assert (record.world_size, record.data.val_tokens) == (processes, 1000)
    for name, weight in one_process(*overrides).items():
        torch.testing.assert_close(weights(tmp_path / "many")[name], weight, rtol=0, atol=1e-9)
    assert record.val_loss == pytest.approx(RunRecord.load(tmp_path / "one").val_loss, abs=1e-9)


def test_the_record_on_several_processes(weights, nanosprint, tmp_path, tiny_data):
    """Packed documents, all three stages, the tie and its split, turns of Adam, NorMuon: in 20 steps as one process."""
    settings = {"precision.compute": "fp64", "precision.orthogonalize": "fp64", "eval.tokens": 1000}
    settings |= {"precision.fp8_head": "none", "precision.fp8_mlp": "none", "train.num_steps": 20}
    overrides = small("record", **settings, **{"train.batch_tokens": 512, "model.seq_len": 64, "eval.seq_len": 64})
    recipe = load_recipe("record", overrides)
    assert [recipe.plan(step).split for step in (0, 19)] == [False, True]
    train(recipe, out=tmp_path / "one", data=tiny_data, execution={"device": "cpu", "compile": "off"})
    one, expected = RunRecord.load(tmp_path / "one"), weights(tmp_path / "one")
    words = [f"{key}={value}" for key, value in overrides.items()]
    words += ["exec.compile=off", "--device", "cpu", "--data", tiny_data]
    assert recipe.train.lanes == 8  # two micro-batches on each of four processes
    words += ["exec.lanes_per_microbatch=1", "--gpus", 4, "--out", tmp_path / "many"]
    result = nanosprint("train", "record", *words)
    assert result.returncode == 0, result.stderr
    found, many = weights(tmp_path / "many"), RunRecord.load(tmp_path / "many")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert (many.world_size, many.recipe_hash) == (4, one.recipe_hash)
    assert many.val_loss == pytest.approx(one.val_loss, abs=1e-9)


def test_sparse_gradients_of_several_processes(weights, nanosprint, tmp_path):
    words = ("shakespeare", *EXACT, "model.dim=32", 'model.ngrams={"orders": [2, 3], "rows": 1024}', "eval.tokens=1000")
    words += ("--device", "cpu", "--max-steps", 4)
    for name, processes in (("one", 1), ("two", 2)):
        result = nanosprint("train", *words, "--out", name, "--gpus", processes)
        assert result.returncode == 0, result.stderr
    for name, weight in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], weight, rtol=0, atol=1e-9)


def test_torchrun_with_two_agents(one_process, weights, tmp_path, tiny_data):
    """Two nodes with a process each, as two agents of this machine that find each other by c10d rendezvous."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = ["-m", "nanosprint", "train", "tiny", *EXACT, *SHORT, "--device", "cpu"]
    words += ["--data", str(tiny_data), "--out", str(tmp_path / "nodes")]
    agents = []
    for node in (0, 1):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        launcher += [
            "--node-rank",
            str(node),
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "test",
            "--local-addr",
            "localhost",
        ]
        launcher += ["--rdzv-endpoint", f"localhost:{port}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        agents.append(subprocess.Popen([*launcher, *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE))
    errors = [agent.communicate(timeout=150)[1].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert RunRecord.load(tmp_path / "nodes").world_size == 2
    for name, weight in one_process(*EXACT, *SHORT).items():
        torch.testing.assert_close(weights(tmp_path / "nodes")[name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_several_processes_saves(signum, tmp_path, tiny_data):
    """To the whole group, as a terminal sends Ctrl-C: the launcher passes it on a second time."""
    words = [
        "tiny",
        "train.num_steps=100000",
        "data.epochs=10000",
        "train.log_every=5",
        "--device",
        "cpu",
        "--gpus",
        "2",
    ]
    words += ["--data", str(tiny_data), "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "nanosprint", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (metrics.exists() and '"step": 20,' in metrics.read_text()):
        time.sleep(0.05)
    os.killpg(process.pid, signum)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signum, stderr
    assert "the state is saved" in stderr
    assert "Traceback" not in stderr
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.pt"))


@pytest.mark.parametrize("launcher", ["--gpus", "torchrun"])
def test_resume_at_another_world_size(launcher, one_process, train_tiny, weights, nanosprint):
    """Half the run in one process, killed there, the other half in two."""
    changes = (*EXACT, *SHORT)
    if launcher == "--gpus":  # with gradients that wait at step 10
        changes = (*EXACT, *SHORT[:-1], "groups.1.every=3", "groups.2.every=4")
    path = train_tiny("half", *changes, "train.checkpoint_every=10")
    (path / "record.json").unlink()
    for file in (path / "checkpoints").glob("step-00000020.*"):
        file.unlink()
    if launcher == "--gpus":
        result = nanosprint("resume", path, "--gpus", 2)
    else:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nanosprint", "resume"]
        result = subprocess.run([sys.executable, *words, path], capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in RunDir(path).read_metrics() if line.get("name") == "resume"] == [10]
    for name, weight in one_process(*changes).items():
        torch.testing.assert_close(weights(path)[name], weight, rtol=0, atol=1e-9)


def test_a_mistake_is_told_once_and_without_a_traceback(nanosprint, tmp_path, tiny_data):
    words = ("tiny", "train.num_steps=99999", "--device", "cpu", "--data", tiny_data, "--out", tmp_path / "r")
    result = nanosprint("train", *words, "--gpus", 2)
    assert result.returncode == 2
    assert result.stderr.count("not enough training tokens") == 1
    assert "Traceback" not in result.stderr


def test_processes_that_cannot_share_the_lanes():
    recipe = load_recipe("tiny")
    with pytest.raises(ValueError, match=r"3 processes cannot share train.lanes=4 equally: use one of \[1, 2, 4\]"):
        resolve(Execution(gpus=3), recipe, World(0, 3, torch.device("cpu")))
    with pytest.raises(ValueError, match=r"exec.lanes_per_microbatch=4 does not divide the 2 lanes .* one of \[1, 2\]"):
        resolve(Execution(gpus=2, lanes_per_microbatch=4), recipe, World(0, 2, torch.device("cpu")))


def test_more_gpus_than_there_are(nanosprint, tmp_path, tiny_data):
    if torch.cuda.is_available():
        words, message = ("--gpus", 64), "this machine has"
    else:
        words, message = ("--gpus", 2, "--device", "cuda"), "--gpus 2: this machine has 0"
    result = nanosprint("train", "tiny", *words, "--data", tiny_data, "--out", tmp_path / "r")
    assert result.returncode == 2
    assert message in result.stderr
