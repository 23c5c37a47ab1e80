"""The record as a recipe: published sizes, groups and schedule, and what the published model has to no use."""

import pytest
import torch

from nanosprint.config.groups import match_group
from nanosprint.model.gpt import GPT
from nanosprint.model.roles import collect_roles
from nanosprint.recipes import load_recipe

PUBLISHED = 635_887_015
# Numbers of the published model that nothing reads, so that their gradient is zero for ever. Ours has none of them.
DEAD = {
    "scales of queries and output in layer 6, which has no attention": 2,
    "residual and post scale of attention in layer 6": 2,
    "residual and post scales of layer 10, whose are columns of a gate net": 4,
    "gates of the fifth value table, which is weighed by columns": 6 * 12,
    "outputs 26 .. 40 of the gate net before layer 4": 15 * (64 + 1),
    "outputs 5 .. 13 of the dense connections after the last layer": 9 * (64 + 1),
}


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return GPT(load_recipe("record").model)


def test_published_size(model):
    assert sum(DEAD.values()) == 1640
    assert model.num_parameters() + sum(DEAD.values()) == PUBLISHED


def test_sizes_by_role(model):
    sizes = {}
    for name, role in collect_roles(model).items():
        sizes[role.name] = sizes.get(role.name, 0) + model.get_parameter(name).numel()
    nets = {"pre": 26, "post": 41, "mudd": 14, "mudd_out": 5}
    expected = {
        "head": 38_633_472,
        "embed.token": 38_633_472,
        "embed.value": 193_167_360,
        "embed.bigram": 289_751_040,
        "matrix.qk": 11_796_480,
        "matrix.v": 5_898_240,
        "matrix.attn_out": 5_898_240,
        "matrix.mlp_up": 25_952_256,
        "matrix.mlp_down": 25_952_256,
        "scalar.qkv_scale": 10,
        "scalar.out_scale": 10,
        "scalar.smear": 1,
        "scalar.skip": 1,
        "scalar.residual": 19,  # ten attentions less the last, eleven MLPs less the last
        "scalar.post": 19,
        "gate.smear": 12,
        "gate.value": 4 * 6 * 12,
        "net.gate_scale": 1,
        **{f"net.{net}.w1": 64 * 768 for net in nets},
        **{f"net.{net}.w2": 64 * outputs for net, outputs in nets.items()},
        **{f"net.{net}.bias": outputs for net, outputs in nets.items()},
    }
    assert sizes == expected


