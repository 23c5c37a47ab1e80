"""Compiles the graphs of a run in processes of their own, all at the same time, before the run needs them.

Tracing, gradients and most of Inductor are Python, so a process compiles one graph after the other; and the graphs of a
run, one for each stage and one for validation, are many seconds each. Here every process builds the model, compiles
its share of the graphs and ends without having run any. What it leaves are the files of Inductor's and AOTAutograd's
caches, which the run then finds. Its own cores are free meanwhile, for the kernels that are not the compiler's.

Where the files are there already this would cost more than it saves, so a mark beside them says for which requests
they are. It is an estimate: without files behind it the run compiles what is missing, one graph after the other.

A graph is found if nothing that its key is made of differs: shapes, weights' formats, settings of the compiler, the
number of CPU threads and the index of the GPU. So this is for runs of one process.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from nanosprint.config.edit import from_dict, to_dict
from nanosprint.training.request import RunRequest
from nanosprint.training.warmup import Graph, graphs_of

_log = logging.getLogger(__name__)
_PATIENCE_S = 600.0


class Compilers:
    """The processes that compile for a run."""

    def __init__(self, request: RunRequest, count: int) -> None:
        self._mark = _mark_of(request)
        self._processes = [_start(request, share, count) for share in range(count)]

    def wait(self) -> None:
        """Wait until all are done, and say of the first that failed why."""
        failures = [said for process, stderr in self._processes if (said := _end(process, stderr)) is not None]
        if failures:
            _log.warning("graphs could not be compiled ahead (%s): the run compiles them one by one", failures[0])
        else:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()

    def stop(self) -> None:
        """End those that still run."""
        for process, _ in self._processes:
            process.kill()


def compile_ahead(request: RunRequest) -> Compilers | None:
    """Start what compiles the graphs of a resolved `request`; None where it wants none or they are there already."""
    count = request.execution.compilers
    assert isinstance(count, int)
    return Compilers(request, count) if count and not _mark_of(request).exists() else None


def _start(request: RunRequest, share: int, count: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  (`_end` reads it)
    threads = max(1, (os.cpu_count() or 1) // count)
    # the launcher's variables would make it a part of a group of processes
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.Popen(
        [sys.executable, "-m", "nanosprint.training.precompile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **environment},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"request": to_dict(request), "share": share, "count": count}).encode())
    process.stdin.close()
    return process, stderr


def _end(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> str | None:
    """Wait for it; None, or the last line of a process that failed."""
    try:
        code = process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"one took more than {_PATIENCE_S:.0f} s"
    if not code:
        return None
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"one ended with code {code}"


def _mark_of(request: RunRequest) -> Path:
    """The file that says that the cache has the graphs of `request`, as this code and this torch make them."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    device = request.execution.device
    name = torch.cuda.get_device_name() if device == "cuda" else device
    what = [to_dict(request.recipe), to_dict(request.execution), torch.__version__, name]
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return Path(cache_dir()) / "nanosprint" / digest.hexdigest()[:32]


class _Compiled(Exception):
    """Raised where a graph would run."""


def _only_compile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A back end of torch.compile: Inductor, whose result is not run."""
    torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def run(*_: Any) -> None:
        raise _Compiled

    return run


def compile_graphs(request: RunRequest, graphs: list[Graph]) -> None:
    """Compile them for a resolved request, in this process, on whose model they leave no trace."""
    from nanosprint.training.batch import ModelStage, random_input
    from nanosprint.training.distributed import World, pick_device
    from nanosprint.training.setup import build_state, cap_memory, compiled, set_threads

    recipe, execution = request.recipe, request.execution
    world = World(0, 1, pick_device(execution.device))
    set_threads(execution, world)
    cap_memory(execution, world.device)
    state = build_state(recipe, execution, request.seed, world.device)
    loss_sum, stage = compiled(state.model, execution, _only_compile), ModelStage(state.model)
    for plan, rows, parts, trained in graphs:
        scale = stage.enter(plan)
        with torch.set_grad_enabled(trained):
            try:
                loss_sum(*random_input(recipe, plan, rows, world.device, scale, parts))
            except _Compiled:
                continue
        raise AssertionError("a graph ran instead of being compiled")


def main() -> None:
    job = json.load(sys.stdin)
    request: RunRequest = from_dict(RunRequest, job["request"])
    graphs = graphs_of(request.recipe, request.execution)
    compile_graphs(replace(request, budget=None), graphs[job["share"] :: job["count"]])


if __name__ == "__main__":
    main()
