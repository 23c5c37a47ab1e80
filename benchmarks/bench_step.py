"""Time of a whole training step of a recipe, on random tokens: the loop with all but the step removed.

    python -m benchmarks.bench_step gpt2 exec.attention=cudnn --steps 20
    python -m benchmarks.bench_step gpt2 --sweep exec.attention=sdpa,flash,cudnn --sweep exec.lanes_per_microbatch=1,2
    python -m benchmarks.bench_step record --stages --out rows.jsonl

The plan is that of the middle step. With `--stages` it is that of each stage in turn, from its first step on, in one
process (`--stages all`: and of the extension); with `--stage N` that of one, counted from 0. Documents have web-like
lengths.

A row for each variant and stage: milliseconds a step, those in which the host launches it, tokens/s, MFU against the
named peak, peak memory; seconds until the first step was done, which is compilation, and what torch says it went to.
With a profile (the default with stages) also time by kernel group beside its floor (`benchmarks/floors.py`), the
longest kernels, and the share of time in which the GPU had nothing to do. Several processes that a launcher started
measure together (`benchmarks/scaling.py`): a row has the slowest's milliseconds, what was sent, and how long no
computing hid it. A row says whether its steps were recorded (`exec.cuda_graphs`). Steps follow each other as in
training, without waiting for the device in between; where some groups are updated on every n-th step, a step is the
mean of n.
"""

import argparse
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.floors import Step, ceilings_of, floors_ms, products_line
from benchmarks.harness import elapsed_ms, mark, synchronize, write_rows
from benchmarks.overlap import communication, length
from nanosprint.config.edit import apply_overrides, parse_overrides
from nanosprint.config.recipe import Execution, Recipe
from nanosprint.config.schedule import StepPlan
from nanosprint.ops.fp8 import has_fp8
from nanosprint.optim.sharding import from_all
from nanosprint.optim.traffic import traffic
from nanosprint.recipes import load_recipe
from nanosprint.training import profile
from nanosprint.training.batch import ModelInput, ModelStage, random_input
from nanosprint.training.distributed import World, pick_device
from nanosprint.training.memory import recorded_bytes
from nanosprint.training.microbatch import micro_batches_of, rows_of
from nanosprint.training.peak import peak
from nanosprint.training.replay import Replayed
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_backward, build_state, compiled, set_threads
from nanosprint.training.step import train_step

WARM_UP = 2  # times that every kind of step is done before it is timed, the first not among them
# What torch calls the parts of a compilation: the first holds the second, that and the last hold the third.
PHASES = ("entire_frame_compile", "backend_compile", "inductor_compile", "entire_backward_compile")


@dataclass(frozen=True)
class Place:
    """Where in a run to measure: steps start .. end - 1, all of one plan but for what changes at every step."""

    name: str
    start: int
    end: int


