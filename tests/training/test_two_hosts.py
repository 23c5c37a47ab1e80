"""Two hosts train what one process trains: two network namespaces, joined by nothing but a veth pair.

What an ordinary test of several processes on one machine cannot show: that nothing goes by way of localhost, files or a
host name. Needs root and `ip`; elsewhere it skips itself with the reason.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nanosprint.results.record import RunRecord
from nanosprint.training import checkpoint

HOSTS = {"a": "10.231.77.1", "b": "10.231.77.2"}
TIMEOUT_S = 15
EXACT = ("precision.compute=fp64", "precision.orthogonalize=fp64", "train.num_steps=20", "eval.tokens=1000")


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts():
    """Names of two namespaces with an address each, gone after the test."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("two network namespaces need root and the program ip")
    names = {host: f"nanosprint-{os.getpid()}-{host}" for host in HOSTS}
    try:
        for name in names.values():
            made = run("ip", "netns", "add", name)
            if made.returncode:
                pytest.skip(f"no network namespaces on this machine: {made.stderr.strip()}")
        a, b = names.values()
        made = run("ip", "link", "add", "veth0", "netns", a, "type", "veth", "peer", "name", "veth0", "netns", b)
        if made.returncode:
            pytest.skip(f"no veth pairs on this machine: {made.stderr.strip()}")
        for host, name in names.items():
            for words in (("addr", "add", f"{HOSTS[host]}/24", "dev", "veth0"), ("link", "set", "veth0", "up")):
                done = run("ip", "-n", name, *words)
                assert done.returncode == 0, done.stderr
            assert run("ip", "-n", name, "link", "set", "lo", "up").returncode == 0
        yield names
    finally:
        for name in names.values():
            run("ip", "netns", "del", name)


@pytest.fixture
def start(hosts, tmp_path, tiny_data):
    """start(words, ...): a torchrun on each host, with a process each unless `processes` says more."""
    agents = []

    def begin(*words, processes=1):
        for rank, (host, namespace) in enumerate(hosts.items()):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            launcher += ["--nproc-per-node", str(processes), "--node-rank", str(rank)]
            launcher += ["--rdzv-backend", "c10d", "--rdzv-id", "two-hosts"]
            launcher += ["--rdzv-endpoint", f"{HOSTS['a']}:29400", "--local-addr", HOSTS[host]]
            if host == "a":
                launcher += ["--rdzv-conf", "is_host=1"]
            train = ["-m", "nanosprint", "train", "tiny", *words, "--device", "cpu", "--data", str(tiny_data)]
            # Its own folder: the second host sees nothing of the first one's run directory.
            folder = tmp_path / host
            folder.mkdir()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "veth0"}
            command = ["ip", "netns", "exec", namespace, *launcher, *train, "--out", "run"]
            pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            agents.append(subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes))
        return agents

    yield begin
    for agent in agents:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def test_two_hosts_train_what_one_process_trains(start, train_tiny, weights, tmp_path):
    agents = start(*EXACT, processes=2)
    errors = [agent.communicate(timeout=200)[1].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    alone = train_tiny("one", *EXACT)
    record = RunRecord.load(tmp_path / "a/run")
    assert record.world_size == 4
    assert record.val_loss == pytest.approx(RunRecord.load(alone).val_loss, abs=1e-9)
    for name, weight in weights(alone).items():
        torch.testing.assert_close(weights(tmp_path / "a/run")[name], weight, rtol=0, atol=1e-9)


def is_running(pid):
    """Whether it is there and no mere entry that its parent has not fetched."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_cut_network_ends_both_hosts(hosts, start, tmp_path):
    """The cable is pulled: neither side hears of the other again, and no connection is closed."""
    agents = start("train.num_steps=100000", "data.epochs=10000", "train.checkpoint_every=10", "eval.every=0",
                   f"exec.timeout_s={TIMEOUT_S}")  # fmt: skip
    checkpoints = tmp_path / "a/run/checkpoints"
    deadline = time.monotonic() + 120
    while not (checkpoints.is_dir() and checkpoint.list_steps(checkpoints)):
        assert [agent.poll() for agent in agents] == [None, None]
        assert time.monotonic() < deadline, "no checkpoint in time"
        time.sleep(0.1)
    assert run("ip", "-n", hosts["a"], "link", "set", "veth0", "down").returncode == 0
    trainers = [int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()) for agent in agents]
    deadline = time.monotonic() + 3 * TIMEOUT_S
    while any(is_running(pid) for pid in trainers):  # torchrun's own part of the second host takes longer to notice
        assert time.monotonic() < deadline, [is_running(pid) for pid in trainers]
        time.sleep(0.1)
    for agent in agents:
        agent.kill()
    told = [[line for line in agent.stderr.read().decode().splitlines() if "error: " in line] for agent in agents]
    assert [len(lines) for lines in told] == [1, 1], told
    assert "lost process 1" in told[0][0]
    assert "process 1 on " in told[1][0]
    assert "is cut off: no answer" in told[1][0]
    assert checkpoint.load_latest(checkpoints)["step"] >= 10
