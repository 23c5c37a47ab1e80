"""Projections in FP8 over updates: which scale is measured when, what keeps it, and that a model trains with them."""

import json
import math

import pytest
import torch

from nanosprint.config import Execution, Fp8ProjectionSpec
from nanosprint.model.fp8_projection import Fp8Projection
from nanosprint.model.fp8_weight import Fp8Weight
from nanosprint.ops import fp8
from nanosprint.ops.fp8_copies import renew
from nanosprint.recipes import load_recipe
from nanosprint.training.api import train
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state
from nanosprint.training.state import copied
from nanosprint.training.warmup import warm_up
from tests.recipes.test_ladder import small

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROJECTIONS = {"precision.fp8_projections": "{}"}
RECORD = small("record", **PROJECTIONS, **{"model.dim": 32, "model.num_layers": 4})


@pytest.fixture
def device(request):
    if request.param == "cuda" and not (torch.cuda.is_available() and fp8.supports_fp8("cuda")):
        pytest.skip("needs a GPU with FP8")
    return request.param


def execution(**options):
    return Execution(**{"device": "cpu", "compute": "bf16", "attention": "sdpa", "compile": "off", **options})


def built(name="tiny", overrides=PROJECTIONS, **options):
    """(recipe, state) with weights that are nowhere zero."""
    recipe = load_recipe(name, overrides)
    state = build_state(recipe, execution(**options), 0, CPU)
    with torch.no_grad():
        for i, p in enumerate(state.model.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    state.model.refresh(0)
    return recipe, state


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refresh(device, turned, dtype):
    """One scale for the parts of a matrix, of their largest value; a factor is in the scale and not in the codes."""
    torch.manual_seed(0)
    shapes = [((96, 48), (48, 48)), ((48, 48),), ((160, 32),)]
    parts = [tuple(torch.randn(s, device=device).to(dtype) * (i + 1) for i, s in enumerate(group)) for group in shapes]
    factors = [torch.tensor(-0.5, device=device), None, torch.tensor(3.0, device=device)]
    weights = [
        Fp8Weight((sum(len(p) for p in ps), ps[0].shape[1]), torch.device(device), turned=turned) for ps in parts
    ]
    for _ in range(2):  # the second time other values
        renew([weight.copy_of(*both) for weight, *both in zip(weights, parts, factors, strict=True)])
        for weight, matrix, factor in zip(weights, map(torch.cat, parts), factors, strict=True):
            scale = matrix.float().abs().max() / 448
            assert weight.scale.item() == pytest.approx(scale.item() * (1.0 if factor is None else factor.item()))
            codes = fp8.quantize(matrix, scale, fp8.E4M3).float()
            difference = (weight.codes.view(fp8.E4M3).float() - codes).abs() / codes.abs().clamp(min=2.0**-6)
            assert difference.max() <= 2**-3  # a code on the border
            assert (difference > 0).float().mean() < 1e-2
            assert not turned or torch.equal(weight.turned, weight.codes.mT)
        for group in parts:
            group[-1].mul_(7).sub_(1)


def test_refresh_of_nothing_and_of_zeros():
    renew([])
    weight = Fp8Weight((16, 16), CPU, turned=True)
    renew([weight.copy_of((torch.zeros(16, 16),))])
    assert 0 < weight.scale < 1e-10
    assert not weight.codes.any()


def test_scale_of_the_input_follows_the_calls_or_stays():
    torch.manual_seed(0)
    W = torch.randn(32, 16, requires_grad=True)
    following = Fp8Projection((32, 16), CPU, gradient_scale=1e-3, headroom=2.0)
    constant = Fp8Projection((32, 16), CPU, gradient_scale=None, input_scale=0.5)
    for module in (following, constant):
        renew([module.weight.copy_of((W,))])
        for size in (1.0, 50.0):
            x = size * torch.randn(1, 8, 16)
            y = module(x.unflatten(-1, (2, 8)) if module is following else x, W)  # heads, too
            expected = 2 * x.abs().max().item() / 448 if module is following else 0.5
            assert module.input_scale.item() == pytest.approx(expected)
    exact = x.double() @ W.detach().double().mT
    assert (y.detach().double() - exact).norm() / exact.norm() < 5e-2
    late = following(x, W).detach().double()  # by now the scale is that of such inputs
    assert (late - exact).norm() / exact.norm() < 5e-2
    assert constant.weight.turned is None


@pytest.mark.parametrize("name", ["tiny", "record"])
@pytest.mark.parametrize(("qkv", "out", "backward"), [(True, True, True), (True, False, False), (False, True, True)])
def test_products_in_fp8_are_near_those_in_bf16(name, qkv, out, backward):
    """Loss and gradients of the whole model; a scale in the wrong direction or a stale factor would be far off."""
    switches = {"qkv": qkv, "out": out, "backward": backward}
    overrides = {**(RECORD if name == "record" else {}), "precision.fp8_projections": json.dumps(switches)}
    overrides |= {"precision.fp8_mlp": "none", "precision.fp8_head": "none"}
    results = []
    for mode in ("off", "auto"):
        recipe, state = built(name, overrides, fp8=mode)
        model = state.model
        arguments = random_input(recipe, recipe.plan(0), 2, CPU)
        for _ in range(2):  # the first call of the second finds its scales
            model.zero_grad()
            loss = model.loss_sum(*arguments)
            loss.backward()
        results.append((loss.item(), {n: p.grad.double().clone() for n, p in model.named_parameters()}))
        mixers = [layer.mixer for layer in model.layers if hasattr(layer, "mixer")]
        assert [(m.fp8_qkv is not None, m.fp8_out is not None) for m in mixers] == [
            (qkv and mode == "auto", out and mode == "auto")
        ] * len(mixers)
    (loss, grads), (loss8, grads8) = results
    assert loss8 == pytest.approx(loss, rel=2e-2)
    assert loss8 != loss
    for n, expected in grads.items():
        # A scalar's gradient is a sum of terms of both signs.
        error = (grads8[n] - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < 0.2 or expected.numel() < 16, (n, error)


def test_validation_is_in_the_dtype_of_the_run():
    recipe, state = built()
    _, off = built(fp8="off")
    arguments = random_input(recipe, recipe.plan(0), 2, CPU)
    before = copied(state.model.state_dict())
    with torch.no_grad():
        assert torch.equal(state.model.loss_sum(*arguments), off.model.loss_sum(*arguments))
    for n, value in state.model.state_dict().items():
        assert torch.equal(value, before[n]), n


def test_state_is_saved_and_warm_up_puts_it_back():
    recipe, state = built()
    names = {n.partition(".mixer.fp8_")[2] for n in state.model.state_dict()} - {""}
    copies = {"weight.codes", "weight.turned", "weight.scale", "input_scale"}
    assert names == {f"{which}.{n}" for which in ("qkv", "out") for n in copies}
    assert not any(".fp8_" in n for n, _ in state.model.named_parameters())
    model, saved = state.model, state.snapshot()
    before = copied(model.state_dict())
    model.loss_sum(*random_input(recipe, recipe.plan(0), 2, CPU)).backward()
    mixer = model.layers[0].mixer
    assert mixer.fp8_out.input_scale != before["layers.0.mixer.fp8_out.input_scale"]
    assert mixer.fp8_qkv.input_scale.item() == pytest.approx(math.sqrt(32) / 448)
    model.refresh(1)
    state.put_back(saved)
    warm_up(state, model.loss_sum, recipe, resolve(Execution(compile="off"), recipe, World(0, 1, CPU)))
    for n, value in model.state_dict().items():
        assert torch.equal(value, before[n]), n


def test_the_unit_of_gradients_is_that_of_the_objective():
    for name, overrides, divisor in (("tiny", PROJECTIONS, 512), ("record", RECORD, 8)):
        _, state = built(name, overrides)
        scale = state.model.layers[0].mixer.fp8_out.gradient_scale.item()
        assert scale == Fp8ProjectionSpec().gradient / divisor


def test_compiled_training_step_is_one_graph():
    more = {"separate_qk": "true", "qkv_scale": '{"init": 0.5, "role": "a"}', "out_scale": '{"init": 1, "role": "b"}'}
    layers = {f"model.layers.{i}.mixer.{key}": value for i in (0, 1) for key, value in more.items()}
    recipe, state = built("tiny", PROJECTIONS | layers)
    model = state.model
    arguments = random_input(recipe, recipe.plan(0), 2, CPU)
    start = copied(model.state_dict())
    compiled = torch.compile(model.loss_sum, dynamic=False, fullgraph=True, backend="aot_eager")
    results = []
    for loss_sum in (model.loss_sum, compiled):
        model.load_state_dict(start)
        model.zero_grad()
        losses = []
        for _ in range(3):
            loss = loss_sum(*arguments)
            loss.backward()
            losses.append(loss.detach())
        mixer = model.layers[0].mixer
        grads = mixer.qk.grad, mixer.v.grad, mixer.out.grad, mixer.qkv_scale.value.grad, mixer.out_scale.value.grad
        results.append((torch.stack(losses), mixer.fp8_out.input_scale.clone(), *(g.clone() for g in grads)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_a_reduced_record_trains(tmp_path, tiny_data):
    recipe = load_recipe("record", {**RECORD, "train.num_steps": 12, "train.log_every": 1})
    path = tmp_path / "run"
    train(recipe, out=path, data=tiny_data, execution={"device": "cpu", "compile": "off"})
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 12
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.6 * losses[0]


def test_bad_recipes_are_refused():
    for overrides, message in (
        ({"precision.compute": "fp64"}, "fp64"),
        ({"model.norm": "layernorm"}, "norm=rms"),
        ({"model.bias": "true"}, "without model.bias"),
        ({"precision.fp8_projections": '{"qkv": false, "out": false}'}, "neither qkv nor out"),
        ({"precision.fp8_projections": '{"headroom": 0.5}'}, "headroom=0.5: it must be at least 1"),
        ({"precision.fp8_projections": '{"gradient": 0}'}, "gradient=0.0: it must be positive"),
        ({"model.dim": 24}, "multiples of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe("tiny", PROJECTIONS | overrides)
