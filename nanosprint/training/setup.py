"""Puts a run together: device, data, model, optimizers, and the compiled loss."""

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.config.schedule import StepPlan
from nanosprint.data.datasets import ensure_dataset
from nanosprint.data.loader import TokenLoader
from nanosprint.data.shards import checksum, find_shards, open_shard
from nanosprint.data.tokenizers import Tokenizer, load_tokenizer
from nanosprint.errors import OutOfMemory, UserError
from nanosprint.model.context import NO_CONTEXT
from nanosprint.model.gpt import GPT
from nanosprint.model.head import HeadLoss
from nanosprint.ops import linear_relu2
from nanosprint.ops.fp8 import has_fp8
from nanosprint.ops.head_loss import Fp8Scales, head_loss
from nanosprint.ops.softcap_xent import uses_kernel
from nanosprint.optim.build import DTYPES
from nanosprint.optim.sharding import from_all, from_first, place
from nanosprint.training.distributed import World
from nanosprint.training.microbatch import lanes_of, resolved, smaller
from nanosprint.training.phases import Phases
from nanosprint.training.precompile import compile_ahead
from nanosprint.training.replay import Replayed
from nanosprint.training.request import Budget, RunRequest
from nanosprint.training.resolve import resolve
from nanosprint.training.reuse import Graphs, Kept, moved_into
from nanosprint.training.state import TrainState, build_engine
from nanosprint.training.step import Backward, LossSum, backward_of
from nanosprint.training.stored import FirstCall, GraphStore, StoredLossSum, converter
from nanosprint.training.warmup import measure_step_ms, warm_up, warm_up_eagerly

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
    backward: Backward
    shares_graphs: bool  # whether those of an earlier run of this process serve
    phases: Phases  # of start-up

    @property
    def recipe(self) -> Recipe:
        return self.request.recipe

    @property
    def first_calls(self) -> list[FirstCall]:
        """How each compiled graph came to be, in the order of their first calls."""
        return self.loss_sum.first_calls if isinstance(self.loss_sum, StoredLossSum) else []

    @property
    def parts(self) -> int:
        """Into how many parts a micro-batch is split; see `model_inputs`."""
        return resolved(self.request.execution.parts_per_microbatch)

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


def prepare(
    request: RunRequest,
    world: World,
    data: Data,
    kept: Kept | None = None,
    phases: Phases | None = None,
    chosen: Execution | None = None,
) -> Prepared:
    """Build, compile and warm up. The time this takes is start-up, not training, and is counted in `phases`.

    kept: what an earlier run of this process left: where its graphs are those of this one, they serve again, and the
    run is bit for bit what it would be in a process of its own. For one process: with several it must be None.
    chosen: what `choose_execution` has said before.
    """
    phases = Phases() if phases is None else phases
    with phases("resolve"):
        execution = chosen or choose_execution(request, world, kept)
    wanted, request = request.execution, replace(request, execution=execution)
    shared = None if kept is None else kept.take(request)
    state, loss_sum = _built(request, world, shared, phases)
    with phases("warm-up"):
        request, loss_sum, backward = _warm_up_within_memory(request, state, loss_sum, world, wanted)
    if request.budget is not None:
        with phases("budget"):
            request = fit_to_budget(request, state, backward, world, data)
            if _records(request.execution):
                del backward  # with recordings that a run of another length, and so of other windows, has no use for
                request, loss_sum, backward = _warm_up_within_memory(request, state, loss_sum, world, wanted)
    gc.collect()
    return Prepared(request, world, data, state, loss_sum, backward, shared is not None, phases)


def choose_execution(request: RunRequest, world: World, kept: Kept | None = None) -> Execution:
    """How to carry out `request` in this process, nothing left to choose: as the run of `kept`, where that will do.

    The process gets the threads and the memory that the request allows.
    """
    set_threads(request.execution, world)
    cap_memory(request.execution, world.device)
    before = None if kept is None else kept.settled(request)
    return before or resolve(request.execution, request.recipe, world)


