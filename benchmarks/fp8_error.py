"""What products in FP8 do to loss and gradients, one switch at a time, at weights that training has made.

    python -m benchmarks.fp8_error record-third --data DIR --steps 120 --batches 8 [KEY=VALUE ...]
    python -m benchmarks.fp8_error record-third --data DIR --run runs/base --steps 313
    ... --variant "bf16: precision.fp8_mlp=none" --variant "mlp: precision.fp8_mlp.backward=true"

The recipe is trained for `--steps`, or the newest checkpoint of `--run` is read, which must be that of as many steps.
Then every variant computes loss and gradients of the same `--batches` micro-batches of that step at the same weights,
nothing compiled. Delayed scales are those that one call on a micro-batch before has left. The first variant, which has
no FP8 but the head's, is what others are compared with.

loss    mean difference a token (training's objective: the noise of the forward products), and its standard error
A line for each group of matrices, in parts of the reference's norm:
batch   error of a micro-batch's gradient, root of the mean square
common  what of it all micro-batches share: with n of them the mean's error has it in full and the rest at 1/n. The
        rest is like a somewhat smaller batch; this is not averaged away
bias    the error's component along the gradient: -0.01 is a gradient that is a percent too short. Muon and Adam do not
        see the length, so it matters only where it differs between tokens
noise   of the reference: how much a micro-batch's gradient differs from what all have in common

`common` and `noise` are in parts of what the gradients of all micro-batches have in common, `batch` in parts of one's.
"""

import argparse
import gc
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import write_rows
from benchmarks.variants import parse_variant, request_of
from nanosprint.config.edit import parse_overrides
from nanosprint.config.schedule import StepPlan
from nanosprint.data.prefixes import prefixes_of
from nanosprint.model.gpt import GPT
from nanosprint.model.roles import collect_roles
from nanosprint.recipes import load_recipe
from nanosprint.results.runs import RunDir
from nanosprint.training import checkpoint
from nanosprint.training.batch import ModelInput, ModelStage, model_inputs
from nanosprint.training.distributed import World, pick_device
from nanosprint.training.microbatch import resolved
from nanosprint.training.request import RunRequest
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import Data, build_backward, build_state, compiled, find_data, open_loader, set_threads
from nanosprint.training.step import train_step

Gradients = dict[str, Tensor]
Variation = tuple[str, Mapping[str, Any]]  # a variant's name and overrides
OFF = {"precision.fp8_mlp": "none", "precision.fp8_projections": "none"}


def _mlp(**settings: Any) -> dict[str, Any]:
    return {**OFF, "precision.fp8_mlp": settings}


def _projections(**settings: Any) -> dict[str, Any]:
    return {**OFF, "precision.fp8_projections": settings}


VARIANTS: list[Variation] = [
    ("bf16", OFF),
    ("mlp", _mlp()),
    ("mlp, static input", _mlp(input="static")),
    ("mlp, backward", _mlp(backward=True)),
    ("mlp, weights", _mlp(backward=True, weights=True)),
    ("qkv, forward", _projections(out=False, backward=False)),
    ("qkv", _projections(out=False)),
    ("out, forward", _projections(qkv=False, backward=False)),
    ("out", _projections(qkv=False)),
    ("all", {**_mlp(backward=True, input="static"), "precision.fp8_projections": {}}),
]


@dataclass(frozen=True)
class Setting:
    """Where gradients are taken: weights by name, and the micro-batches of the step after them."""

    request: RunRequest  # of the recipe without variants, its execution resolved
    data: Data
    device: torch.device
    steps: int  # done
    batches: int
    weights: dict[str, Tensor]

    @property
    def plan(self) -> StepPlan:
        recipe = self.request.recipe
        return recipe.plan(min(self.steps, recipe.train.num_steps - 1))

    def inputs(self, attn_scale: float | None) -> list[ModelInput]:
        """One more than `batches`: on the last of them scales settle."""
        plan, count = self.plan, self.batches + 1
        parts = resolved(self.request.execution.parts_per_microbatch)
        world = World(0, 1, self.device)
        with open_loader(self.request, self.data, world, num_steps=count, plan=lambda _: plan) as steps:
            batches = (batch for step in steps for batch in step.micro_batches)
            return list(islice(model_inputs(batches, plan, attn_scale, parts), count))


