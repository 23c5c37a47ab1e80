"""The record's wiring against straight-line sums in float64: which stream goes where, with which weight, and when.

Mixers, MLPs and gate nets are taken as they are (they have tests of their own); everything between them is written out.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanosprint.config.model import ModelConfig
from nanosprint.model.context import NO_CONTEXT
from nanosprint.model.gpt import GPT
from nanosprint.model.mixing import Mixture
from nanosprint.ops.embedding import rows_of
from nanosprint.recipes import load_recipe
from tests.recipes.test_ladder import small

IDS = torch.randint(257, (2, 19), generator=torch.Generator().manual_seed(5))


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 2**-23).sqrt()


def record(perturb):
    config = load_recipe("record", {**small("record"), "model.num_layers": 11}).model
    model = GPT(config, compute_dtype=torch.float64).double()
    model.init_weights(3)
    if perturb:  # zeros and ones hide mistakes
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
    return model


def record_hidden(model, ids):
    """Sections 3 to 6 of the published model, layer by layer. `w` below are the weights of a sum in their order."""
    e = model.embed.weight[ids]
    before = torch.cat([torch.zeros_like(e[:, :1]), e[:, :-1]], 1)
    lam, gate = model.embed.smear.weight.value, model.embed.smear.gate.weight
    x0 = rms(e + lam * torch.sigmoid(e[..., :12] @ gate.T) * before)
    b = model.bigram(ids, torch.float64)
    tables = {f"table{i}": model.value_tables.weight[ids][..., 48 * i : 48 * (i + 1)] for i in range(5)}
    known, columns = {"x0": x0, "bigram": b, **tables}, {}

    def look(net, u):
        columns[net] = model.nets(net, u, torch.float64)

    def w(mixture):
        return [weight(known, columns) for weight in mixture.weights]

    def bare(maker):  # without the number of the sum that its output goes into, which is written out below
        other = copy.copy(maker)
        other._number = ()
        return other

    look("pre", x0)
    x = c0 = x0 + w(model.input)[1] * b
    known |= {"c0": c0}
    for i, layer in enumerate(model.layers):
        if i == 4:
            look("post", x)
        if i == 6:
            x = x + w(layer.entry)[1] * known["c3"]
        elif i == 10:
            look("mudd", x)
            known["c9"] = c9 = x
            _, m5, m3, m4 = w(layer.entry)
            x = (1 + m5) * x + m3 * c0 + m4 * known["c7"]
        if i != 6:
            n = rms(known["c7"] if i >= 8 else x)
            a = bare(layer.mixer)(n, NO_CONTEXT, {**known, "n": n}, columns)
            if i == 10:
                m8, m9, m10, m11 = w(layer.after_mixer)
                x = m8 * x + m9 * a + m10 * c0 + m11 * b
            else:
                rho, pi, alpha, *beta = w(layer.after_mixer)
                x = rho * x + pi * a + alpha * x0
                assert len(beta) == (i > 0)
                for weight in beta:
                    x = x + weight * b
        rho, pi = w(layer.after_mlp)
        x = rho * x + pi * bare(layer.mlp)(rms(x))
        if i in (3, 7):
            known[f"c{i}"] = x
    look("mudd_out", x)
    _, o0, o7, o9, ov, o3 = w(model.output)
    return rms(x + o0 * c0 + o7 * known["c7"] + o9 * c9 + ov * tables["table0"] + o3 * known["c3"])


@pytest.mark.parametrize("perturb", [False, True])
def test_record_is_its_sums_written_out(perturb):
    model = record(perturb)
    torch.testing.assert_close(model.hidden(IDS), record_hidden(model, IDS), rtol=1e-9, atol=1e-9)


def test_what_starts_as_nothing():
    """At first MLPs, smear, hashed pairs, x0 and the dense connections add nothing; attention and two constants do."""
    model = record(perturb=False)
    x = c = rms(model.embed.weight[IDS])
    known = {"x0": x, "c0": x, **model.value_tables(rows_of(IDS), x.dtype)}
    known["bigram"] = torch.zeros_like(x)
    columns = {}
    for net in ("pre", "post", "mudd"):
        columns[net] = model.nets(net, torch.zeros_like(x), torch.float64)
    for i, layer in enumerate(model.layers):
        if i == 6:
            x = x + 0.5 / (1 + torch.tensor(1.5, dtype=x.dtype).exp()) * c
        elif i == 10:
            known["c9"] = x
        if i != 6:
            n = rms(known["c7"] if i >= 8 else x)
            x = 1.1**0.5 * x + layer.mixer(n, NO_CONTEXT, {**known, "n": n}, columns)
        x = 1.1**0.5 * x
        if i in (3, 7):
            known[f"c{i}"] = c = x
    torch.testing.assert_close(model.hidden(IDS), rms(x - 0.5 * known["c7"]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layers", [3, 4, 6, 11, 13])
@pytest.mark.parametrize("name", ["normuon", "paired", "record"])
def test_every_weight_learns(name, layers):
    """Every scalar, every gate and every single column of a gate net moves the loss, at any depth."""
    config = load_recipe(name, {**small(name), "model.num_layers": layers}).model
    model = GPT(config, compute_dtype=torch.float64).double()
    model.init_weights(0)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
    model.loss_sum(IDS, IDS.roll(1)).backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name
        rows = p.grad.flatten(1) if parameter_name.endswith((".w2", ".w1")) else p.grad.reshape(1, -1)
        assert float(rows.abs().amax(1).min()) > 0, parameter_name
        if parameter_name.endswith(".bias"):
            assert float(p.grad.abs().min()) > 0, parameter_name


class OnlyFloat64(TorchDispatchMode):
    """Fails where an operator returns another floating-point format."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert tensor.dtype is torch.float64, f"{function} returns {tensor.dtype}"
        return out