def _built(request: RunRequest, world: World, shared: Graphs | None, phases: Phases) -> tuple[TrainState, LossSum]:
    """The run's state and what computes its loss: the graphs of `shared`, or its own, as far as they are compiled yet.

    What needs no graph is done while other processes compile them.
    """
    recipe, execution = request.recipe, request.execution
    loading = load_compiler() if execution.compile != "off" and shared is None else None
    compilers = compile_ahead(request, world.local_rank) if shared is None else None
    # A step reduces gradients, so all processes take part in it or none does.
    meanwhile = shared is None and execution.compilers and any(from_all(compilers is not None))
    try:
        with phases("model"):
            state = build_state(recipe, execution, request.seed, world.device)
            if shared is not None:
                if isinstance(shared.loss_sum, StoredLossSum):
                    shared.loss_sum.first_calls.clear()
                return moved_into(shared.model, state, recipe), shared.loss_sum
            if loading is not None:
                loading.join()
            loss_sum = build_loss_sum(state.model, recipe, execution)
        if meanwhile:
            with phases("kernels"):
                warm_up_eagerly(state, recipe)
            with phases("ahead"):
                if compilers is not None:
                    compilers.wait()
                from_all(None)  # the others wait, too: the graphs are for all
    finally:
        if compilers is not None:
            compilers.stop()
    return state, loss_sum


def load_compiler() -> threading.Thread:
    """Import Inductor and start the processes in which it compiles, while the caller goes on. Seconds, of Python's."""
    import torch._dynamo  # noqa: F401  (here, since others import it, too, and its modules import each other in circles)

    def load() -> None:
        from torch._inductor import async_compile, compile_fx  # noqa: F401

        async_compile.maybe_warm_pool()

    thread = threading.Thread(target=load, name="load-compiler", daemon=True)
    thread.start()
    return thread


def set_threads(execution: Execution, world: World) -> None:
    """CPU threads of this process: as many as asked for, else an equal share of the machine's cores."""
    if execution.threads:
        torch.set_num_threads(execution.threads)
    elif world.local_size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))


def cap_memory(execution: Execution, device: torch.device) -> None:
    """Let this process allocate no more than `memory_gb` of its GPU. Raises UserError where there is no such memory."""
    if execution.memory_gb is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if not 0 < execution.memory_gb * 1e9 <= total:
        raise UserError(
            f"exec.memory_gb={execution.memory_gb:g}: {device} has {total / 1e9:.1f} GB of GPU memory to take it from"
        )
    torch.cuda.set_per_process_memory_fraction(execution.memory_gb * 1e9 / total, device)


def build_state(recipe: Recipe, execution: Execution, seed: int | None, device: torch.device) -> TrainState:
    """Model with initial weights and its optimizers, before the first step.

    seed: of the weights; None leaves them as they are, for who wants a model's form alone.
    """
    if seed is not None:
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
        head_loss=_head_loss(recipe, execution, device),
    )
    if seed is not None:
        model.init_weights(seed)
    model.to(device=device, dtype=wide)
    model.extend(recipe.max_seq_len)  # there: a quarter of a million positions take seconds on a CPU
    engine = build_engine(model, recipe)
    model.add_rows_in_place()
    _train_layers_in_fp8(model, recipe, execution)
    if execution.compute == "bf16" and linear_relu2.pays(device):
        model.fuse_mlps()
    return TrainState(model, engine)


def _train_layers_in_fp8(model: GPT, recipe: Recipe, execution: Execution) -> None:
    """What the recipe has in FP8 besides the head, where this device has FP8 and it is not switched off."""
    mlp, projections = recipe.precision.fp8_mlp, recipe.precision.fp8_projections
    wanted = mlp is not None or projections is not None
    if not wanted or execution.fp8 == "off" or not has_fp8(model.embed.weight.device):
        return
    if mlp is not None:
        model.train_mlps_in_fp8(mlp)
    if projections is not None:
        # Stages with fewer tokens than the largest divide a mean by less: an octave or two, of the 32 that E5M2 has.
        per_lane = recipe.train.objective == "lane_mean"
        model.train_projections_in_fp8(projections, recipe.train.lanes if per_lane else recipe.max_batch_tokens)
    model.refresh(0)


def _head_loss(recipe: Recipe, execution: Execution, device: torch.device) -> HeadLoss | None:
    """What computes the head's product and loss in training: the one operator for both where it pays, else autograd.

    It pays where the kernel of the loss runs; an FP8 head needs it everywhere.
    """
    spec = recipe.precision.fp8_head
    if spec is not None and execution.fp8 != "off" and has_fp8(device):
        return partial(head_loss, scales=Fp8Scales(spec.x, spec.weight, spec.gradient))
    return head_loss if execution.compute == "bf16" and uses_kernel(device) else None


