"""Turns every "auto" of an `Execution` into the choice for this machine, once, at the start of a run."""

import math
import time

import torch

from nanosprint.config.edit import apply_overrides
from nanosprint.config.recipe import Execution, Recipe
from nanosprint.errors import UserError
from nanosprint.ops.attention import choose, require
from nanosprint.optim.build import DTYPES
from nanosprint.optim.sharding import from_first
from nanosprint.training.distributed import World

_SHORT_ROW = 256  # tokens up to which a CPU is fastest with all scores at once
_BITS = {"bf16": 16, "fp32": 32, "fp64": 64}
_TOKENS_PER_MICROBATCH = {"cuda": 65_536, "mps": 16_384, "cpu": 16_384}


def resolve(execution: Execution, recipe: Recipe, world: World) -> Execution:
    """The same execution with nothing left to choose. Raises UserError for what cannot work here."""
    device = world.device
    compute: str = from_first(_compute(execution, recipe, device))  # measured, so processes might differ
    lanes = _lanes(execution, recipe, world)
    choices = {
        "device": device.type,
        "gpus": world.size,
        "compute": compute,
        "attention": _attention(execution, recipe, world, DTYPES[compute]),
        "compile": _compile(execution, recipe, device),
        "activation_budget": _activation_budget(execution),
        "lanes_per_microbatch": lanes,
        "parts_per_microbatch": _parts(execution, recipe, lanes),
        "threads": torch.get_num_threads(),
    }
    resolved: Execution = apply_overrides(execution, choices)
    return resolved


def _compute(execution: Execution, recipe: Recipe, device: torch.device) -> str:
    wanted = recipe.precision.compute
    if execution.compute != "auto":
        if _BITS[execution.compute] < _BITS[wanted]:
            raise UserError(f"exec.compute={execution.compute} is below the recipe's precision.compute={wanted}")
        return execution.compute
    if wanted != "bf16":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and _bf16_is_faster_on_cpu() else "fp32"


def _bf16_is_faster_on_cpu(size: int = 512, repeats: int = 5) -> bool:
    """Whether a matrix product in bf16 takes at most 0.8 of the time of one in fp32: it has rounding to make up for."""

    def best_time(dtype: torch.dtype) -> float:
        a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        return min(times)

    return best_time(torch.bfloat16) < 0.8 * best_time(torch.float32)


def _attention(execution: Execution, recipe: Recipe, world: World, dtype: torch.dtype) -> str:
    """The back end asked for, if it can serve here, or the fastest that the main process finds."""
    device = world.device
    model, plan = recipe.model, recipe.plan(recipe.train.num_steps // 2)
    documents, windows = model.document_start is not None, plan.windows is not None
    if execution.attention != "auto":
        needs = {"needs_documents": documents, "needs_window": windows}
        require(execution.attention, device, dtype, head_dim=model.head_dim, **needs)
        return execution.attention
    if device.type == "cpu" and not documents and max(model.seq_len, recipe.eval.seq_len) <= _SHORT_ROW:
        return "batched"
    chosen: str | None = None
    if world.is_main:
        chosen = choose(
            device,
            dtype,
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            seq_len=plan.seq_len,
            needs_documents=documents,
            needs_window=windows,
            window=None if plan.windows is None else plan.windows.long,
            max_seq_len=plan.max_document,
        )
    return str(from_first(chosen))


def _compile(execution: Execution, recipe: Recipe, device: torch.device) -> str:
    if execution.compile != "auto":
        return execution.compile
    if recipe.model.ngrams is not None:
        return "off"  # sparse gradients do not pass through the compiler
    # On a CPU compilation takes longer than the runs one would do there, and needs a C++ compiler.
    return "default" if device.type == "cuda" else "off"


def _activation_budget(execution: Execution) -> float:
    budget = 1.0 if execution.activation_budget == "auto" else execution.activation_budget
    if not 0 <= budget <= 1:
        raise UserError(f"exec.activation_budget={budget:g} must lie between 0 (keep next to nothing) and 1 (keep all)")
    if budget < 1 and execution.compile == "off":
        raise UserError(f"exec.activation_budget={budget:g} needs the compiler: leave exec.compile=off out")
    return budget


def _lanes(execution: Execution, recipe: Recipe, world: World) -> int:
    lanes = recipe.train.lanes
    if lanes % world.size:
        fits = [n for n in range(1, lanes + 1) if lanes % n == 0]
        raise UserError(f"{world.size} processes cannot share train.lanes={lanes} equally: use one of {fits}")
    mine = lanes // world.size
    choices = [k for k in range(1, mine + 1) if mine % k == 0]
    if execution.lanes_per_microbatch == "auto":
        lane_tokens = recipe.max_batch_tokens // lanes
        limit = _TOKENS_PER_MICROBATCH[world.device.type]
        return max([k for k in choices if k * lane_tokens <= limit], default=1)
    if execution.lanes_per_microbatch not in choices:
        raise UserError(
            f"exec.lanes_per_microbatch={execution.lanes_per_microbatch} does not divide the {mine} lanes of each of "
            f"{world.size} processes: use one of {choices}"
        )
    return execution.lanes_per_microbatch


def _parts(execution: Execution, recipe: Recipe, lanes: int) -> int:
    parts = execution.parts_per_microbatch
    if parts in ("auto", 1):
        return 1
    if parts not in part_choices(recipe, lanes):
        raise UserError(
            f"exec.parts_per_microbatch={parts} does not divide the rows of a micro-batch of {lanes} lanes: "
            f"use one of {part_choices(recipe, lanes)}"
        )
    return parts


def part_choices(recipe: Recipe, lanes: int) -> list[int]:
    """Into how many parts of whole rows every micro-batch of `lanes` lanes can be split."""
    plans = (recipe.plan(step) for step in range(recipe.train.num_steps))
    shapes = {(plan.batch_tokens, plan.seq_len) for plan in plans}
    rows = math.gcd(*(tokens // recipe.train.lanes // seq_len * lanes for tokens, seq_len in shapes))
    return [k for k in range(1, rows + 1) if rows % k == 0]