@pytest.mark.parametrize("name", ["sub3", "record"])
def test_float64_is_float64_throughout(name):
    model = GPT(load_recipe(name, small(name)).model, compute_dtype=torch.float64).double()
    model.init_weights(0)
    with OnlyFloat64():
        model.loss_sum(IDS, IDS.roll(1)).backward()


def test_streams_stay_in_bf16():
    """Learned numbers in fp32, and columns, leave the format of what they weigh alone."""
    model = GPT(load_recipe("record", small("record")).model, compute_dtype=torch.bfloat16)
    model.init_weights(0)
    formats = []
    for module in model.modules():
        if isinstance(module, Mixture):
            module.register_forward_hook(lambda _, inputs, out: formats.append(out.dtype))
    model.loss_sum(IDS, IDS.roll(1))
    assert len(formats) > 10
    assert set(formats) == {torch.bfloat16}


def test_the_embedding_starts_as_a_copy_of_the_head():
    model = record(perturb=False)
    assert model.head.weight.shape == (48, 257)
    assert torch.equal(model.embed.weight, model.head.weight.T)
    assert float(model.head.weight.detach().std()) == pytest.approx(0.005, rel=0.05)
    assert float(model.value_tables.weight.detach().std()) == pytest.approx(0.01, rel=0.05)


def test_initial_matrices():
    model = record(perturb=False)
    bound = 3**0.5 * 0.5 * 48**-0.5
    layer = model.layers[1]
    for matrix in (layer.mixer.qk, layer.mixer.v, layer.mixer.out, layer.mlp.up):
        assert 0.9 * bound < float(matrix.detach().abs().max()) <= bound
    assert layer.mlp.down.shape == (192, 48)
    assert not layer.mlp.down.any()


def test_flops_count_every_product_once():
    config: ModelConfig = load_recipe("record", {**small("record"), "model.num_layers": 11}).model
    with torch.device("meta"):
        model = GPT(config)
    products = 10 * 4 * 48 * 48 + 11 * 2 * 48 * 192 + 48 * 257  # attention, MLPs, head
    products += 4 * 64 * 48  # nets' first layers
    outputs = sum(len(net.bias) for net in model.nets.nets.values())
    products += 64 * outputs + 4 * 2 * 12 + 12  # nets' second layers, value gates of two heads, smear
    paired, plain, composed = 4, 6, 1
    keys = paired * (2 * 16 + 1) / 2 + plain * 17 / 2 + composed * 17 / 2
    assert model.flops_per_token(16) == pytest.approx(6 * products + 12 * 48 * keys)