def test_matrices_are_orthogonalised_as_published(model):
    roles = collect_roles(model)
    blocks = {
        role.name: (model.get_parameter(name).size(0) // role.blocks, model.get_parameter(name).size(1))
        for name, role in roles.items()
        if role.name.startswith("matrix")
    }
    assert blocks == {
        "matrix.qk": (256, 768),
        "matrix.v": (768, 768),
        "matrix.attn_out": (768, 768),
        "matrix.mlp_up": (3072, 768),
        "matrix.mlp_down": (3072, 768),
    }


@pytest.mark.parametrize(
    ("role", "lr", "decay", "betas", "storage"),
    [
        ("head", 1, 150, (0.5, 0.95), "bf16"),
        ("embed.token", 1, 150, (0.5, 0.95), "bf16"),
        ("embed.value", 75, 5, (0.75, 0.95), "bf16"),
        ("embed.bigram", 75, 5, (0.75, 0.95), "bf16"),
        ("scalar.qkv_scale", 5, 0, (0.9, 0.99), "fp32"),
        ("scalar.out_scale", 5, 0, (0.9, 0.99), "fp32"),
        ("scalar.smear", 5, 0, (0.9, 0.99), "fp32"),
        ("scalar.skip", 5, 0, (0.9, 0.99), "fp32"),
        ("scalar.residual", 5, 0, (0.9, 0.95), "fp32"),
        ("scalar.post", 1, 0, (0.9, 0.95), "fp32"),
        ("gate.smear", 0.01, 0, (0.9, 0.99), "bf16"),
        ("gate.value", 1, 1, (0.9, 0.99), "bf16"),
        ("net.mudd.w1", 0.25, 1, (0.9, 0.99), "bf16"),
        ("net.mudd_out.w2", 0.25, 1, (0.9, 0.99), "bf16"),
        ("net.mudd.bias", 0.25, 0, (0.9, 0.99), "bf16"),
        ("net.mudd_out.bias", 0.25, 0, (0.9, 0.99), "bf16"),
        ("net.pre.w1", 0.1, 1, (0.9, 0.99), "bf16"),
        ("net.post.w2", 0.1, 1, (0.9, 0.99), "bf16"),
        ("net.pre.bias", 0.1, 0, (0.9, 0.99), "bf16"),
        ("net.post.bias", 0.1, 0, (0.9, 0.99), "bf16"),
        ("net.gate_scale", 0.1, 0, (0.9, 0.99), "fp32"),
    ],
)
def test_adam_groups(role, lr, decay, betas, storage):
    group = match_group(role, load_recipe("record").groups)
    assert group.lr == pytest.approx(0.008 * lr)
    assert group.weight_decay == pytest.approx(0.005 * decay)
    assert (group.rule.betas, group.storage, group.every, group.lr_scale) == (betas, storage, 2, 1.0)
    assert (group.rule.eps, group.rule.eps_form, group.rule.decay) == (1e-10, "uncorrected", "cautious")


def test_muon_groups():
    for role, scale in (("qk", 1), ("v", 1), ("attn_out", 1), ("mlp_up", 1), ("mlp_down", 2)):
        group = match_group(f"matrix.{role}", load_recipe("record").groups)
        assert (group.lr, group.lr_scale, group.weight_decay, group.storage) == (0.023, scale, 1.2, "bf16+16")
        assert (group.rule.variance_beta, group.rule.orthogonalizer, group.rule.scale) == (
            0.9,
            "polar_express",
            "spectral",
        )


def test_published_schedule():
    recipe = load_recipe("record")
    assert recipe.train.num_steps == 1285
    assert recipe.tokens == 338_821_120
    for step, factor in ((0, 1.0), (422, 1.0), (423, 1.52), (846, 0.9123), (847, 1.0271), (1269, 0.1521), (1284, 0.15)):
        assert recipe.plan(step).lr_factor == pytest.approx(factor, abs=5e-5)
    assert recipe.plan(1284).momentum == pytest.approx(0.852)
    first = recipe.plan(0)
    assert (first.batch_tokens, first.max_document, first.windows.short, first.windows.long) == (131_072, 896, 128, 384)
    assert [recipe.plan(step).split for step in (846, 847)] == [False, True]
    assert recipe.eval_plan(1285).windows.long == 2560


def test_the_third():
    recipe = load_recipe("record-third")
    assert recipe.train.num_steps == 313
    assert [recipe.plan(step).batch_tokens for step in (101, 102, 203, 204)] == [131072, 262144, 262144, 393216]
    assert recipe.plan(306).windows.long == 13 * 128
    assert recipe.plan(305).windows.long == 11 * 128
    assert recipe.plan(72).momentum < 0.95 == recipe.plan(73).momentum == recipe.plan(301).momentum
    assert recipe.plan(302).momentum < 0.95
    assert recipe.precision.fp8_mlp.bootstrap_steps == 16


@pytest.mark.parametrize("name", ["normuon", "paired", "record"])
@pytest.mark.parametrize("layers", [3, 5, 8, 11, 14])
def test_any_depth(name, layers):
    recipe = load_recipe(name, {"model.num_layers": layers})
    assert recipe.model.num_layers == layers
    assert recipe.model.layers[-1].mixer.window == "long"


def test_too_shallow():
    with pytest.raises(ValueError, match=r"model.num_layers=2: the record's connections want at least 3"):
        load_recipe("record", {"model.num_layers": 2})