def compiled(model: GPT, execution: Execution, backend: Callable[..., Any] | None = None) -> LossSum:
    """`model.loss_sum`, compiled as the execution says. One graph for each shape of its arguments.

    Windows and the longest document are arguments like others, unless the attention back end bakes them into graphs.
    backend: of torch.compile, in place of Inductor.
    """
    if execution.compile == "off":
        return model.loss_sum
    torch._dynamo.config.recompile_limit = 64
    # Without this a graph with an autograd.Function is in no cache, and its gradients are traced anew by each process.
    # Both directions of a function are traced into the graph, and so into its key.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # The gradients' half is compiled with the other and not at its first call: whoever runs neither compiles both.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    _keep_activations(execution)
    if execution.device == "cuda":
        from nanosprint.training.row_kernels import hold_rows_in_registers  # imports the compiler: a second

        hold_rows_in_registers()
    mode = None if execution.compile == "default" else execution.compile
    options: dict[str, Any] = {"mode": mode} if backend is None else {"backend": backend}
    graphs = torch.compile(model.loss_sum, dynamic=False, fullgraph=True, **options)
    convert = converter(execution)
    return lambda tokens, targets, context=NO_CONTEXT: graphs(tokens, targets, convert(context))


def build_loss_sum(model: GPT, recipe: Recipe, execution: Execution) -> LossSum:
    """`model.loss_sum` as the execution says: compiled, with the graphs that are stored for it."""
    loss_sum = compiled(model, execution)
    if execution.compile != "default":
        return loss_sum
    return StoredLossSum(GraphStore(model, recipe, execution), model, execution, loss_sum)


def build_backward(state: TrainState, loss_sum: LossSum, execution: Execution) -> Backward:
    """A micro-batch's forward and backward pass, replayed where the execution says so.

    A replay calls no hooks, so the state's engine is told whether to expect them (`Engine.overlap`).
    """
    backward = backward_of(loss_sum)
    state.engine.overlap = not _records(execution)
    return Replayed(backward, state.model.named_parameters()) if _records(execution) else backward


def _records(execution: Execution) -> bool:
    return execution.cuda_graphs == "on"


def _keep_activations(execution: Execution) -> None:
    """Tell the compiler how much to keep for the backward pass, of what it would keep; it is read at each compilation.

    What costs the least to compute again is left out first (torch's memory budget; Chen et al. 2016,
    arXiv:1604.06174, for the idea).
    """
    torch._functorch.config.activation_memory_budget = float(execution.activation_budget)


