"""Time of a whole training step of a recipe, on random tokens: the loop with all but the step removed.

    python benchmarks/bench_step.py gpt2 exec.attention=cudnn --steps 20
    python benchmarks/bench_step.py gpt2 --sweep exec.attention=sdpa,flash,cudnn --sweep exec.lanes_per_microbatch=1,2

Prints for each variant: milliseconds a step, tokens/s, MFU against the named peak, peak memory and start-up seconds.
"""

import argparse
import gc
import itertools
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import write_rows
from nanosprint.config.edit import apply_overrides, parse_overrides
from nanosprint.config.recipe import Execution
from nanosprint.recipes import load_recipe
from nanosprint.training import profile
from nanosprint.training.batch import ModelStage, random_input
from nanosprint.training.distributed import World, pick_device
from nanosprint.training.microbatch import micro_batches_of, rows_of
from nanosprint.training.peak import peak
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state, compiled
from nanosprint.training.step import train_step
from nanosprint.training.warmup import turn_of


def measure(name: str, words: dict[str, str], steps: int, profile_steps: int) -> dict:
    """One variant: build, warm up, time `steps` steps, as many at once as all groups of parameters need to move."""
    recipe = load_recipe(name, {k: v for k, v in words.items() if not k.startswith("exec.")})
    wanted = {k.removeprefix("exec."): v for k, v in words.items() if k.startswith("exec.")}
    device = pick_device(wanted.get("device", "auto"))
    world = World(0, 1, device)
    execution = resolve(apply_overrides(Execution(), wanted), recipe, world)
    parts, started = execution.parts_per_microbatch, time.perf_counter()
    state = build_state(recipe, execution, 0, device)
    loss_sum = compiled(state.model, execution)
    plan = recipe.plan(recipe.train.num_steps // 2)
    rows = rows_of(plan.batch_tokens, recipe, execution)
    micro_batches = micro_batches_of(plan.batch_tokens, recipe.train.lanes, execution)
    batch = random_input(recipe, plan, rows, device, ModelStage(state.model).enter(plan), parts)

    turn, numbers = turn_of(recipe), itertools.count(plan.step)

    def step() -> None:
        now = replace(plan, step=next(numbers))  # groups that move at every second step do so here
        train_step(loss_sum, state, [batch] * micro_batches * parts, now, recipe.train)
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(turn):
        step()
    startup_s = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(-(-steps // turn)):
        start = time.perf_counter()
        for _ in range(turn):
            step()
        times.append((time.perf_counter() - start) / turn)
    seconds = statistics.median(times)
    ceiling = peak(device, execution.compute)
    flops = state.model.flops_per_token(plan.seq_len, plan.windows) * plan.batch_tokens / seconds
    row = {
        "benchmark": "step", "recipe": name, "variant": words, "ms": 1000 * seconds,
        "tokens_per_s": plan.batch_tokens / seconds, "mfu": flops / ceiling.flops if ceiling.flops else None,
        "peak": ceiling.source, "startup_s": startup_s, "compute": execution.compute,
        "tokens_per_microbatch": plan.batch_tokens // micro_batches,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip
    if profile_steps:
        row["table"] = profile.profile_work(step, device, profile_steps)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=A,B,C")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    base = parse_overrides(args.overrides)
    axes = [[(key, v) for v in values.split(",")] for key, values in parse_overrides(args.sweep).items()]
    for choice in itertools.product(*axes):
        words = {**base, **dict(choice)}
        label = " ".join(f"{k}={v}" for k, v in words.items()) or "defaults"
        try:
            row = measure(args.recipe, words, args.steps, args.profile)
        except (RuntimeError, ValueError) as error:
            print(f"{label}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = "" if row["memory_gib"] is None else f"  {row['memory_gib']:.1f} GiB"
        print(
            f"{label}: {row['ms']:.1f} ms  {row['tokens_per_s']:,.0f} tokens/s  MFU {mfu}{memory}  "
            f"start-up {row['startup_s']:.1f} s  micro-batches of {row['tokens_per_microbatch']:,}  {row['compute']}",
            flush=True,
        )
        if "table" in row:
            print(row["table"], flush=True)
        write_rows([row], args.out)


if __name__ == "__main__":
    main()
