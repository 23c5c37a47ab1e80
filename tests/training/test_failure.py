"""What ends one process of a run ends all of them, is told once, and costs no more than the steps since a checkpoint.

Real processes are killed and stopped, only those that a test has started. CPU, gloo.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanosprint.results.runs import RunDir
from nanosprint.training import checkpoint

TIMEOUT_S = 15  # longer than processes on a busy machine start apart from each other
LONG = ("train.num_steps=100000", "data.epochs=10000", "train.checkpoint_every=10", "eval.every=0")
LONG += (f"exec.timeout_s={TIMEOUT_S}", "--device", "cpu")

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes by /proc")

# A process of a run under torchrun, of which the second one does something else.
WORKER = """
import os, signal, sys
from nanosprint import cli
from nanosprint.training import loop, step

plain, kind = loop.train_step, os.environ["FAULT"]

def faulty(loss_sum, state, inputs, plan, train):
    if state.step == 20 and kind == "raise":
        raise OSError("its disk is broken")
    if state.step == 20 and kind == "nan":
        next(state.model.parameters()).data.fill_(float("nan"))
    return plain(loss_sum, state, inputs, plan, train)

if os.environ["RANK"] == "1":
    loop.train_step = faulty
    if kind == "seed":
        sys.argv += ["--seed", "2"]
cli.main()
"""


@pytest.fixture
def start(tmp_path, tiny_data):
    """start(words, ...): a run of two processes in the background, and the lines that end up on its stderr."""
    started = []

    def begin(*, out="run", fault=None, words=LONG, **options):
        arguments = ["train", "tiny", *words, "--data", str(tiny_data), "--out", str(tmp_path / out)]
        if fault is None:
            command = [sys.executable, "-m", "nanosprint", *arguments, "--gpus", "2"]
        else:
            (tmp_path / "worker.py").write_text(WORKER)
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command = [sys.executable, *launcher, str(tmp_path / "worker.py"), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault or ""}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def children(pid):
    """Of one of our processes, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if rest.split()[1] == str(pid):
            found.append(int(name.split()[0]))
    return sorted(found)


def _words(pid):
    """Its command line; nothing of one that is gone, or dead and not yet fetched."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def trainers(process):
    """The two that train, of a launcher by --gpus; it has a third child, which looks after shared memory."""
    workers = [pid for pid in children(process.pid) if "spawn_main" in _words(pid)]
    assert len(workers) == 2
    return workers


def wait_for_checkpoint(process, path, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not checkpoint.list_steps(path / "checkpoints"):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    assert checkpoint.list_steps(path / "checkpoints"), "no checkpoint in time"


def end(process, within):
    """(exit code, the lines of stderr that tell an error); all processes have ended by then."""
    pids = [pid for pid in children(process.pid) if "tracker" not in _words(pid)]
    began = time.monotonic()
    stderr = process.communicate(timeout=within + 60)[1]
    assert time.monotonic() - began < within, stderr
    assert not [pid for pid in pids if _words(pid)], "a process outlives the launcher"
    return process.returncode, [line for line in stderr.splitlines() if "error: " in line], stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_and_another_goes_on(rank, start, nanosprint, tmp_path):
    process = start()
    wait_for_checkpoint(process, tmp_path / "run")
    os.kill(trainers(process)[rank], signal.SIGKILL)
    code, told, stderr = end(process, within=TIMEOUT_S)
    assert code == 128 + signal.SIGKILL
    assert len(told) == 1, stderr
    assert f"process {rank}" in told[0]
    assert "Traceback" not in stderr
    if rank:
        return
    saved = checkpoint.list_steps(tmp_path / "run/checkpoints")[-1]
    assert checkpoint.load_latest(tmp_path / "run/checkpoints")["step"] == saved
    resumed = nanosprint("resume", "run", "--gpus", 1, "--max-steps", saved + 3)
    assert resumed.returncode == 0, resumed.stderr
    assert [x["step"] for x in RunDir(tmp_path / "run").read_metrics() if x.get("name") == "resume"] == [saved]


def test_a_stopped_process_is_found_and_ended(start, tmp_path):
    process = start()
    wait_for_checkpoint(process, tmp_path / "run")
    os.kill(trainers(process)[0], signal.SIGSTOP)
    code, told, stderr = end(process, within=2 * TIMEOUT_S)
    assert code
    assert len(told) == 1, stderr
    assert "lost process 0 on " in told[0]
    assert "no sign of life for" in told[0]
    assert "Traceback" not in stderr
    assert checkpoint.load_latest(tmp_path / "run/checkpoints")["step"] >= 10


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "process 1 on HOST: its disk is broken"),
        ("nan", "the loss became nan at step 2"),
        ("seed", "the processes do not agree on seed: 1337 on process 0 (HOST); 2 on process 1 (HOST)"),
    ],
)
def test_what_befalls_one_process_is_told_once(fault, message, start, tmp_path):
    process = start(fault=fault)
    code, told, stderr = end(process, within=60)
    assert code
    assert len(told) == 1, stderr
    assert message.replace("HOST", os.uname().nodename) in told[0]
    assert "nanosprint/training" not in stderr  # the launcher's own traceback is torchrun's to print
    if fault != "seed":
        assert checkpoint.load_latest(tmp_path / "run/checkpoints")["step"] in (10, 20)


def test_a_full_disk_leaves_the_run_going_and_the_last_checkpoint_whole(train_tiny, tmp_path):
    """As a limit on the size of files, of which a checkpoint is by far the largest. One process, then two."""
    path = train_tiny("run", "train.num_steps=30", "train.checkpoint_every=10", max_steps=10)
    size = max(file.stat().st_size for file in (path / "checkpoints").glob("*.pt"))
    full = subprocess.run(
        [sys.executable, "-m", "nanosprint", "resume", "run", "--gpus", "2", "--max-steps", "30"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert full.returncode == 0, full.stderr
    events = [line for line in RunDir(path).read_metrics() if line.get("kind") == "event"]
    assert [e["step"] for e in events if e["name"] == "checkpoint_failed"] == [20, 30]
    assert checkpoint.load_latest(path / "checkpoints")["step"] == 10
    assert [file.name for file in (path / "checkpoints").glob(".*")] == []
