"""Start-up of a run in fresh processes: once with empty compiler caches, then with those that the first one filled.

    python -m benchmarks.bench_startup record-third --out rows.jsonl
    python -m benchmarks.bench_startup fast exec.compilers=0

Everything that `nanosprint train` does before its clock starts but reading data, which is opened where `--data DIR`
names it. A line for each process: seconds from its start until it could train, and what they went to:

    import    Python, torch, this package
    data      finding shards and the tokenizer
    resolve   choices for this machine, the attention back end's trial among them
    build     the model with its initial weights, its optimizers
    ahead     waiting for the processes that compile graphs ahead (`exec.compilers`), after what is done meanwhile
    warm-up   a step of every kind; in it a line for each graph with the parts of its compilation
    other     of the warm-up what is no part of a compilation: kernels' first launches, libraries, the steps

and how often the compiler's caches had what was asked of them (`bypass`: what they refuse to hold).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_step import first_call
from benchmarks.harness import write_rows
from nanosprint.config.edit import apply_overrides, parse_overrides
from nanosprint.config.recipe import Execution
from nanosprint.recipes import load_recipe
from nanosprint.training import setup
from nanosprint.training.distributed import World, pick_device
from nanosprint.training.precompile import Compilers
from nanosprint.training.request import RunRequest

KINDS = ("hit", "miss", "bypass")
CACHES = {"aot_autograd": "autograd_cache", "inductor": "fxgraph_cache"}


class Stopwatch:
    """Seconds by name, of functions that are watched wherever they are called from."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Count the time of `owner.function` as that of `name` from now on."""
        work = getattr(owner, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self.time(name, lambda: work(*args, **kwargs))

        setattr(owner, function, watched)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def measure(recipe_name: str, words: dict[str, str], data: str | None, started: float) -> dict[str, Any]:
    """Start a run in this process, which was started at time.time() `started`; the row."""
    watch, graphs = Stopwatch(), []
    watch.seconds["import"] = time.time() - started
    wanted = {k.removeprefix("exec."): v for k, v in words.items() if k.startswith("exec.")}
    recipe = load_recipe(recipe_name, {k: v for k, v in words.items() if not k.startswith("exec.")})
    request = RunRequest(recipe=recipe, execution=apply_overrides(Execution(), wanted), data=data)
    for owner, function, name in (
        (setup, "resolve", "resolve"),
        (setup, "build_state", "build"),
        (setup, "warm_up_eagerly", "kernels"),
        (Compilers, "wait", "ahead"),
        (setup, "warm_up", "warm-up"),
    ):
        watch.watch(owner, function, name)
    compile_model = setup.compiled

    def compiled(*args: Any) -> Any:
        loss_sum = compile_model(*args)

        def timed(*inputs: Any) -> Any:
            result: list[Any] = []
            took, phases = first_call(lambda: result.append(loss_sum(*inputs)))
            if phases["dynamo"] > 0:
                graphs.append({"s": took, **phases})
            return result[0]

        return timed

    setup.compiled = compiled  # type: ignore[assignment]
    found: Any = watch.time("data", lambda: setup.find_data(request)) if data is not None else None
    device = pick_device(request.execution.device)
    prepared = setup.prepare(request, World(0, 1, device), found)
    prepared.synchronize()
    compilation = sum(graph[phase] for graph in graphs for phase in ("dynamo", "aot", "inductor"))
    watch.seconds["other"] = watch.seconds["warm-up"] - compilation
    counters = torch._dynamo.utils.counters
    caches = {c: {k: counters[c].get(f"{prefix}_{k}", 0) for k in KINDS} for c, prefix in CACHES.items()}
    return {
        "benchmark": "startup", "recipe": recipe_name, "variant": words, "startup_s": time.time() - started,
        "parts_s": watch.seconds, "graphs": graphs, "caches": caches, "compilers": prepared.request.execution.compilers,
    }  # fmt: skip


def show(kind: str, row: dict[str, Any]) -> str:
    parts = "  ".join(f"{name} {seconds:.1f}" for name, seconds in row["parts_s"].items())
    lines = [f"{kind}: ready after {row['startup_s']:.1f} s: {parts}"]
    for i, graph in enumerate(row["graphs"]):
        phases = "  ".join(f"{phase} {seconds:.1f}" for phase, seconds in graph.items() if phase != "s")
        lines.append(f"  graph {i}: {graph['s']:.1f} s, of it {phases}")
    counts = (f"{c} " + " ".join(f"{n} {k}" for k, n in numbers.items()) for c, numbers in row["caches"].items())
    return "\n".join([*lines, f"  caches: {', '.join(counts)}; compiled ahead by {row['compilers']} processes"])


def in_process(args: argparse.Namespace, caches: str) -> dict[str, Any]:
    """A row measured in a fresh process with these caches. Raises RuntimeError where it fails."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    environment = {**os.environ, **folders}
    command = [sys.executable, "-m", "benchmarks.bench_startup", args.recipe, *args.overrides]
    command += ["--started", repr(time.time()), *([] if args.data is None else ["--data", args.data])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that was measured ended with code {done.returncode}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--data", metavar="DIR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # of a process that is measured
    args = parser.parse_intermixed_args()
    if args.started is not None:
        print(json.dumps(measure(args.recipe, parse_overrides(args.overrides), args.data, args.started)))
        return
    with tempfile.TemporaryDirectory() as caches:
        for kind in ("cold", "warm"):
            row = {"caches_were": kind, **in_process(args, caches)}
            print(show(kind, row), flush=True)
            write_rows([row], args.out)


if __name__ == "__main__":
    main()