@dataclass
class Sums:
    """Of one group of matrices over micro-batches: squares of gradients and errors, and of their means."""

    n: int = 0
    squares: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("gg", "ee", "ge"), 0.0))
    of_means: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("gg", "ee", "ge"), 0.0))

    def shared(self, key: str) -> float:
        """The product of the parts that all micro-batches have in common; without bias, so it may be below zero."""
        return (self.n * self.of_means[key] - self.squares[key] / self.n) / (self.n - 1)

    def row(self) -> dict[str, float]:
        signal = max(self.shared("gg"), 1e-300)
        return {
            "batch": math.sqrt(self.squares["ee"] / max(self.squares["gg"], 1e-300)),
            "common": math.sqrt(max(self.shared("ee"), 0.0) / signal),
            "bias": self.shared("ge") / signal,
            "noise": math.sqrt(max(self.squares["gg"] / self.n / signal - 1, 0.0)),
        }


def compare(reference: list[Gradients], errors: Iterator[Gradients], groups: dict[str, str]) -> dict[str, Sums]:
    """`groups`: that of each gradient by name. At least two micro-batches."""
    sums = {group: Sums(n=len(reference)) for group in groups.values()}
    total: Gradients = {}
    for gradients, error in zip(reference, errors, strict=True):
        for name, e in error.items():
            _add(sums[groups[name]].squares, gradients[name], e)
            total[name] = total[name] + e if name in total else e
    for name, e in total.items():
        mean = torch.stack([gradients[name] for gradients in reference]).mean(0)
        _add(sums[groups[name]].of_means, mean, e / len(reference))
    return sums


def _add(products: dict[str, float], g: Tensor, e: Tensor) -> None:
    for key, a, b in (("gg", g, g), ("ee", e, e), ("ge", g, e)):
        products[key] += torch.sum(a.double() * b.double()).item()


class Variant:
    """The model of a variant, with the setting's weights and scales that have settled."""

    def __init__(self, words: Mapping[str, Any], base: dict[str, str], name: str, setting: Setting) -> None:
        self.recipe = load_recipe(name, {**base, **words})
        self.model = build_state(self.recipe, setting.request.execution, setting.request.seed, setting.device).model
        with torch.no_grad():
            for key, p in self.model.named_parameters():
                p.copy_(setting.weights[key])
        set_prefixes(self.model, setting.data)
        self.inputs = setting.inputs(ModelStage(self.model).enter(setting.plan))
        self.tokens = setting.plan.batch_tokens
        train = self.recipe.train
        self.divisor = train.lanes if train.objective == "lane_mean" else self.tokens
        self.groups = {
            key: role.name
            for key, role in collect_roles(self.model).items()
            if role.name.partition(".")[0] == "matrix" or role.name == "embed"
        }
        for steps in (0, setting.steps):  # the second makes use of scales that the first has left
            self.model.refresh(steps)
        self.model.loss_sum(*self.inputs.pop())

    def gradients(self) -> Iterator[tuple[float, Gradients]]:
        """Loss a token and gradients of each micro-batch."""
        chosen = {key: p for key, p in self.model.named_parameters() if key in self.groups}
        for inputs in self.inputs:
            loss = self.model.loss_sum(*inputs)
            found = torch.autograd.grad(loss / self.divisor, list(chosen.values()))
            yield loss.item() / inputs.targets.numel(), {k: g.float() for k, g in zip(chosen, found, strict=True)}


def set_prefixes(model: GPT, data: Data) -> None:
    model.set_prefixes(torch.from_numpy(prefixes_of(data.tokenizer, model.config.vocab_size)))


