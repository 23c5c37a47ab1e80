"""Puts a run together: device, data, model, optimizers, and the compiled loss."""

import gc
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.data.datasets import ensure_dataset
from nanosprint.data.loader import TokenLoader
from nanosprint.data.shards import checksum, find_shards, open_shard
from nanosprint.data.tokenizers import Tokenizer, load_tokenizer
from nanosprint.errors import UserError
from nanosprint.model.gpt import GPT
from nanosprint.model.head import Linear
from nanosprint.model.linear import linear
from nanosprint.ops.fp8 import fp8_linear_for
from nanosprint.optim.build import DTYPES
from nanosprint.training import distributed
from nanosprint.training.distributed import World
from nanosprint.training.request import Budget, RunRequest
from nanosprint.training.resolve import resolve
from nanosprint.training.state import TrainState, build_engine
from nanosprint.training.step import LossSum
from nanosprint.training.warmup import measure_step_ms, warm_up

_log = logging.getLogger(__name__)
_CALIBRATION_STEPS = 100  # at most, to find out how long a step takes


@dataclass(frozen=True)
class Data:
    """The shards of both splits and the folder they came from."""

    folder: Path
    train: list[Path]
    val: list[Path]
    tokenizer: Tokenizer

    def describe(self) -> list[dict]:
        """Name, number of tokens and checksum of every shard, for the record."""
        return [{"name": p.name, "tokens": len(open_shard(p)), "sha256": checksum(p)} for p in self.train + self.val]


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train: nothing left to compile, choose or find."""

    request: RunRequest  # its execution resolved, its recipe fitted to the budget
    world: World
    data: Data
    state: TrainState
    loss_sum: LossSum

    @property
    def recipe(self) -> Recipe:
        return self.request.recipe

    def synchronize(self) -> None:
        """Wait until this process's device has done its work."""
        _synchronize(self.world.device)


def find_data(request: RunRequest) -> Data:
    """The shards of the request. Raises ValueError when there are none, saying how to get them."""
    recipe = request.recipe
    folder = ensure_dataset(recipe.data.name, None if request.data is None else Path(request.data))
    tokenizer = load_tokenizer(folder, recipe.data.tokenizer)
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise UserError(
            f"the data in {folder} has {tokenizer.vocab_size} token ids, more than "
            f"model.vocab_size={recipe.model.vocab_size}: set model.vocab_size={tokenizer.vocab_size}"
        )
    return Data(folder, find_shards(folder, "train"), find_shards(folder, "val"), tokenizer)


def prepare(request: RunRequest, world: World, data: Data) -> Prepared:
    """Build, compile and warm up. The time this takes is start-up, not training."""
    set_threads(request.execution, world)
    execution = resolve(request.execution, request.recipe, world)
    choose_lanes = request.execution.lanes_per_microbatch == "auto"
    request = replace(request, execution=execution)
    state = build_state(request.recipe, execution, request.seed, world.device)
    loss_sum = compiled(state.model, execution)
    request = _warm_up_within_memory(request, state, loss_sum, world, choose_lanes)
    if request.budget is not None:
        request = fit_to_budget(request, state, loss_sum, world, data)
    gc.collect()
    return Prepared(request, world, data, state, loss_sum)


def set_threads(execution: Execution, world: World) -> None:
    """CPU threads of this process: as many as asked for, else an equal share of the machine's cores."""
    if execution.threads:
        torch.set_num_threads(execution.threads)
    elif world.local_size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))


def build_state(recipe: Recipe, execution: Execution, seed: int, device: torch.device) -> TrainState:
    """Model with initial weights and its optimizers, before the first step."""
    torch.manual_seed(seed)
    wide = torch.float64 if recipe.precision.compute == "fp64" else torch.float32
    compute = DTYPES[execution.compute]
    # On a CPU the stream is cheapest in fp32: norms in bf16 are ten times slower there than in fp32.
    stream = wide if device.type == "cpu" else compute
    model = GPT(
        recipe.model,
        attention=execution.attention,
        compute_dtype=compute,
        stream_dtype=stream,
        head_linear=_head_linear(recipe, execution, device),
    )
    model.init_weights(seed)
    model.extend(max(recipe.eval.seq_len, recipe.model.seq_len))
    model.to(device=device, dtype=wide)
    return TrainState(model, build_engine(model, recipe))


