"""One process of `benchmarks/scaling.py`, alone or started with others by torchrun: a recipe's steps, stage by stage.

Rows of `bench_step` go into a file as soon as each is measured. A last row says whether all processes then hold the
same weights, bit for bit.
"""

import argparse
import os
from pathlib import Path

from benchmarks.bench_step import Bench, places, show, stored
from benchmarks.harness import write_rows
from nanosprint.config.edit import apply_overrides, parse_overrides
from nanosprint.config.recipe import Execution
from nanosprint.training import distributed
from nanosprint.training.selfcheck import differing_weights

KERNELS = 25  # of each stage, shown and kept


def measure(recipe: str, words: dict[str, str], steps: int, profile_steps: int, out: Path) -> None:
    """Every process calls it; the first writes rows to `out`."""
    wanted = {k.removeprefix("exec."): v for k, v in words.items() if k.startswith("exec.")}
    execution = apply_overrides(Execution(), wanted)
    world = distributed.start(execution.device, execution.timeout_s)
    bench = Bench(recipe, words, world)
    stages = None if bench.recipe.schedule.stages is None else "scheduled"
    for place in places(bench.recipe, stages, None):
        row = {**bench.measure(place, steps, profile_steps), "benchmark": "scaling"}
        if world.is_main:
            print(show(row, KERNELS), flush=True)
            write_rows([stored(row, KERNELS)], out)
    differing = differing_weights(bench.state.model)
    if world.is_main:
        about = {"benchmark": "agreement", "recipe": recipe, "variant": words, "gpus": world.size}
        write_rows([{**about, "differing": differing}], out)
    distributed.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, required=True, help="timed, of every kind")
    parser.add_argument("--profile", type=int, required=True, help="steps that are profiled")
    parser.add_argument("--out", type=Path, required=True, help="file of rows, which are appended")
    args = parser.parse_intermixed_args()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as in training; read at the first use
    measure(args.recipe, parse_overrides(args.overrides), args.steps, args.profile, args.out)


if __name__ == "__main__":
    main()
