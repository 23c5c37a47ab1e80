"""Compiles the graphs of a run in processes of their own, all at the same time, before the run needs them.

Tracing, gradients and most of Inductor are Python, so a process compiles one graph after the other; and the graphs of a
run, one for each stage and one for validation, are many seconds each. Here every process builds the model without its
weights' values, compiles its share of the graphs, stores them (`stored.py`) and ends without having run any. The run's
own process is free meanwhile for the kernels that are not the compiler's. A graph that cannot be stored is left in the
caches of Inductor and AOTAutograd, which spare the run all but tracing.

Where the files are there already this would cost more than it saves, so a mark beside them says for which graphs they
are. It is an estimate: without files behind it the run compiles what is missing, one graph after the other.

A graph is found if nothing that its name is made of differs, the index of the GPU included. So several processes of a
host share graphs where each sees its own GPU as the first, and one of them has them compiled for all.
"""

import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from nanosprint.config.edit import from_dict, to_dict
from nanosprint.data.lock import locked
from nanosprint.training.batch import ModelInput
from nanosprint.training.environment import usable_cores
from nanosprint.training.request import RunRequest
from nanosprint.training.step import LossSum
from nanosprint.training.stored import GraphStore, circumstances, converter, store_folder
from nanosprint.training.warmup import Graph, graph_of, graphs_of

_log = logging.getLogger(__name__)
_NOT_STORED = 3  # exit code: all graphs are compiled, but not all are stored


class Compilers:
    """The processes that compile for a run."""

    def __init__(self, request: RunRequest, count: int) -> None:
        self._mark = _mark_of(request)
        self._patience_s = 0.8 * request.execution.timeout_s  # others may be waiting for who waits here
        self._processes = [_start(request, share, count) for share in range(count)]

    def wait(self) -> None:
        """Wait until all are done, and say of the first that failed why."""
        ends = [_end(process, stderr, self._patience_s) for process, stderr in self._processes]
        failed = [said for code, said in ends if code not in (0, _NOT_STORED)]
        unstored = [said for code, said in ends if code == _NOT_STORED]
        if failed:
            _log.warning("graphs could not be compiled ahead (%s): the run compiles them one by one", failed[0])
            return
        if unstored:
            _log.warning("graphs could not be stored (%s): every start traces them", unstored[0])
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        self._mark.touch()

    def stop(self) -> None:
        """End those that still run."""
        for process, _ in self._processes:
            process.kill()


def compile_ahead(request: RunRequest, local_rank: int = 0) -> Compilers | None:
    """Start what compiles the graphs of a resolved `request`; None where it wants none or they are there already.

    local_rank: of several processes of a host the first does it.
    """
    count = request.execution.compilers
    assert isinstance(count, int)
    return Compilers(request, count) if count and not local_rank and not _mark_of(request).exists() else None


def turn_at(request: RunRequest) -> AbstractContextManager[None]:
    """Keep others who ask for it from having the same graphs compiled meanwhile: they find them afterwards."""
    return locked(_mark_of(request).with_suffix(".lock"))


def _start(request: RunRequest, share: int, count: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  (`_end` reads it)
    threads = max(1, (usable_cores() or 1) // count)
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


def _end(process: subprocess.Popen[bytes], stderr: IO[bytes], patience_s: float) -> tuple[int, str]:
    """Wait for it; its exit code and the last line that it said."""
    try:
        code = process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return 1, f"one took more than {patience_s:.0f} s"
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    return code, lines[-1] if lines else f"one ended with code {code}"


def _mark_of(request: RunRequest) -> Path:
    """The file that says that there are the graphs of `request`: of its model, for all its shapes and documents."""
    recipe, execution = request.recipe, request.execution
    graphs = [
        (graph_of(graph.plan, execution), graph.plan.max_document, *graph[1:]) for graph in graphs_of(recipe, execution)
    ]
    what = [circumstances(recipe, execution), to_dict(recipe.data), recipe.max_seq_len, graphs]
    digest = hashlib.sha256(json.dumps(what, default=to_dict).encode())
    return store_folder() / f"{digest.hexdigest()[:32]}.ready"


class _Compiled(Exception):
    """Raised where a graph would run."""


def _only_compile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A back end of torch.compile: Inductor, whose result is not run."""
    torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def run(*_: Any) -> None:
        raise _Compiled

    return run


def compile_graphs(request: RunRequest, graphs: list[Graph]) -> list[Exception]:
    """Compile and store them for a resolved request, in this process, which runs none; why some are not stored."""
    from nanosprint.training.batch import ModelStage, random_input
    from nanosprint.training.distributed import World, pick_device
    from nanosprint.training.setup import build_state, cap_memory, compiled, set_threads

    recipe, execution = request.recipe, request.execution
    world = World(0, 1, pick_device(execution.device))
    set_threads(execution, world)
    cap_memory(execution, world.device)
    state = build_state(recipe, execution, None, world.device)
    loss_sum, stage = compiled(state.model, execution, _only_compile), ModelStage(state.model)
    store, convert = GraphStore(state.model, recipe, execution), converter(execution)
    errors = []
    for plan, rows, parts, trained in graphs:
        inputs = random_input(recipe, plan, rows, world.device, stage.enter(plan), parts)
        converted = inputs._replace(context=convert(inputs.context))
        with torch.set_grad_enabled(trained):
            try:
                if not store.path(converted).exists():  # it may be another recipe's, too
                    store.save(converted)
            except Exception as error:  # of an experimental part of torch, or of a graph's
                errors.append(error)
                _leave_in_caches(loss_sum, inputs)
    return errors


def _leave_in_caches(loss_sum: LossSum, inputs: ModelInput) -> None:
    try:
        loss_sum(*inputs)
    except _Compiled:
        return
    raise AssertionError("a graph ran instead of being compiled")


def main() -> None:
    gc.disable()  # a tenth of tracing and of the compiler's time, for some tens of MB that soon end with the process
    job = json.load(sys.stdin)
    request: RunRequest = from_dict(RunRequest, job["request"])
    graphs = graphs_of(request.recipe, request.execution)
    errors = compile_graphs(replace(request, budget=None), graphs[job["share"] :: job["count"]])
    if errors:
        told = " ".join(str(errors[0]).split())[:500] or "no reason given"
        print(f"{type(errors[0]).__name__}: {told}", file=sys.stderr)
        sys.exit(_NOT_STORED)


if __name__ == "__main__":
    main()