def _head_linear(recipe: Recipe, execution: Execution, device: torch.device) -> Linear:
    """The head's product in training: in FP8 where recipe, execution and device have it."""
    spec = recipe.precision.fp8_head
    if spec is None or execution.fp8 == "off":
        return linear
    gradient = spec.gradient / recipe.train.batch_tokens  # the loss that is differentiated is a mean
    return partial(fp8_linear_for(device), x_s=spec.x, w_s=spec.weight, g_s=gradient)


def compiled(model: GPT, execution: Execution) -> LossSum:
    """`model.loss_sum`, compiled as the execution says. One graph for each shape of its arguments."""
    if execution.compile == "off":
        return model.loss_sum
    torch._dynamo.config.recompile_limit = 64
    mode = None if execution.compile == "default" else execution.compile
    return torch.compile(model.loss_sum, dynamic=False, fullgraph=True, mode=mode)


def fit_to_budget(request: RunRequest, state: TrainState, loss_sum: LossSum, world: World, data: Data) -> RunRequest:
    """The request with its recipe stretched or shrunk to its budget. The same answer on every process."""
    budget, recipe = request.budget, request.recipe
    assert budget is not None
    if budget.unit == "tokens":
        steps = int(budget.amount / recipe.train.batch_tokens)
    else:
        endless = replace(recipe, data=replace(recipe.data, epochs=float("inf")))
        most = min(_CALIBRATION_STEPS, recipe.train.num_steps)
        with open_loader(replace(request, recipe=endless), data, world, num_steps=most) as loader:
            ms = measure_step_ms(state, loss_sum, recipe, loader, lambda: _synchronize(world.device))
        steps = int(budget.amount * 1000 / distributed.from_main(ms))
    if steps < 1:
        raise UserError(
            f"--budget {_show(budget)} is less than one step of {recipe.train.batch_tokens} tokens: "
            "raise it or lower train.batch_tokens"
        )
    return replace(request, recipe=recipe.with_num_steps(steps).validate(), budget=None)


def open_loader(
    request: RunRequest, data: Data, world: World, *, num_steps: int, state: dict[str, Any] | None = None
) -> TokenLoader:
    """The loader of this process's part of steps up to `num_steps`, from the reader's `state` or the start."""
    recipe, lanes = request.recipe, request.execution.lanes_per_microbatch
    assert isinstance(lanes, int)
    return TokenLoader(
        data.train,
        recipe.plan,
        num_steps=num_steps,
        lanes=recipe.train.lanes,
        lanes_per_microbatch=lanes,
        rank=world.rank,
        world_size=world.size,
        order=recipe.data.order,
        seed=request.seed,
        epochs=recipe.data.epochs,
        history=recipe.model.history,
        document_start=recipe.model.document_start,
        mean_document=recipe.data.mean_document,
        vocab_size=recipe.model.vocab_size,
        device=world.device,
        state=state,
    )


def _warm_up_within_memory(
    request: RunRequest, state: TrainState, loss_sum: LossSum, world: World, choose_lanes: bool
) -> RunRequest:
    """Warm up; where lanes per micro-batch are ours to choose, halve them until a step fits into memory."""
    while True:
        execution = request.execution
        lanes = execution.lanes_per_microbatch
        assert isinstance(lanes, int)
        try:
            micro_batches, compiles = _micro_batches(request.recipe, execution), execution.compile != "off"
            warm_up(state, loss_sum, request.recipe, lanes, micro_batches, compiled=compiles)
            return request
        except torch.OutOfMemoryError as error:
            smaller = [k for k in range(1, lanes) if lanes % k == 0]
            if not choose_lanes or not smaller or world.size > 1:
                raise out_of_memory(request, error) from error
            _log.warning("%d lanes a micro-batch do not fit into memory: trying %d", lanes, smaller[-1])
            request = replace(request, execution=replace(execution, lanes_per_microbatch=smaller[-1]))
            gc.collect()
            torch.cuda.empty_cache()


def out_of_memory(request: RunRequest, error: BaseException) -> UserError:
    """The error that says which settings to lower."""
    lanes = request.execution.lanes_per_microbatch
    return UserError(
        f"out of GPU memory: lower exec.lanes_per_microbatch (now {lanes}) or eval.batch_tokens "
        f"(now {request.recipe.eval.batch_tokens}); with one lane a micro-batch, raise train.lanes or lower "
        f"train.batch_tokens. ({str(error).splitlines()[0]})"
    )


def _micro_batches(recipe: Recipe, execution: Execution) -> int:
    assert isinstance(execution.lanes_per_microbatch, int)
    return recipe.train.lanes // (execution.gpus * execution.lanes_per_microbatch)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _show(budget: Budget) -> str:
    return f"{budget.amount:g} {budget.unit}"
