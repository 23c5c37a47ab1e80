"""What the runs of one process hand on: a model without its weights, and the graphs that were compiled for it.

Seeds of a recipe differ in their weights and nothing that was compiled. So the next run's weights move into the model
of the run before, and its graphs serve again: no tracing, no compilation, no trial of back ends. Only the last run's
are kept, so that a process which carries out many runs holds as much as one does.
"""

import gc
import sys
from dataclasses import dataclass

import torch

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.model.gpt import GPT
from nanosprint.training.request import RunRequest
from nanosprint.training.state import TrainState, build_engine
from nanosprint.training.step import LossSum

_WAYS = ("device", "gpus", "compute", "attention", "compile", "fp8", "activation_budget")  # that graphs depend on


@dataclass(frozen=True)
class Graphs:
    """Of a run that is over. `wanted` is its execution as asked for; that of `request` is resolved."""

    wanted: Execution
    request: RunRequest
    model: GPT  # its parameters are empty
    loss_sum: LossSum


class Kept:
    """The graphs of the last run of this process. For runs of a single process each."""

    def __init__(self) -> None:
        self._graphs: Graphs | None = None

    @torch.no_grad()
    def put(self, wanted: Execution, request: RunRequest, model: GPT, loss_sum: LossSum) -> None:
        """Keep those of a run that is over. Its weights and gradients are given up."""
        for parameter in model.parameters():
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self._graphs = Graphs(wanted, request, model, loss_sum)

    def settled(self, request: RunRequest) -> Execution | None:
        """How the run before was carried out, where `request` asks for the same model, steps and execution.

        What was chosen by free memory or by a measurement then is the same for all seeds.
        """
        if self._graphs is None or self._graphs.wanted != request.execution:
            return None
        before, recipe = self._graphs.request.recipe, request.recipe
        same_steps = before.batches() == recipe.batches() and before.train.lanes == recipe.train.lanes
        return self._graphs.request.execution if same_steps and _same_math(before, recipe) else None

    def take(self, request: RunRequest) -> Graphs | None:
        """The graphs, where they compute the loss of `request`, whose execution is resolved; else they are given up.

        They are kept no longer in either case: a run that fails half-way leaves none.
        """
        graphs, self._graphs = self._graphs, None
        if graphs is not None and _serve(graphs.request, request):
            return graphs
        del graphs
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # it holds on to all that it has compiled
        release_memory()
        return None


def release_memory() -> None:
    """Give back what nothing refers to any more, on the GPU to other processes."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@torch.no_grad()
def moved_into(model: GPT, state: TrainState, recipe: Recipe) -> TrainState:
    """`state`, which nothing has trained yet, with its weights and buffers in an older model of the same recipe.

    Compiled code knows the older model's tensors, so these stay the same objects. For one process: hooks of several
    would hang on them twice.
    """
    for own, new in zip(model.parameters(), state.model.parameters(), strict=True):
        own.grad = None
        own.data = new.data
    for buffer, fresh in zip(model.buffers(), state.model.buffers(), strict=True):
        buffer.copy_(fresh)
    return TrainState(model, build_engine(model, recipe))


def _serve(before: RunRequest, request: RunRequest) -> bool:
    """Whether what was compiled for one resolved request computes the loss of another."""
    same = all(getattr(before.execution, way) == getattr(request.execution, way) for way in _WAYS)
    return same and _same_math(before.recipe, request.recipe)


def _same_math(one: Recipe, other: Recipe) -> bool:
    rows = one.max_seq_len == other.max_seq_len  # rotary tables reach as far
    return rows and one.model == other.model and one.precision == other.precision
