"""Recorded micro-batches, with a recorder in place of CUDA graphs: a replay does the work anew on the same tensors."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.errors import UserError
from nanosprint.model.context import Context, LossTensors
from nanosprint.ops.attention import Documents
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.training import replay, setup
from nanosprint.training.batch import ModelInput, ModelStage, random_input
from nanosprint.training.distributed import World
from nanosprint.training.replay import Replayed
from nanosprint.training.resolve import _check_cuda_graphs, _cuda_graphs, resolve
from nanosprint.training.setup import build_state
from nanosprint.training.step import backward_of, train_step
from nanosprint.training.warmup import training_visits
from tests.recipes.test_ladder import small

CPU = torch.device("cpu")


class Recorder:
    """Like a CUDA graph, a recording does nothing when it is made, and writes its result in place at each replay."""

    def __init__(self):
        self.made, self.replayed = 0, 0

    def __call__(self, work):
        self.made += 1
        result = torch.full((), float("nan"))

        def replay():
            self.replayed += 1
            result.copy_(work())

        return replay, result


class Weighted(torch.nn.Module):
    """loss = weight * (sum of tokens) * window * first loss weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.weight.grad = torch.zeros_like(self.weight)
        self.seen = []

    def loss_sum(self, tokens, targets, context):
        self.seen.append((tokens.data_ptr(), context.short))
        factor = 1.0 if context.loss is None else context.loss.tokens[0]
        return self.weight * tokens.double().sum() * (context.short or 1) * factor


def an_input(total, short=None, longest=3, weight=None, rows=1):
    tokens = torch.full((rows, 4), total / 4 / rows)
    loss = None if weight is None else LossTensors(torch.tensor([weight]))
    return ModelInput(tokens, tokens, Context(Documents(torch.tensor([0, 4]), longest), short, None, None, loss))


@pytest.fixture
def made():
    model, recorder = Weighted(), Recorder()
    return model, recorder, Replayed(backward_of(model.loss_sum), model.named_parameters(), recorder)


def test_one_recording_serves_a_form(made):
    """The first call is no replay; losses are not overwritten by the next, and gradients add up."""
    model, recorder, backward = made
    losses = [backward(an_input(total, short=2, longest=longest), 4) for longest, total in ((3, 8), (90, 12), (5, 20))]
    assert [loss.item() for loss in losses] == [16, 24, 40]
    assert model.weight.grad.item() == 80 / 4
    assert (recorder.made, recorder.replayed) == (1, 2)
    assert len({address for address, _ in model.seen}) == 1  # one place, whatever was passed


@pytest.mark.parametrize(
    "other", [{"short": 3}, {"short": 2, "rows": 2}, {"short": 2, "weight": 0.5}, {"short": 2, "longest": 5000}]
)
def test_another_form_or_number_is_recorded_anew(made, other):
    _, recorder, backward = made
    for _ in range(2):
        assert backward(an_input(8, short=2), 1) == 16
        expected = 8 * other["short"] * other.get("weight", 1)
        assert backward(an_input(8, **other), 1) == expected
    assert (recorder.made, recorder.replayed) == (2, 2)


def test_another_divisor_is_recorded_anew_and_other_loss_weights_are_not(made):
    model, recorder, backward = made
    for divisor, weight in ((1, 1.0), (2, 1.0), (2, 0.25), (1, 0.5)):
        assert backward(an_input(8, weight=weight), divisor) == 8 * weight
    assert recorder.made == 2
    assert model.weight.grad.item() == 8 + 4 + 1 + 4


def test_a_gradient_that_does_not_stay(made):
    model, _, backward = made
    model.weight.grad = None
    with pytest.raises(UserError, match=r"weight has a gradient that is made anew.*set exec.cuda_graphs=off"):
        backward(an_input(8), 1)

    def move(work):
        model.weight.grad = model.weight.grad.clone()
        return work, torch.zeros(())

    model.weight.grad = torch.zeros_like(model.weight)
    with pytest.raises(RuntimeError, match="has moved"):
        Replayed(backward_of(model.loss_sum), model.named_parameters(), move)(an_input(8), 1)


def failing(error):
    def record(work):
        raise error

    return record


