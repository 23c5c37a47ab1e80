"""Which back end computes attention: the one asked for, if it can serve, or for "auto" the fastest at the run's shapes.

One back end serves all layers and steps. Then one graph serves all windows, which are data; one for each window would
split it by stages. What is timed is a micro-batch of the stage with the most tokens, at the narrowest and at the widest
windows of the run, each kind of call as often as layers make it. Validation and what lies between are not timed.
"""

from collections import Counter
from pathlib import Path

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.config.schedule import Windows
from nanosprint.data.documents import slots
from nanosprint.ops.attention import Call, choose, needs_of, require
from nanosprint.optim.build import DTYPES
from nanosprint.optim.sharding import from_first
from nanosprint.training.batch import document_bounds
from nanosprint.training.distributed import World
from nanosprint.training.microbatch import resolved, rows_of

ATTENTION_LOGGER = "nanosprint.ops.attention_backends"  # which says what was chosen and why
_SHORT_ROW = 256  # positions up to which a CPU is fastest with all scores at once


def choose_attention(execution: Execution, recipe: Recipe, world: World) -> str:
    """The name for a run whose execution is resolved but for this. Raises ValueError for what cannot serve."""
    device, dtype = world.device, DTYPES[execution.compute]
    calls = attention_calls(recipe, execution)
    if not calls:  # no layer attends, so any will do
        return "sdpa" if execution.attention == "auto" else execution.attention
    needs = needs_of(calls, device, dtype)
    if execution.attention != "auto":
        require(execution.attention, needs)
        return execution.attention
    if device.type == "cpu" and not needs.documents and _longest_row(recipe, calls) <= _SHORT_ROW:
        return "batched"
    # One process measures and all take its answer: theirs would differ.
    chosen = choose(device, dtype, calls, cache=outcomes()) if world.is_main else None
    return str(from_first(chosen))


def outcomes() -> Path:
    """Where measurements are kept from run to run: beside unpacked shards, since nothing of them is compiled."""
    return Path.home() / ".cache" / "nanosprint" / "attention"


def attention_calls(recipe: Recipe, execution: Execution) -> tuple[Call, ...]:
    """What the layers ask of attention in a part of the largest micro-batch; execution: its micro-batches settled."""
    model, data = recipe.model, recipe.data
    plans = [recipe.plan(step) for step in _steps(recipe)]
    rows = {tokens: rows_of(tokens, recipe, execution) for tokens in recipe.batches().values()}
    plan = max(plans, key=lambda plan: rows[plan.batch_tokens] * plan.seq_len)
    part = rows[plan.batch_tokens] // resolved(execution.parts_per_microbatch)
    shortest, longest = document_bounds(recipe, plan)
    documents = {
        "longest": longest,
        "shortest": shortest,
        "slots": slots(part, plan.seq_len, data.mean_document, data.spare_documents),
    }
    return tuple(
        Call(
            rows=part,
            seq_len=plan.seq_len,
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            window=window,
            places=places,
            count=count,
            **(documents if model.document_start is not None else {}),
        )
        for (window, places), count in _kinds(recipe, _extremes([plan.windows for plan in plans])).items()
    )


def _steps(recipe: Recipe) -> list[int]:
    """The first and the last, and every stage's first: between them windows grow steadily or not at all."""
    num_steps, stages = recipe.train.num_steps, recipe.schedule.stages
    starts = [] if stages is None else [span.start for span in stages.spans(num_steps) if span.start < span.end]
    return sorted({0, *starts, num_steps - 1})


def _kinds(recipe: Recipe, windows: list[Windows | None]) -> Counter[tuple[int | None, int]]:
    """How often layers attend with (window, places of a token), once for each of `windows`."""
    mixers = [mixer for _, mixer in recipe.model.attention]
    return Counter(
        (None if mixer.window == "full" or own is None else getattr(own, mixer.window), 2 if mixer.paired else 1)
        for own in windows
        for mixer in mixers
    )


def _extremes(windows: list[Windows | None]) -> list[Windows | None]:
    """The narrowest and the widest, or the only ones."""
    known = sorted({(own.long, own.short) for own in windows if own is not None})
    ends = dict.fromkeys((known[0], known[-1])) if known else ()
    return [Windows(short=short, long=long) for long, short in ends] or [None]


def _longest_row(recipe: Recipe, calls: tuple[Call, ...]) -> int:
    """Positions of the longest row of training and validation."""
    return max(recipe.model.seq_len, recipe.eval.seq_len) * max(call.places for call in calls)
