"""Two hosts train what one process trains: two network namespaces, joined by nothing but a veth pair.

What an ordinary test of several processes on one machine cannot show: that nothing goes by way of localhost, files or a
host name. Needs root and `ip`; elsewhere it skips itself with the reason.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from nanosprint.results.record import RunRecord

HOSTS = {"a": "10.231.77.1", "b": "10.231.77.2"}
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


def test_two_hosts_train_what_one_process_trains(hosts, train_tiny, weights, tmp_path, tiny_data):
    agents = []
    for rank, (host, namespace) in enumerate(hosts.items()):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        launcher += ["--node-rank", str(rank), "--rdzv-backend", "c10d", "--rdzv-id", "two-hosts"]
        launcher += ["--rdzv-endpoint", f"{HOSTS['a']}:29400", "--local-addr", HOSTS[host]]
        if host == "a":
            launcher += ["--rdzv-conf", "is_host=1"]
        words = ["-m", "nanosprint", "train", "tiny", *EXACT, "--device", "cpu", "--data", str(tiny_data)]
        # Its own folder: the second host sees nothing of the first one's run directory.
        folder = tmp_path / host
        folder.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "veth0"}
        command = ["ip", "netns", "exec", namespace, *launcher, *words, "--out", "run"]
        agents.append(
            subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        )
    try:
        errors = [agent.communicate(timeout=200)[1].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], errors
    alone = train_tiny("one", *EXACT)
    record = RunRecord.load(tmp_path / "a/run")
    assert record.world_size == 4
    assert record.val_loss == pytest.approx(RunRecord.load(alone).val_loss, abs=1e-9)
    for name, weight in weights(alone).items():
        torch.testing.assert_close(weights(tmp_path / "a/run")[name], weight, rtol=0, atol=1e-9)
