"""Run everything once before the clock starts, then put everything back.

Compilation, library start-up and memory allocation happen here. The state afterwards is bit for bit the state before,
so that warming up and training gives what training alone gives; a test holds this.
"""

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from nanosprint.config.recipe import Recipe
from nanosprint.data.loader import StepData
from nanosprint.training import distributed
from nanosprint.training.batch import model_inputs, random_input
from nanosprint.training.state import TrainState
from nanosprint.training.step import LossSum, train_step

Synchronize = Callable[[], None]


def warm_up(
    state: TrainState, loss_sum: LossSum, recipe: Recipe, lanes: int, micro_batches: int, *, compiled: bool
) -> None:
    """Train and validate on random tokens once, or once for every graph of a compiled run, then restore `state`."""
    saved = state.snapshot()
    rows = recipe.eval.batch_tokens // recipe.eval.seq_len
    last = recipe.train.num_steps - 1
    try:
        for step in new_graphs(recipe, range(last + 1) if compiled else [0]):
            state.step = step
            _random_step(state, loss_sum, recipe, lanes, micro_batches)
        with torch.no_grad():
            for step in new_graphs(recipe, validation_steps(recipe) if compiled else [last]):
                loss_sum(*random_input(recipe, rows, recipe.eval.seq_len, state.model.embed.weight.device, step))
    finally:
        state.put_back(saved)


def new_graphs(recipe: Recipe, steps: Iterable[int]) -> list[int]:
    """Those of `steps` at which shapes or windows are new, so that a compiled model needs another graph."""
    seen: set[tuple[object, ...]] = set()
    first = []
    for step in steps:
        plan = recipe.plan(step)
        key = (plan.batch_tokens, plan.seq_len, plan.windows)
        if key not in seen:
            seen.add(key)
            first.append(step)
    return first


def validation_steps(recipe: Recipe) -> list[int]:
    """The steps whose windows validation uses; after the last step, those of that step."""
    every, last = recipe.eval.every, recipe.train.num_steps - 1
    between = range(every, last, every) if every else ()
    return [*([0] if recipe.eval.at_start else []), *between, last]


def measure_step_ms(
    state: TrainState,
    loss_sum: LossSum,
    recipe: Recipe,
    data: Iterable[StepData],
    synchronize: Synchronize,
    *,
    seconds: float = 2.0,
) -> float:
    """Median milliseconds of a step, over as many steps of `data` as fit into `seconds`, but 5 at least.

    Real tokens, because what a look-up costs depends on them; windows and rates are those of the middle of the run.
    `state` is restored afterwards. Every process must call it; their answers differ by the noise of their clocks.
    """
    saved, plan = state.snapshot(), recipe.plan(recipe.train.num_steps // 2)
    times: list[float] = []
    for step in data:
        synchronize()
        start = time.perf_counter()
        inputs = model_inputs(step.micro_batches, plan.windows)
        train_step(loss_sum, state.engine, inputs, plan, recipe.train)
        synchronize()
        times.append(time.perf_counter() - start)
        if distributed.from_main(len(times) >= 5 and sum(times) >= seconds):
            break
    state.put_back(saved)
    return 1000 * statistics.median(times)


def _random_step(state: TrainState, loss_sum: LossSum, recipe: Recipe, lanes: int, micro_batches: int) -> None:
    plan = recipe.plan(state.step)
    rows = plan.batch_tokens // recipe.train.lanes // plan.seq_len * lanes
    device = state.model.embed.weight.device
    batches = (random_input(recipe, rows, plan.seq_len, device, state.step) for _ in range(micro_batches))
    train_step(loss_sum, state.engine, batches, plan, recipe.train)
