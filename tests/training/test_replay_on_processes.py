"""Recorded micro-batches on two gloo processes, with the recorder of `test_replay` in place of CUDA graphs."""

import logging
import logging.handlers
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_step
from nanosprint.config import Execution
from nanosprint.errors import UserError
from nanosprint.recipes import load_recipe
from nanosprint.training import replay, setup
from nanosprint.training.batch import ModelStage, random_input
from nanosprint.training.distributed import World
from nanosprint.training.microbatch import rows_of
from nanosprint.training.replay import Replayed
from nanosprint.training.request import RunRequest
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_backward, build_state
from nanosprint.training.step import backward_of, train_step
from tests.optim.toy import assert_same_bits, join, spawn
from tests.recipes.test_ladder import small
from tests.test_bench_step import ON_CPU, STAGED
from tests.training.test_replay import Recorder

CPU = torch.device("cpu")
NAME = "record-third"


class Broken(Recorder):
    """Fails at its second recording; `error` is what with."""

    error: type[Exception] = RuntimeError

    def __call__(self, work):
        if self.made == 1:
            raise self.error("operation not permitted when stream is capturing\nand more")
        return super().__call__(work)


class Full(Broken):
    error = torch.OutOfMemoryError


@contextmanager
def recorder(kind):
    """In place of CUDA graphs."""
    real, replay.OnGpu = replay.OnGpu, kind
    try:
        yield
    finally:
        replay.OnGpu = real


def prepared(rank, processes, graphs):
    """Recipe, execution as it would be on GPUs, and a fresh state."""
    recipe = load_recipe(NAME, small(NAME, **{"train.num_steps": 9}))
    execution = Execution(device="cpu", compile="off", lanes_per_microbatch=recipe.train.lanes // processes // 2)
    execution = resolve(execution, recipe, World(rank, processes, CPU, rank, processes))
    return recipe, replace(execution, cuda_graphs=graphs), build_state(recipe, execution, 0, CPU)


def trained(rank, processes, kind=None):
    """Weights and losses of all steps, and the backward pass that gave them. Every process has inputs of its own."""
    recipe, execution, state = prepared(rank, processes, "off" if kind is None else "on")
    with recorder(kind):
        backward = build_backward(state, state.model.loss_sum, execution)
    assert state.engine.overlap == (kind is None)
    stage, losses = ModelStage(state.model), []
    for step in range(recipe.train.num_steps):
        plan = recipe.plan(step)
        rows, scale = plan.batch_tokens // plan.seq_len // processes // 2, stage.enter(plan)
        seeds = [4 * step + 2 * rank + i for i in range(2)]
        inputs = [random_input(recipe, plan, rows, CPU, scale, seed=seed) for seed in seeds]
        losses.append(train_step(backward, state, inputs, plan, recipe.train).item())
    return state.model, losses, backward


def steps(rank, processes):
    """The bits of steps without recordings, also where processes differ in what they replay."""
    join(rank, processes)
    expected, losses, _ = trained(rank, processes)
    for kind in (Recorder, Recorder if rank else Broken, Full):
        model, others, backward = trained(rank, processes, kind)
        assert losses == others, kind
        for (name, one), two in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(one, two), (kind, name)
        assert_same_bits(model)
        assert (backward.failure is None) == (kind is Recorder)
        assert (backward.recorded() > 1) == (kind is Recorder)
    dist.destroy_process_group()


def test_the_same_bits_recorded_or_not():
    spawn(2, steps)


def start_up(rank, processes):
    join(rank, processes)
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("nanosprint").addHandler(said)
    world = World(rank, processes, CPU, rank, processes)
    for kind, wanted in ((Recorder, "auto"), (Recorder if rank else Broken, "auto"), (Full, "auto"), (Broken, "on")):
        recipe, execution, state = prepared(rank, processes, "on")
        request = RunRequest(recipe=recipe, execution=execution)
        before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
        asked = Execution(device="cpu", cuda_graphs=wanted)
        arguments = (request, state, state.model.loss_sum, world, asked)
        with recorder(kind):
            if wanted == "on":
                with pytest.raises(
                    UserError, match=r"cuda_graphs=on: steps could not be recorded \(process 0: Runtime"
                ):
                    setup._warm_up_within_memory(*arguments)
                continue
            settled, _, backward = setup._warm_up_within_memory(*arguments)
        works = all_record(kind)
        assert settled.execution.cuda_graphs == ("on" if works else "off")
        assert isinstance(backward, Replayed) == works
        assert state.engine.overlap == (not works)
        assert all(torch.equal(p, before[n]) for n, p in state.model.named_parameters())
    messages = [record.getMessage() for record in said.buffer if record.levelno >= logging.WARNING]
    assert len(messages) == (2 if rank == 0 else 0), messages  # once for each failure
    assert all("steps are not recorded, since that failed (process 0: " in message for message in messages)
    dist.destroy_process_group()


def all_record(kind):
    """Whether no process has a recorder that fails."""
    kinds = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, kind.__name__)
    return set(kinds) == {"Recorder"}