def places(recipe: Recipe, stages: str | None, stage: int | None) -> list[Place]:
    """The middle of the run; with `stages` "scheduled" or "all" each of them that has a step; with `stage` that one.

    Raises ValueError where the recipe has no stages, or no such stage.
    """
    num_steps, schedule = recipe.train.num_steps, recipe.schedule.stages
    if stages is None and stage is None:
        return [Place("middle", num_steps // 2, num_steps)]
    if schedule is None:
        raise ValueError(f"recipe {recipe.name!r} has no schedule.stages: leave out --stages and --stage")
    *scheduled, extension = schedule.spans(num_steps)
    found = [Place(f"stage {i}", span.start, span.end) for i, span in enumerate(scheduled)]
    if stage is not None:
        if not 0 <= stage < len(found):
            raise ValueError(f"--stage {stage}: recipe {recipe.name!r} has stages 0 to {len(found) - 1}")
        found = [found[stage]]
    elif stages == "all":
        found.append(Place("extension", extension.start, extension.end))
    return [place for place in found if place.start < place.end]


class Bench:
    """A variant of a recipe, built; its places are measured one after the other, in the order of the run."""

    def __init__(self, name: str, words: dict[str, str], world: World | None = None) -> None:
        """world: of processes that train together, each of which builds a bench like this; None: this one alone."""
        started = time.perf_counter()
        self.recipe = load_recipe(name, {k: v for k, v in words.items() if not k.startswith("exec.")})
        wanted = {k.removeprefix("exec."): v for k, v in words.items() if k.startswith("exec.")}
        execution = apply_overrides(Execution(), wanted)
        self.world = world = world or World(0, 1, pick_device(execution.device))
        self.device = world.device
        set_threads(execution, world)
        self.execution = resolve(execution, self.recipe, world)
        self.state = build_state(self.recipe, self.execution, 0, self.device)
        self.loss_sum = compiled(self.state.model, self.execution)
        self.backward = build_backward(self.state, self.loss_sum, self.execution)
        self.failure: str | None = None  # to record steps
        self.stage = ModelStage(self.state.model)
        synchronize()
        self.about = {"benchmark": "step", "recipe": name, "variant": words, "compute": self.execution.compute}
        self.about["gpus"] = world.size
        self.about["build_s"] = time.perf_counter() - started

    @property
    def period(self) -> int:
        """After so many steps every group has been updated as often as it is."""
        return math.lcm(*(group.every for group in self.recipe.groups))

    def plan(self, place: Place, i: int) -> StepPlan:
        """Of the i-th step from the place's start; where it has too few, they are thought to go on."""
        return replace(self.recipe.plan(min(place.start + i, place.end - 1)), step=place.start + i)

    def inputs(self, plan: StepPlan) -> list[ModelInput]:
        """All micro-batches of a step that this process has, each with documents of its own."""
        parts, scale = self.execution.parts_per_microbatch, self.stage.enter(plan)
        assert isinstance(parts, int)
        rows = rows_of(plan.batch_tokens, self.recipe, self.execution)
        count = micro_batches_of(plan.batch_tokens, self.recipe.train.lanes, self.execution) * parts
        seeds = range(self.world.rank * count, (self.world.rank + 1) * count)
        return [random_input(self.recipe, plan, rows, self.device, scale, parts, seed) for seed in seeds]

    def steps(self, place: Place) -> tuple[Callable[[], None], list[ModelInput]]:
        """A function that does the next step whenever it is called, from the place's first on, and its inputs."""
        inputs, numbers = self.inputs(self.plan(place, 0)), itertools.count()

        def step() -> None:
            plan = self.plan(place, next(numbers))
            train_step(self.backward, self.state, inputs, plan, self.recipe.train)

        return step, inputs

    def measure(self, place: Place, steps: int, profile_steps: int) -> dict[str, Any]:
        """A row. `steps` of every kind are timed; `profile_steps` are then profiled, rounded up to whole periods.

        Every process must call it.
        """
        step, inputs = self.steps(place)
        first_s, phases = self._first(step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # what compilation took is gone by now
        for _ in range(WARM_UP * self.period):
            step()
        ms = max(from_all(self._time(step, steps)))
        host_ms = max(from_all(self._host(step))) if self.device.type == "cuda" else None
        plan, size = self.plan(place, 0), self.world.size
        memory = None
        if self.device.type == "cuda":
            memory = (torch.cuda.max_memory_allocated() + recorded_bytes(self.device)) / 2**30
        ceiling = peak(self.device, self.execution.compute)
        flops = 1e3 * self.state.model.flops_per_token(plan.seq_len, plan.windows) * plan.batch_tokens / ms
        row = {
            **self.about, "stage": place.name, "step": place.start, "ms": ms, "host_ms": host_ms,
            "batch_tokens": plan.batch_tokens,
            "us_per_token": 1e3 * ms / plan.batch_tokens, "tokens_per_s": 1e3 * plan.batch_tokens / ms,
            "mfu": flops / ceiling.flops / size if ceiling.flops else None, "peak": ceiling.source,
            "tokens_per_microbatch": plan.batch_tokens
            // (size * micro_batches_of(plan.batch_tokens, self.recipe.train.lanes, self.execution)),
            "memory_gib": None if memory is None else max(from_all(memory)), "steps_of_run": place.end - place.start,
            "first_step_s": first_s, "compile_s": phases, "mean_document": mean_document(inputs),
            "recorded": self.recorded, "recording_failure": self.failure,
        }  # fmt: skip
        if profile_steps:
            row.update(self._profile(step, inputs, plan, ms, profile_steps))
        if size > 1:
            row.update(self._sent(ms))
        return row

    @property
    def recorded(self) -> bool:
        """Whether steps replay what was recorded."""
        return isinstance(self.backward, Replayed) and self.backward.recorded() > 0

    def _first(self, step: Callable[[], None]) -> tuple[float, dict[str, float]]:
        """`first_call`; where a process then cannot record the step, all go on without, as in training."""
        if not isinstance(self.backward, Replayed):
            return first_call(step)
        self.backward.on_trial = True
        figures = first_call(step)
        self.failure = self.backward.agree()
        if self.failure is not None:
            self.backward = build_backward(self.state, self.loss_sum, replace(self.execution, cuda_graphs="off"))
        return figures

    def _sent(self, ms: float) -> dict[str, Any]:
        """Megabytes a step that a process sends, at most, and the GB/s on average; None where the data decide."""
        try:
            parts = traffic(self.state.engine.moving, self.world.size)
        except ValueError:  # sparse look-ups
            return {"sent_mb": None, "sent_gb_per_s": None}
        megabytes = sum(part.sent for part in parts) / 1e6
        return {"sent_mb": megabytes, "sent_gb_per_s": megabytes / ms, "messages": sum(p.messages for p in parts)}

    def _host(self, step: Callable[[], None], repeats: int = 3) -> float:
        """Milliseconds in which the host launches a step that finds the device idle: what it cannot be faster than."""
        times = []
        for _ in range(repeats * self.period):
            synchronize()
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return _mean_of_kinds(times, self.period)

    def _time(self, step: Callable[[], None], steps: int) -> float:
        """Milliseconds of a step: the median of each kind of step, and the mean of those."""
        synchronize()
        marks = [mark(self.device)]
        for _ in range(steps * self.period):
            step()
            marks.append(mark(self.device))
        synchronize()
        times = [elapsed_ms(*pair) for pair in itertools.pairwise(marks)]
        return _mean_of_kinds(times, self.period)

    def _profile(
        self, step: Callable[[], None], inputs: list[ModelInput], plan: StepPlan, ms: float, steps: int
    ) -> dict[str, Any]:
        """Time by kernel group and, on a GPU, what the groups take at least and the share in which it is idle.

        Of this process; communication of each of them.
        """
        steps = -(-steps // self.period) * self.period
        kernels, spans = profile.profile_work(step, self.device, steps)
        groups = profile.by_group(kernels)
        row: dict[str, Any] = {"groups_ms": groups, "kernels": kernels, "idle": None, "floors_ms": {}}
        if self.world.size > 1:
            everyone = from_all(communication(spans, steps))
            row["communication_ms"] = [theirs and theirs.total for theirs in everyone]
            row["exposed_ms"] = [theirs and theirs.exposed for theirs in everyone]
        if self.device.type != "cuda":
            return row
        # The profiler works on the host, too: where that slows a step down, communication looks less hidden than it is.
        row["profiled_ms"] = (max(span.end for span in spans) - spans[0].start) / steps
        row["idle"] = max(0.0, 1 - length(span[1:] for span in spans) / steps / ms)
        if self.world.size > 1:
            return row  # floors are of a whole step
        ceilings = ceilings_of(torch.cuda.get_device_name(self.device))
        if ceilings is not None:
            fp8 = self.execution.fp8 != "off" and has_fp8(self.device)
            row["floors_ms"] = floors_ms(Step(self.recipe, plan, self.state.model, inputs, fp8), ceilings)
        return row


def _mean_of_kinds(times: list[float], period: int) -> float:
    """Of times of steps whose kinds take turns: the mean of each kind's median."""
    return statistics.mean(statistics.median(times[kind::period]) for kind in range(period))


def first_call(step: Callable[[], None]) -> tuple[float, dict[str, float]]:
    """Seconds of a step that may have to be compiled, and those that torch counts as parts of its compilation.

    dynamo traces Python, aot the gradients, inductor writes and compiles kernels; the rest, libraries and kernels of
    our own among it, is no part.
    """
    before, start = compile_seconds(), time.perf_counter()
    step()
    synchronize()
    took = time.perf_counter() - start
    return took, {phase: seconds - before[phase] for phase, seconds in compile_seconds().items()}


def compile_seconds() -> dict[str, float]:
    """Seconds that this process has spent in each phase of compilation, without the phases that it contains."""
    spent = torch._dynamo.utils.calculate_time_spent()
    # The backward graph is traced with the forward one, but compiled at its first call, outside of the frame.
    frame, backend, inductor, backward = (spent.get(key, 0.0) for key in PHASES)
    return {"dynamo": frame - backend, "aot": backend + backward - inductor, "inductor": inductor}


def mean_document(inputs: list[ModelInput]) -> float | None:
    """Tokens of a document on average; None without documents."""
    ends = [given.context.documents.cu_seqlens for given in inputs if given.context.documents is not None]
    if not ends:
        return None
    return sum(given.targets.numel() for given in inputs) / sum(int((end.diff() > 0).sum()) for end in ends)


def show(row: dict[str, Any], top: int) -> str:
    """A row as text: a line of figures, a line of start-up, and where there was a profile its table."""
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    memory = "" if row["memory_gib"] is None else f"  {row['memory_gib']:.1f} GiB"
    idle = "" if row.get("idle") is None else f"  idle {row['idle']:.1%}"
    host = "" if row.get("host_ms") is None else f"  host {row['host_ms']:.1f} ms"
    hidden = [ms for ms in row.get("exposed_ms", []) if ms is not None]
    exposed = f"  communication exposed {min(hidden):.2f} to {max(hidden):.2f} ms" if hidden else ""
    documents = "" if row["mean_document"] is None else f"  documents of {row['mean_document']:.0f}"
    phases = "  ".join(f"{phase} {seconds:.1f}" for phase, seconds in row["compile_s"].items())
    recorded = "recorded" if row["recorded"] else "not recorded"
    failed = "" if row["recording_failure"] is None else f" ({row['recording_failure']})"
    lines = [
        f"{row['stage']}: {row['ms']:.1f} ms  {row['us_per_token']:.3f} us/token  {row['tokens_per_s']:,.0f} tokens/s  "
        f"MFU {mfu}{memory}{host}{idle}{exposed}  micro-batches of {row['tokens_per_microbatch']:,}{documents}  "
        f"{row['compute']}",
        f"  start-up: built {row['build_s']:.1f} s  first step {row['first_step_s']:.1f} s, of it {phases}",
        f"  steps {recorded}{failed}",
    ]
    if "kernels" in row:
        wall_ms = None if row["idle"] is None else row["ms"]
        lines.append(profile.table(row["kernels"], top=top, wall_ms=wall_ms, floors=row["floors_ms"]))
        lines += products_line(row["groups_ms"], row["floors_ms"])
    return "\n".join(lines)


def stored(row: dict[str, Any], top: int) -> dict[str, Any]:
    """A row as it is kept: of its kernels the longest."""
    kernels = [kernel._asdict() for kernel in row.get("kernels", [])[:top]]
    return {**row, "kernels": kernels} if kernels else row


def attempt(label: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; None where a variant cannot be built or does not fit, which is said."""
    try:
        return work()
    except (RuntimeError, ValueError) as error:
        print(f"{label}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run(args: argparse.Namespace) -> int:
    """All variants at all places; how many rows there are."""
    base, rows = parse_overrides(args.overrides), 0
    axes = [[(key, v) for v in values.split(",")] for key, values in parse_overrides(args.sweep).items()]
    in_stages = args.stages is not None or args.stage is not None
    profile_steps = args.profile if args.profile is not None else 4 * in_stages
    for choice in itertools.product(*axes):
        words = {**base, **dict(choice)}
        label = " ".join(f"{k}={v}" for k, v in words.items()) or "defaults"
        print(label, flush=True)
        bench = attempt(label, lambda words=words: Bench(args.recipe, words))
        if bench is None:
            continue
        for place in places(bench.recipe, args.stages, args.stage):
            name = f"{label}, {place.name}"
            row = attempt(name, lambda b=bench, p=place: b.measure(p, args.steps, profile_steps))
            if row is None:
                continue
            print(show(row, args.top), flush=True)
            write_rows([stored(row, args.top)], args.out)
            rows += 1
        del bench  # before the next is built
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=A,B,C")
    parser.add_argument("--stages", nargs="?", const="scheduled", choices=["scheduled", "all"], help="behind overrides")
    parser.add_argument("--stage", type=int, metavar="N", help="one stage, counted from 0")
    parser.add_argument("--steps", type=int, default=10, help="timed, of every kind")
    parser.add_argument("--profile", type=int, metavar="STEPS", help="profiled; 4 with stages, else 0")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="kernels listed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    try:
        rows = run(args)
    except ValueError as error:
        parser.error(str(error))
    if not rows:
        raise SystemExit("nothing was measured")


if __name__ == "__main__":
    main()