def fit_to_budget(request: RunRequest, state: TrainState, backward: Backward, world: World, data: Data) -> RunRequest:
    """The request with its recipe stretched or shrunk to its budget. The same answer on every process."""
    budget, recipe = request.budget, request.recipe
    assert budget is not None
    if budget.unit == "tokens":
        steps = int(budget.amount * recipe.train.num_steps / recipe.tokens)
    else:
        endless = replace(recipe, data=replace(recipe.data, epochs=float("inf")))
        most = min(_CALIBRATION_STEPS, recipe.train.num_steps)
        plan = recipe.plan(recipe.train.num_steps // 2)
        relative = recipe.tokens / recipe.train.num_steps / plan.batch_tokens  # a step on average, against this one
        unlimited = replace(request, recipe=endless)
        with open_loader(unlimited, data, world, num_steps=most, plan=lambda _: plan) as loader:
            parts = resolved(request.execution.parts_per_microbatch)
            wait = partial(_synchronize, world.device)
            ms = measure_step_ms(state, backward, recipe, plan, loader, wait, parts=parts)
        steps = int(budget.amount * 1000 / (from_first(ms) * relative))
    if steps < 1:
        raise UserError(
            f"--budget {_show(budget)} is less than one step of {recipe.train.batch_tokens} tokens: "
            "raise it or lower train.batch_tokens"
        )
    return replace(request, recipe=recipe.with_num_steps(steps).validate(), budget=None)


def open_loader(
    request: RunRequest,
    data: Data,
    world: World,
    *,
    num_steps: int,
    state: dict[str, Any] | None = None,
    plan: Callable[[int], StepPlan] | None = None,
) -> TokenLoader:
    """The loader of this process's part of steps up to `num_steps`, from the reader's `state` or the start.

    plan: the shapes of steps; None: the recipe's.
    """
    recipe = request.recipe
    return TokenLoader(
        data.train,
        plan or recipe.plan,
        num_steps=num_steps,
        lanes=recipe.train.lanes,
        lanes_per_microbatch=partial(lanes_of, lanes=recipe.train.lanes, execution=request.execution),
        rank=world.rank,
        world_size=world.size,
        order=recipe.data.order,
        seed=request.seed,
        epochs=recipe.data.epochs,
        history=recipe.model.history,
        document_start=recipe.model.document_start,
        mean_document=recipe.data.mean_document,
        spare_documents=recipe.data.spare_documents,
        vocab_size=recipe.model.vocab_size,
        device=world.device,
        state=state,
    )


def _warm_up_within_memory(
    request: RunRequest, state: TrainState, loss_sum: LossSum, world: World, wanted: Execution
) -> tuple[RunRequest, LossSum, Backward]:
    """Warm up; where the size of a micro-batch is ours to choose, shrink it until a step fits into memory.

    The loss is another one where less is kept of the activations. Where steps cannot be recorded they are not, on no
    process, unless that was asked for.
    """
    while True:
        execution = request.execution
        backward = build_backward(state, loss_sum, execution)
        try:
            failure = _warm_up(request, state, loss_sum, backward)
            if failure is None:
                return request, loss_sum, backward
            request = replace(request, execution=_unrecorded(execution, wanted, failure))
            continue  # without recordings, and so on from the same state
        except torch.OutOfMemoryError as error:
            less = smaller(request.recipe, execution, wanted)
            if less is None or world.size > 1:
                raise out_of_memory(request, error) from error
        # Here, where the error no longer holds on to the tensors of its frames.
        tokens, parts, budget = less.tokens_per_microbatch, less.parts_per_microbatch, less.activation_budget
        message = "a micro-batch does not fit into memory: trying %d tokens in %d parts, %g of the activations kept"
        _log.warning(message, tokens, parts, budget)
        if budget != execution.activation_budget:
            torch._dynamo.reset()
            loss_sum = build_loss_sum(state.model, request.recipe, less)
        request = replace(request, execution=less)
        del backward
        gc.collect()
        torch.cuda.empty_cache()


def _warm_up(request: RunRequest, state: TrainState, loss_sum: LossSum, backward: Backward) -> str | None:
    """Warm up; why a process could not record steps, if one could not. The same answer on all of them."""
    if not isinstance(backward, Replayed):
        warm_up(state, loss_sum, request.recipe, request.execution, backward)
        return None
    backward.on_trial = True
    warm_up(state, loss_sum, request.recipe, request.execution, backward)
    failure = backward.agree()
    backward.on_trial = False
    return failure


def _unrecorded(execution: Execution, wanted: Execution, failure: str) -> Execution:
    """The execution without recordings, said once. Raises UserError where they were asked for."""
    if wanted.cuda_graphs == "on":
        raise UserError(f"exec.cuda_graphs=on: steps could not be recorded ({failure}): leave it out")
    if place()[0] == 0:
        _log.warning("steps are not recorded, since that failed (%s); exec.cuda_graphs=off spares the trial", failure)
    return replace(execution, cuda_graphs="off")


def out_of_memory(request: RunRequest, error: BaseException) -> OutOfMemory:
    """The error that says which settings to lower."""
    execution, lanes = request.execution, request.execution.lanes_per_microbatch
    name, size = ("tokens", execution.tokens_per_microbatch) if lanes == "auto" else ("lanes", lanes)
    recorded = "set exec.cuda_graphs=off, whose recordings have memory of their own, " if _records(execution) else ""
    return OutOfMemory(
        f"out of GPU memory: {recorded}lower exec.{name}_per_microbatch (now {size}) "
        f"or eval.batch_tokens (now {request.recipe.eval.batch_tokens}); with one lane of several rows, raise "
        f"exec.parts_per_microbatch (now {execution.parts_per_microbatch}), with one of a single row lower "
        f"exec.activation_budget (now {execution.activation_budget}), raise train.lanes or lower train.batch_tokens. "
        f"({str(error).splitlines()[0]})"
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _show(budget: Budget) -> str:
    return f"{budget.amount:g} {budget.unit}"