def test_a_recording_that_fails_costs_the_recordings_and_no_step(caplog):
    model, recorder = Weighted(), Recorder()
    backward = Replayed(backward_of(model.loss_sum), model.named_parameters(), recorder)
    assert backward(an_input(8, short=2), 4) == 16
    assert backward.agree() is None
    backward._record = failing(RuntimeError("operation not permitted\nC++ frames"))
    for i, short in enumerate((3, 2, 3)):
        assert backward(an_input(8, short=short), 4) == 8 * short
        assert (backward.recorded(), recorder.replayed) == (0, 0), i
    assert model.weight.grad.item() == (16 + 24 + 16 + 24) / 4
    assert backward.agree() == backward.failure == "RuntimeError: operation not permitted"
    assert caplog.messages == ["steps are no longer recorded: RuntimeError: operation not permitted"]


def test_memory_that_recordings_lack(made, monkeypatch):
    """One process tries smaller micro-batches; several go on without recordings."""
    backward = made[2]
    backward._record = failing(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        backward(an_input(8, short=2), 4)
    monkeypatch.setattr(replay, "place", lambda: (1, 2))
    assert backward(an_input(8, short=2), 4) == 16
    assert backward.failure == "OutOfMemoryError: out of memory"


@pytest.mark.parametrize(("processes", "on_trial", "again"), [(2, True, True), (2, False, False), (1, True, False)])
def test_memory_that_recordings_leave(processes, on_trial, again, monkeypatch):
    """A pass is made again without them, of several processes and where nothing counts."""
    monkeypatch.setattr(replay, "place", lambda: (0, processes))
    model, full = Weighted(), []

    def loss_sum(tokens, targets, context):
        if full:
            raise torch.OutOfMemoryError(full.pop())
        return model.loss_sum(tokens, targets, context)

    backward = Replayed(backward_of(loss_sum), model.named_parameters(), Recorder())
    backward.on_trial = on_trial
    full.append("at the first call, when there is nothing to give up")
    with pytest.raises(torch.OutOfMemoryError):
        backward(an_input(8, short=2), 4)
    assert backward(an_input(8, short=2), 4) == 16
    full.append("beside a recording")
    with nullcontext() if again else pytest.raises(torch.OutOfMemoryError):
        assert backward(an_input(8, short=3), 4) == 24
    assert (backward.failure is None) == (not again)
    assert backward.recorded() == (not again)


@pytest.mark.parametrize("name", ["record", "sub3"])
def test_steps_are_the_same_bit_for_bit(name):
    """Stages or windows that move, a tie that ends, gradients that wait for their turn, two micro-batches a step."""
    recipe = load_recipe(name, small(name, **{"train.num_steps": 9}))
    execution = resolve(Execution(device="cpu", lanes_per_microbatch=recipe.train.lanes // 2), recipe, World(0, 1, CPU))
    results = []
    for recorder in (None, Recorder()):
        state = build_state(recipe, execution, 0, CPU)
        backward = backward_of(state.model.loss_sum)
        if recorder is not None:
            backward = Replayed(backward, state.model.named_parameters(), recorder)
        stage, losses = ModelStage(state.model), []
        for step in range(recipe.train.num_steps):
            plan = recipe.plan(step)
            rows = plan.batch_tokens // plan.seq_len // 2
            scale = stage.enter(plan)
            inputs = [random_input(recipe, plan, rows, CPU, scale, seed=2 * step + i) for i in range(2)]
            losses.append(train_step(backward, state, inputs, plan, recipe.train).item())
        results.append((losses, {n: p.detach().clone() for n, p in state.model.named_parameters()}))
    assert recorder.made + recorder.replayed == 2 * recipe.train.num_steps
    assert recorder.replayed >= recipe.train.num_steps
    (losses, weights), (others, other_weights) = results
    assert losses == others
    assert all(torch.equal(weights[n], other_weights[n]) for n in weights)


def test_a_whole_run_records_nothing_on_the_clock(train_tiny, weights, monkeypatch):
    """Also where a budget changes the schedule, and with it the windows, after the first warm-up."""
    overrides = ("model.layers.0.mixer.window=long", 'schedule.windows={"start": 4, "end": 32, "block": 4}')
    options = {"execution": {"device": "cpu", "compile": "off"}}
    plain = train_tiny("plain", *overrides, **options)
    recorders = []

    def build(state, loss_sum, execution):
        recorders.append(Recorder())
        return Replayed(backward_of(loss_sum), state.model.named_parameters(), recorders[-1])

    monkeypatch.setattr(setup, "build_backward", build)
    monkeypatch.setattr("nanosprint.training.warmup.graph_of", lambda plan, _: (plan.batch_tokens, plan.windows))
    before = []
    real = setup.Prepared

    def prepared(*args, **kwargs):
        before.append(recorders[-1].made)
        return real(*args, **kwargs)

    monkeypatch.setattr(setup, "Prepared", prepared)
    replayed = train_tiny("replayed", *overrides, **options)
    assert before == [recorders[-1].made]
    assert recorders[-1].made > 1
    assert RunRecord.load(replayed).clock_graphs == 0
    assert RunRecord.load(replayed).val_loss == RunRecord.load(plain).val_loss
    one, two = weights(plain), weights(replayed)
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_windows_are_part_of_what_is_recorded():
    recipe = load_recipe("longwindow")
    execution = Execution(attention="fa2", compile="default", tokens_per_microbatch=1 << 20, parts_per_microbatch=1)
    counts = [len(training_visits(recipe, replace(execution, cuda_graphs=graphs))) for graphs in ("off", "on")]
    assert counts[0] < counts[1]
    assert counts[1] == len({recipe.plan(step).windows for step in range(recipe.train.num_steps)})


def test_needs_a_gpu():
    recipe = load_recipe("tiny")
    with pytest.raises(UserError, match=r"exec.cuda_graphs=on needs a CUDA device, not cpu"):
        resolve(Execution(device="cpu", cuda_graphs="on"), recipe, World(0, 1, CPU))


def test_recorded_where_stages_bound_the_shapes():
    record, gpt2 = load_recipe("record"), load_recipe("gpt2")
    on_gpu = Execution(device="cuda", compile="default", attention="triton")
    assert _cuda_graphs(on_gpu, record) == "on"
    assert _cuda_graphs(on_gpu, gpt2) == "off"
    for other in ({"device": "cpu"}, {"compile": "off"}, {"compile": "max-autotune"}, {"attention": "flex"}):
        assert _cuda_graphs(replace(on_gpu, **other), record) == "off"
    assert _cuda_graphs(replace(on_gpu, cuda_graphs="off"), record) == "off"
    assert _cuda_graphs(replace(on_gpu, cuda_graphs="on"), gpt2) == "on"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compile": "max-autotune"}, "max-autotune has CUDA graphs of its own"),
        ({"attention": "flex"}, "exec.attention=flex copies windows to the GPU"),
        ({"attention": "reference"}, "exec.attention=reference copies windows to the GPU"),
        ({"attention": "flex", "compile": "off"}, None),
        ({"attention": "triton"}, None),
        ({"attention": "sdpa"}, None),
    ],
)
def test_what_cannot_be_recorded(options, said):
    execution = replace(Execution(device="cuda", compile="default", attention="fa2", cuda_graphs="on"), **options)
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        _check_cuda_graphs(execution)
    _check_cuda_graphs(replace(execution, cuda_graphs="off"))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "fa2"])