def trained(request: RunRequest, data: Data, device: torch.device, steps: int) -> dict[str, Tensor]:
    """Weights after so many steps of the recipe."""
    recipe, execution = request.recipe, request.execution
    state = build_state(recipe, execution, request.seed, device)
    set_prefixes(state.model, data)
    backward = build_backward(state, compiled(state.model, execution), execution)
    stage = ModelStage(state.model)
    with open_loader(request, data, World(0, 1, device), num_steps=steps) as loader:
        for i, step in enumerate(loader):
            plan = recipe.plan(i)
            inputs = model_inputs(step.micro_batches, plan, stage.enter(plan), resolved(execution.parts_per_microbatch))
            loss = train_step(backward, state, inputs, plan, recipe.train)
    print(f"{steps} steps, training loss {loss.item() / plan.batch_tokens:.4f}", flush=True)
    return {name: p.detach().clone() for name, p in state.model.named_parameters()}


def measure(name: str, base: dict[str, str], variants: list[Variation], setting: Setting) -> list[dict[str, Any]]:
    """A row for each variant and group of matrices, printed as they come."""
    rows: list[dict[str, Any]] = []
    truth: list[tuple[float, Gradients]] = []
    for label, words in variants:
        gc.collect()
        variant = Variant(words, base, name, setting)
        found = variant.gradients()
        if not truth:
            truth = list(found)
            found = iter(truth)
        more: list[float] = []
        sums = compare([g for _, g in truth], _errors(truth, found, more), variant.groups)
        fresh = [{"variant": label, "group": group, **sum_.row(), **_loss(more)} for group, sum_ in sums.items()]
        print("\n".join(map(line, fresh)), flush=True)
        rows += fresh
    return rows


def _errors(
    truth: list[tuple[float, Gradients]], found: Iterator[tuple[float, Gradients]], more: list[float]
) -> Iterator[Gradients]:
    """Of each micro-batch; how much more loss it had is appended to `more` on the way."""
    for (loss, gradients), (other, own) in zip(truth, found, strict=True):
        more.append(other - loss)
        yield {name: own[name] - g for name, g in gradients.items()}


def _loss(more: list[float]) -> dict[str, float]:
    return {"loss": statistics.mean(more), "loss_error": statistics.stdev(more) / math.sqrt(len(more))}


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['variant']:18s} loss {row['loss']:+.5f} +- {row['loss_error']:.5f}  {row['group']:18s} "
        f"batch {row['batch']:.4f}  common {row['common']:.4f}  bias {row['bias']:+.5f}  noise {row['noise']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of training and of every variant")
    parser.add_argument("--data", help="folder of shards; default: the recipe's own")
    parser.add_argument("--steps", type=int, default=100, help="of training before gradients are taken")
    parser.add_argument("--run", type=Path, help="run directory whose newest checkpoint is after --steps steps")
    parser.add_argument("--batches", type=int, default=8, help="micro-batches, at least 2")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument(
        "--variant", action="append", dest="variants", type=parse_variant, metavar="NAME: KEY=VALUE ..."
    )
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_intermixed_args()
    if args.batches < 2:
        parser.error(f"--batches {args.batches}: what micro-batches have in common takes two at least")
    rows = run(args)
    write_rows(
        [{"benchmark": "fp8_error", "recipe": args.recipe, "steps": args.steps, **row} for row in rows], args.out
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that the arguments ask for."""
    words = parse_overrides(args.overrides)
    request = request_of(args.recipe, words, args.seed, args.data)
    device = pick_device(request.execution.device)
    world, data = World(0, 1, device), find_data(request)
    request = replace(request, execution=resolve(request.execution, request.recipe, world))
    set_threads(request.execution, world)
    weights = trained(request, data, device, args.steps) if args.run is None else saved(RunDir(args.run), args.steps)
    base = {key: value for key, value in words.items() if not key.startswith("exec.")}
    setting = Setting(request, data, device, args.steps, args.batches, weights)
    return measure(args.recipe, base, args.variants or VARIANTS, setting)


def saved(run_dir: RunDir, steps: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint's model. Raises ValueError if it is of another step."""
    found = checkpoint.load_latest(run_dir.checkpoints_path)
    if found is None or found["step"] != steps:
        which = "none" if found is None else f"that after {found['step']} steps"
        raise ValueError(f"{run_dir.path} has no checkpoint after --steps {steps}: the newest is {which}")
    return dict(found["model"])


if __name__ == "__main__":
    main()