def test_a_process_that_cannot_record_is_followed_by_all():
    spawn(2, start_up)


def measured(rank, processes, kind):
    """`bench_step` takes the same way, and says whether steps were recorded."""
    join(rank, processes)
    real = bench_step.resolve
    bench_step.resolve = lambda *given: replace(real(*given), cuda_graphs="on")
    bench_step.WARM_UP = 0
    with recorder(Recorder if rank == 0 else kind):
        bench = bench_step.Bench("record", {**STAGED, **ON_CPU}, World(rank, processes, CPU, rank, processes))
    rows = [bench.measure(place, 1, 0) for place in bench_step.places(bench.recipe, "scheduled", None)]
    assert_same_bits(bench.state.model)
    works = kind is Recorder
    assert [row["recorded"] for row in rows] == [True, works, works]
    for row in rows[1:]:
        assert (row["recording_failure"] is None) == works
        assert ("steps recorded" in bench_step.show(row, 3)) == works
        assert ("not recorded (process 1: OutOfMemoryError: operation" in bench_step.show(row, 3)) == (not works)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Recorder, Full])
def test_the_benchmark_takes_the_same_way(kind):
    spawn(2, measured, kind)


def on_gpus(rank, processes):
    """A small record with its kernels, FP8 and rows that are sent: recorded steps give the weights of others."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=processes)
    size = {"model.num_layers": 6, "model.seq_len": 3072, "train.batch_tokens": 6144, "train.lanes": 2}
    recipe = load_recipe("record-third", {**size, "eval.seq_len": 8192, "eval.batch_tokens": 8192}).with_num_steps(24)
    execution = resolve(Execution(attention="triton"), recipe, World(rank, processes, device, rank, processes))
    assert execution.cuda_graphs == "on"
    state = build_state(recipe, execution, 0, device)
    loss_sum = setup.compiled(state.model, execution)
    replayed, direct = build_backward(state, loss_sum, execution), backward_of(loss_sum)
    stage = ModelStage(state.model)

    def step(number, backward):
        plan = recipe.plan(number)
        rows, scale = rows_of(plan.batch_tokens, recipe, execution), stage.enter(plan)
        inputs = random_input(recipe, plan, rows, device, scale, seed=2 * number + rank)
        state.step = number
        return train_step(backward, state, [inputs], plan, recipe.train)

    def weights():
        return torch.cat([p.detach().flatten().double() for p in state.model.parameters()])

    for number in range(recipe.train.num_steps):
        if number % 8 >= 6:  # in each stage both kinds of step: those that move Adam's groups and those that do not
            saved, before, results = state.snapshot(), weights(), []
            for backward, overlap in ((direct, True), (direct, False), (replayed, False)):
                state.engine.overlap = overlap
                assert step(number, backward).isfinite()
                results.append(weights() - before)
                state.put_back(saved)
            once, again, recorded = results
            # Sums in another order change an update by its noise; half a gradient, or one of another step, by a third.
            assert (recorded - once).norm() <= 2 * (again - once).norm() + 0.03 * once.norm(), number
            assert once.norm() > 0
        step(number, replayed)
        assert_same_bits(state.model)
    assert replayed.failure is None
    assert replayed.recorded() > 1
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    spawn(2, on_gpus)