def test_cuda_graphs_change_nothing(attention):
    """Gradients of a small record, with its kernels and FP8, after replayed steps: as a call without gives them.

    They cannot be repeated to the bit, since FP8's scales move with every forward pass: two calls without say how far.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from nanosprint.training.replay import OnGpu

    size = {"model.num_layers": 6, "model.seq_len": 3072, "train.batch_tokens": 6144, "train.lanes": 2}
    recipe = load_recipe("record-third", {**size, "eval.seq_len": 8192, "eval.batch_tokens": 8192})
    recipe = recipe.with_num_steps(24)
    world = World(0, 1, torch.device("cuda"))
    execution = resolve(Execution(attention=attention), recipe, world)
    torch._dynamo.reset()
    state = build_state(recipe, execution, 0, world.device)
    direct = backward_of(setup.compiled(state.model, execution))
    replayed = Replayed(direct, state.model.named_parameters(), OnGpu())
    stage, losses = ModelStage(state.model), []

    def gradient(backward, inputs):
        for p in state.model.parameters():
            p.grad.zero_()
        loss = backward(inputs, 1.0).item()
        return loss, torch.cat([p.grad.flatten().double() for p in state.model.parameters()])

    for step in range(recipe.train.num_steps):
        plan = recipe.plan(step)
        inputs = random_input(recipe, plan, 2, world.device, stage.enter(plan), seed=step)
        losses.append(train_step(replayed, state, [inputs], plan, recipe.train).item() / plan.batch_tokens)
        if step % 6 == 5:
            (loss, once), (_, again), (of_replay, gradients) = (
                gradient(backward, inputs) for backward in (direct, direct, replayed)
            )
            assert of_replay == pytest.approx(loss, rel=1e-3)
            assert (gradients - once).norm() <= 2 * (again - once).norm() + 1e-3 * once.norm()
            for p in state.model.parameters():
                p.grad.zero_()
    assert replayed.failure is None
    assert replayed.recorded() > 0
    assert losses[-1] < losses[0]
