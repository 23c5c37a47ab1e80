"""Run everything once before the clock starts, then put everything back.

Compilation, library start-up and memory allocation happen here. The state afterwards is bit for bit the state before,
so that warming up and training gives what training alone gives; a test holds this.
"""

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from nanosprint.config.recipe import Recipe
from nanosprint.config.schedule import StepPlan
from nanosprint.data.loader import StepData
from nanosprint.optim.sharding import from_first
from nanosprint.training.batch import ModelStage, model_inputs, random_input
from nanosprint.training.state import TrainState
from nanosprint.training.step import LossSum, train_step

Synchronize = Callable[[], None]


def warm_up(
    state: TrainState,
    loss_sum: LossSum,
    recipe: Recipe,
    lanes: int,
    micro_batches: int,
    *,
    compiled: bool,
    bakes_limits: bool = True,
    parts: int = 1,
) -> None:
    """Train and validate on random tokens once, or once for every graph of a compiled run, then restore `state`.

    bakes_limits: whether a graph holds its windows. parts: see `model_inputs`.
    """
    saved = state.snapshot()
    rows = validation_batch_tokens(recipe, parts) // recipe.eval.seq_len
    num_steps, stage = recipe.train.num_steps, ModelStage(state.model)
    train_steps, val_steps = (range(num_steps), validation_steps(recipe)) if compiled else ([0], [num_steps])
    training = new_graphs((recipe.plan(step) for step in train_steps), bakes_limits)
    validation = new_graphs((recipe.eval_plan(step) for step in val_steps), bakes_limits)
    try:
        for plan in training:
            state.step = plan.step
            _random_step(state, loss_sum, recipe, plan, stage.enter(plan), lanes, micro_batches, parts)
        with torch.no_grad():
            for plan in validation:
                device = state.model.embed.weight.device
                loss_sum(*random_input(recipe, plan, rows, device, stage.enter(plan)))
    finally:
        state.put_back(saved)


def new_graphs(plans: Iterable[StepPlan], bakes_limits: bool) -> list[StepPlan]:
    """Those of `plans` that bring a new shape or constant, so that a compiled model needs another graph.

    Windows and the longest document are constants where the attention back end bakes its limits, and data elsewhere.
    """
    seen: set[tuple[object, ...]] = set()
    first = []
    for plan in plans:
        loss = None if plan.loss is None else (len(plan.loss.tokens), plan.loss.prefix > 0)
        limits = (plan.windows, plan.max_document) if bakes_limits else None
        key = (plan.batch_tokens, plan.seq_len, limits, plan.yarn, loss)
        if key not in seen:
            seen.add(key)
            first.append(plan)
    return first


def validation_batch_tokens(recipe: Recipe, parts: int) -> int:
    """Tokens of a call in validation: less where micro-batches have to be split, but one row at least."""
    return max(recipe.eval.seq_len, recipe.eval.batch_tokens // parts)


def validation_steps(recipe: Recipe) -> list[int]:
    """How many steps are done each time the run validates."""
    every, num_steps = recipe.eval.every, recipe.train.num_steps
    between = range(every, num_steps, every) if every else ()
    return [*([0] if recipe.eval.at_start else []), *between, num_steps]


def measure_step_ms(
    state: TrainState,
    loss_sum: LossSum,
    recipe: Recipe,
    plan: StepPlan,
    data: Iterable[StepData],
    synchronize: Synchronize,
    *,
    parts: int = 1,
    seconds: float = 2.0,
) -> float:
    """Median milliseconds of a step like `plan`, over as many steps of `data` as fit into `seconds`, but 5 at least.

    Real tokens, because what a look-up costs depends on them. `state` is restored afterwards. Every process must call
    it; their answers differ by the noise of their clocks.
    """
    saved, attn_scale = state.snapshot(), ModelStage(state.model).enter(plan)
    times: list[float] = []
    for step in data:
        synchronize()
        start = time.perf_counter()
        inputs = model_inputs(step.micro_batches, plan, attn_scale, parts)
        train_step(loss_sum, state, inputs, plan, recipe.train)
        synchronize()
        times.append(time.perf_counter() - start)
        if from_first(len(times) >= 5 and sum(times) >= seconds):
            break
    state.put_back(saved)
    return 1000 * statistics.median(times)


def _random_step(
    state: TrainState,
    loss_sum: LossSum,
    recipe: Recipe,
    plan: StepPlan,
    attn_scale: float | None,
    lanes: int,
    micro_batches: int,
    parts: int,
) -> None:
    rows = plan.batch_tokens // recipe.train.lanes // plan.seq_len * lanes
    device = state.model.embed.weight.device
    batches = (random_input(recipe, plan, rows, device, attn_scale, parts) for _ in range(micro_batches * parts))
    train_step(loss_sum, state, batches, plan, recipe.train)
