"""Start-up of a run in fresh processes: once with empty compiler caches, then with those that the first one filled.

    python -m benchmarks.bench_startup record-third --out rows.jsonl
    python -m benchmarks.bench_startup fast exec.compilers=0

Everything that `nanosprint train` does before its clock starts but reading data, which is opened where `--data DIR`
names it. A line for each process: seconds from its start until it could train, and the phases that the run itself
counts (`training/phases.py`), "import" among them. Below it a line for each graph: the tokens of its inputs, whether it
trains, whether it was read from a file (`training/stored.py`) or compiled, the seconds of its first call, and those
that torch counts as parts of a compilation. What no part explains are kernels' first launches, libraries, and the work.

`other` is the warm-up without all first calls: optimizers' kernels and the steps. The last line says how often the
compiler's caches had what was asked of them (`bypass`: what they refuse to hold). Cold, the attention back end is
measured, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_step import first_call
from benchmarks.harness import write_rows
from nanosprint.config.edit import apply_overrides, parse_overrides
from nanosprint.config.recipe import Execution
from nanosprint.recipes import load_recipe
from nanosprint.training import attention_choice, setup
from nanosprint.training.distributed import World, pick_device
from nanosprint.training.phases import Phases
from nanosprint.training.request import RunRequest
from nanosprint.training.stored import StoredLossSum

KINDS = ("hit", "miss", "bypass")
PARTS = ("dynamo", "aot", "inductor")
CACHES = {"aot_autograd": "autograd_cache", "inductor": "fxgraph_cache"}


def measure(
    recipe_name: str, words: dict[str, str], data: str | None, started: float, outcomes: Path | None
) -> dict[str, Any]:
    """Start a run in this process, which was started at time.time() `started`; the row.

    outcomes: where attention's choice is kept; None is the usual place.
    """
    if outcomes is not None:
        attention_choice.outcomes = lambda: outcomes
    phases, parts = Phases(), timed_first_calls()
    phases.add("import", time.time() - started)
    wanted = {k.removeprefix("exec."): v for k, v in words.items() if k.startswith("exec.")}
    recipe = load_recipe(recipe_name, {k: v for k, v in words.items() if not k.startswith("exec.")})
    request = RunRequest(recipe=recipe, execution=apply_overrides(Execution(), wanted), data=data)
    with phases("data"):
        found: Any = setup.find_data(request) if data is not None else None
    prepared = setup.prepare(request, World(0, 1, pick_device(request.execution.device)), found, phases=phases)
    prepared.synchronize()
    graphs = [first._asdict() | part for first, part in zip(prepared.first_calls, parts, strict=True)]
    other = phases.seconds["warm-up"] - sum(graph["seconds"] for graph in graphs)
    counters = torch._dynamo.utils.counters
    caches = {c: {k: counters[c].get(f"{prefix}_{k}", 0) for k in KINDS} for c, prefix in CACHES.items()}
    return {
        "benchmark": "startup", "recipe": recipe_name, "variant": words, "startup_s": time.time() - started,
        "phases_s": phases.seconds, "other_s": other, "graphs": graphs, "caches": caches,
        "compilers": prepared.request.execution.compilers,
    }  # fmt: skip


def timed_first_calls() -> list[dict[str, float]]:
    """From now on a dict of each graph's first call, of seconds by part of a compilation. They wait for the device."""
    parts: list[dict[str, float]] = []
    call = StoredLossSum.first_call

    def timed(*args: Any) -> Any:
        results: list[Any] = []
        parts.append(first_call(lambda: results.append(call(*args)))[1])
        return results[0]

    StoredLossSum.first_call = timed  # type: ignore[method-assign]
    return parts


def show(kind: str, row: dict[str, Any]) -> str:
    phases = "  ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases_s"].items())
    lines = [f"{kind}: ready after {row['startup_s']:.1f} s: {phases}"]
    for graph in row["graphs"]:
        parts = "  ".join(f"{part} {graph[part]:.1f}" for part in PARTS)
        lines.append(
            f"  graph of {graph['tokens']:,} tokens, {'training' if graph['trained'] else 'validation'}, "
            f"{'read' if graph['stored'] else 'compiled'}: {graph['seconds']:.1f} s, of it {parts}"
        )
    counts = (f"{c} " + " ".join(f"{n} {k}" for k, n in numbers.items()) for c, numbers in row["caches"].items())
    lines.append(f"  other: {row['other_s']:.1f} s of the warm-up")
    return "\n".join([*lines, f"  caches: {', '.join(counts)}; compiled ahead by {row['compilers']} processes"])


def in_process(args: argparse.Namespace, caches: str) -> dict[str, Any]:
    """A row measured in a fresh process with these caches. Raises RuntimeError where it fails."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    environment = {**os.environ, **folders}
    command = [sys.executable, "-m", "benchmarks.bench_startup", args.recipe, *args.overrides]
    command += ["--outcomes", f"{caches}/attention", *([] if args.data is None else ["--data", args.data])]
    done = subprocess.run(
        [*command, "--started", repr(time.time())], env=environment, stdout=subprocess.PIPE, text=True
    )
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
    parser.add_argument("--outcomes", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.started is not None:
        words = parse_overrides(args.overrides)
        print(json.dumps(measure(args.recipe, words, args.data, args.started, args.outcomes)))
        return
    with tempfile.TemporaryDirectory() as caches:
        for kind in ("cold", "warm"):
            row = {"caches_were": kind, **in_process(args, caches)}
            print(show(kind, row), flush=True)
            write_rows([row], args.out)


if __name__ == "__main__":
    main()
