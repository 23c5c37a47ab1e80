"""Programs of tests in processes that a server forks, which has imported torch and nothing of ours.

A fresh interpreter spends two to three seconds of processor time on torch, most of what a small program takes. Ours is
imported anew in each, in the order in which the program does it. What is about the start itself (that help needs no
torch; processes that a launcher spawns, torchrun's, a wheel's) is tested with fresh interpreters.
"""

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.launcher.api"])  # which imports no Triton


def run(module: str, *words, cwd, environment, timeout, processes: int = 1) -> subprocess.CompletedProcess:
    """`python -m module words`: what it says and its exit code, the first that is not 0.

    processes: so many at once, as torchrun would start them. Those that the program launches itself have torch, too.
    """
    command = [module, *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        worlds = [{}] if processes == 1 else _worlds(processes)
        started = [CONTEXT.Process(target=_run, args=(command, cwd, {**environment, **w}, said)) for w in worlds]
        for process in started:
            process.start()
        deadline = time.monotonic() + timeout
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in started if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        stdout, stderr = (file.read_text() for file in said)
        if late:
            raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
    codes = [process.exitcode for process in started if process.exitcode]
    return subprocess.CompletedProcess(command, codes[0] if codes else 0, stdout, stderr)


def _worlds(processes: int) -> list[dict[str, str]]:
    """What torchrun puts into the environment of each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1])}
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run(command: list[str], cwd: Path, environment: dict[str, str], said: list[Path]) -> None:
    import torch

    for number, file in enumerate(said, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # which was read when torch was imported
    _fork_what_is_launched()
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _fork_what_is_launched() -> None:
    """Processes of `--gpus N` are forked from the launcher, which has imported torch and computed nothing."""
    from torch.distributed.launcher import api

    config = api.LaunchConfig
    api.LaunchConfig = lambda **given: config(**{**given, "start_method": "fork"})
