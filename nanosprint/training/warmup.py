"""Run everything once before the clock starts, then put everything back.

Compilation, library start-up and memory allocation happen here. What a training run meets on its way and this one must
have met before: every graph; steps at which a group of parameters moves and steps at which it waits; an embedding tied
to the head, the step at which they part, and their first updates apart. The state afterwards is bit for bit the state
before, so that warming up and training gives what training alone gives; a test holds this.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.config.schedule import StepPlan
from nanosprint.data.loader import StepData
from nanosprint.ops.attention import BACKENDS
from nanosprint.optim.sharding import from_first
from nanosprint.training.batch import ModelStage, model_inputs, random_input
from nanosprint.training.microbatch import micro_batches_of, resolved, rows_of
from nanosprint.training.state import TrainState
from nanosprint.training.step import Backward, LossSum, backward_of, train_step

Synchronize = Callable[[], None]
_FEW_TOKENS = 4096  # divisible by 16 as larger numbers are, which kernels are compiled for


def warm_up(
    state: TrainState, loss_sum: LossSum, recipe: Recipe, execution: Execution, backward: Backward | None = None
) -> None:
    """Train and validate on random tokens, then restore `state`: every kind of step, with each of its graphs.

    Steps come in their order, so that what one leaves for the next, such as a tie that has ended, is as in training.
    backward: what trains; None is the plain one of `loss_sum`.
    """
    backward = backward_of(loss_sum) if backward is None else backward
    saved, stage = state.snapshot(), ModelStage(state.model)
    device, parts = state.model.embed.weight.device, resolved(execution.parts_per_microbatch)
    rows = validation_batch_tokens(recipe, parts) // recipe.eval.seq_len
    try:
        for plan in training_visits(recipe, execution):
            state.step = plan.step
            _random_step(state, backward, recipe, execution, plan, stage.enter(plan))
        with torch.no_grad():
            for plan in validation_visits(recipe, execution):
                loss_sum(*random_input(recipe, plan, rows, device, stage.enter(plan)))
    finally:
        state.put_back(saved)


def warm_up_eagerly(state: TrainState, recipe: Recipe) -> None:
    """Train a step of few tokens with nothing compiled, then restore `state`.

    It launches the kernels that are not the compiler's, which are compiled at their first launch for formats and
    widths, but for any number of tokens. For the time in which others compile graphs.
    """
    saved = state.snapshot()
    plan = recipe.plan(0)
    plan = replace(plan, seq_len=min(plan.seq_len, _FEW_TOKENS))
    plan = replace(plan, batch_tokens=plan.seq_len)
    device = state.model.embed.weight.device
    try:
        inputs = random_input(recipe, plan, 1, device, ModelStage(state.model).enter(plan))
        train_step(backward_of(state.model.loss_sum), state, [inputs], plan, recipe.train)
    finally:
        state.put_back(saved)


def training_visits(recipe: Recipe, execution: Execution) -> list[StepPlan]:
    """The first step of every kind.

    Kinds differ in their graph, the groups that move or look ahead, embedding and head tied or apart, and the average's
    beginning, moves and blend.
    """
    turn = turn_of(recipe)

    def kind(plan: StepPlan) -> Hashable:
        # They part at the first update after the plan has said so, which is at most a turn later.
        apart = plan.step >= turn and recipe.plan(plan.step - turn).split
        ahead = [(role, bool(here), bool(following)) for role, (here, following, _) in plan.ahead]
        return graph_of(plan, execution), plan.step % turn, plan.split, apart, plan.average, tuple(ahead)

    return first_of_each((recipe.plan(step) for step in range(recipe.train.num_steps)), kind)


class Graph(NamedTuple):
    """What one graph is compiled from: a plan, the rows of a micro-batch, its parts; and whether with gradients."""

    plan: StepPlan
    rows: int
    parts: int
    trained: bool


def graphs_of(recipe: Recipe, execution: Execution) -> list[Graph]:
    """All compiled graphs of a run, in their order. What is recorded is made of the same ones, windows or not."""
    execution = replace(execution, cuda_graphs="off")
    parts = resolved(execution.parts_per_microbatch)
    rows = validation_batch_tokens(recipe, parts) // recipe.eval.seq_len
    trained = first_of_each(training_visits(recipe, execution), lambda plan: graph_of(plan, execution))
    return [
        *(Graph(plan, rows_of(plan.batch_tokens, recipe, execution), parts, True) for plan in trained),
        *(Graph(plan, rows, 1, False) for plan in validation_visits(recipe, execution)),
    ]


def turn_of(recipe: Recipe) -> int:
    """Steps in which every group of parameters moves at least once, and always the same ones in the same order."""
    return math.lcm(*(group.every for group in recipe.groups))


def validation_visits(recipe: Recipe, execution: Execution) -> list[StepPlan]:
    """The first validation with each graph."""
    plans = (recipe.eval_plan(step) for step in recipe.validation_steps)
    return first_of_each(plans, lambda plan: graph_of(plan, execution))


def first_of_each(plans: Iterable[StepPlan], kind: Callable[[StepPlan], Hashable]) -> list[StepPlan]:
    """Those of `plans` that are the first of their kind."""
    firsts: dict[Hashable, StepPlan] = {}
    for plan in plans:
        firsts.setdefault(kind(plan), plan)
    return list(firsts.values())


def graph_of(plan: StepPlan, execution: Execution) -> Hashable:
    """What of a plan its compiled graph depends on, and its recorded one; where there is neither, its shapes.

    Windows, the longest document, the scale of scores and how often the head's gradient counts are constants of a graph
    where the attention back end bakes its limits, and of every recorded one; elsewhere they are data.
    """
    loss = None if plan.loss is None else (len(plan.loss.tokens), plan.loss.prefix > 0, plan.loss.sampled)
    compiled_in = execution.compile != "off" and BACKENDS[execution.attention].bakes_limits
    bakes = compiled_in or execution.cuda_graphs == "on"
    baked = (plan.windows, plan.max_document, plan.yarn, plan.head_counts)
    return plan.batch_tokens, plan.seq_len, loss, baked if bakes else None


def validation_batch_tokens(recipe: Recipe, parts: int) -> int:
    """Tokens of a call in validation: less where micro-batches have to be split, but one row at least."""
    return max(recipe.eval.seq_len, recipe.eval.batch_tokens // parts)


def measure_step_ms(
    state: TrainState,
    backward: Backward,
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
        train_step(backward, state, inputs, plan, recipe.train)
        synchronize()
        times.append(time.perf_counter() - start)
        if from_first(len(times) >= 5 and sum(times) >= seconds):
            break
    state.put_back(saved)
    return 1000 * statistics.median(times)


def _random_step(
    state: TrainState,
    backward: Backward,
    recipe: Recipe,
    execution: Execution,
    plan: StepPlan,
    attn_scale: float | None,
) -> None:
    """A step of random tokens, of two micro-batches at most: the last is another case than those before, no more."""
    parts, device = resolved(execution.parts_per_microbatch), state.model.embed.weight.device
    rows = rows_of(plan.batch_tokens, recipe, execution)
    count = min(2, micro_batches_of(plan.batch_tokens, recipe.train.lanes, execution) * parts)
    batches = (random_input(recipe, plan, rows, device, attn_scale, parts) for _ in range(count))
    train_step(backward, state, batches, plan, recipe.train)
