"""Floors of a step against those worked out by hand for the record, per lane; and what must move them, or must not."""

from dataclasses import replace

import pytest
import torch

from benchmarks import floors
from benchmarks.floors import Ceilings, Step
from nanosprint.model.context import Context
from nanosprint.model.gpt import GPT
from nanosprint.ops.attention_backends.contract import pack_documents
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import ModelInput
from nanosprint.training.profile import GROUPS

# What the hand-made table assumed of an H200.
HAND = Ceilings(bf16=790e12, fp8=1500e12, copy=4.3e12)
STEPS = (0, 424, 848)  # of the record's three stages
# Milliseconds for one lane of 16,384, 32,768 and 49,152 tokens: full windows, products in the record's formats.
PROJECTIONS = (2.94, 5.87, 8.81)
ATTENTION = (0.73, 2.17, 5.32)
MLP = (5.44, 10.88, 16.32)
MLP_IN_BF16 = (6.46, 12.92, 19.38)
HEAD = (2.53, 5.06, 7.60)
LOSS = (0.96, 1.92, 2.88)  # with the transpose of its gradient
COMPOSED_FORWARD = (0.029, 0.059, 0.088)


def lane(recipe, at, documents=None, lanes=1):
    plan = recipe.plan(at)
    with torch.device("meta"):
        model = GPT(recipe.model)
        tokens = torch.empty(1, plan.seq_len, dtype=torch.int64)
    return Step(recipe, plan, model, [ModelInput(tokens, tokens, Context(documents=documents))] * lanes)


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("record")


@pytest.fixture(scope="module")
def lanes(recipe):
    return [lane(recipe, at) for at in STEPS]


def close(figure):
    return pytest.approx(figure, rel=0.015)


def test_products_by_hand(lanes):
    for i, step in enumerate(lanes):
        assert floors.projections(step, HAND) == close(PROJECTIONS[i])
        mlp = floors.mlp_products(step, HAND)
        assert sum(mlp.values()) == close(MLP[i])
        assert mlp["fp8"] == close(MLP_IN_BF16[i] / 6 * 790 / 1500)
        assert floors.head_products(step, HAND)["fp8"] == close(HEAD[i])
        plain = floors.mlp_products(replace(step, fp8=False), HAND)
        assert plain == {"bf16": close(MLP_IN_BF16[i]), "fp8": 0.0, "fused": 0.0}


def test_products_of_the_mlp_with_more_of_it_in_fp8():
    one = MLP_IN_BF16[0] / 6
    for weights, in_fp8 in ((False, 4), (True, 6)):
        words = {"precision.fp8_mlp.backward": True, "precision.fp8_mlp.weights": weights}
        mlp = floors.mlp_products(lane(load_recipe("record", words), STEPS[0]), HAND)
        assert mlp["fused"] == close(2 * one * 790 / 1500)
        assert sum(mlp.values()) == close(one * (in_fp8 * 790 / 1500 + 6 - in_fp8))


def test_the_rest_by_hand(lanes):
    for i, step in enumerate(lanes):
        assert floors.attention(step, HAND) == close(ATTENTION[i])
        assert floors.loss(step, HAND) + floors.head_transpose(step, HAND) == close(LOSS[i])
        # Forward 5 tensors, backward 7; in figures of one pass forward.
        assert floors.composed_attention(step, HAND) == pytest.approx(COMPOSED_FORWARD[i] * 12 / 5, rel=0.03)


def test_sizes_come_from_the_model(recipe):
    """Half the width: a quarter of the layers' products, half of the head's and of what passes by."""
    small = load_recipe("record", {"model.dim": 384, "model.num_heads": 6})
    whole, half = lane(recipe, 0), lane(small, 0)
    assert floors.projections(half, HAND) == pytest.approx(floors.projections(whole, HAND) / 4)
    for part in (floors.elementwise, floors.embedding):
        assert part(half, HAND) == pytest.approx(part(whole, HAND) / 2, rel=0.01)
    assert floors.head_products(half, HAND)["fp8"] == pytest.approx(floors.head_products(whole, HAND)["fp8"] / 2)
    assert floors.loss(half, HAND) == floors.loss(whole, HAND)


def test_each_order_of_the_hashed_table_gives_a_row(recipe):
    """A row of bf16 read, its gradient read and added, and a sign a number; the stream is written once."""
    longer = load_recipe("record", {"model.bigram.orders": [2, 3], "model.bigram.longer_rows": 1000})
    more = floors.embedding(lane(longer, 0), HAND) - floors.embedding(lane(recipe, 0), HAND)
    assert more == pytest.approx(HAND.bytes_ms(lane(recipe, 0).tokens * 768 * (2 + 2 + 2 + 1)))


def test_ends_of_documents_shorten_attention(recipe):
    """Documents of 512: at most 512 keys a query, on average half; bytes stay."""
    at = STEPS[2]
    packed = pack_documents([512] * 96)
    whole, cut = lane(recipe, at), lane(recipe, at, packed)
    long = next(mixer for mixer in whole.mixers if mixer.window == "long")
    paired = next(mixer for mixer in whole.mixers if mixer.paired)
    assert cut.visible_pairs(long) == 96 * 512 * 513 // 2
    assert whole.visible_pairs(long) == 49_152 * 1409 - 1408 * 1409 // 2
    # Twice as long with half the heads; the window of 640 now cuts.
    assert cut.visible_pairs(paired) == 96 * (1024 * 641 - 640 * 641 // 2) // 2
    assert floors.attention(cut, HAND) < 0.6 * floors.attention(whole, HAND)


def test_a_step_is_its_lanes(recipe):
    one, eight = lane(recipe, 0), lane(recipe, 0, lanes=8)
    alone, together = floors.floors_ms(one, HAND), floors.floors_ms(eight, HAND)
    assert alone.keys() == together.keys() == {*GROUPS} & alone.keys()
    for group, ms in together.items():
        if group == "optimizer":
            assert ms == alone[group]
        elif group == "copies and transposes":  # weights are quantised once
            weights = 4 * 50_304 * 768 + 11 * (5 + 3) * 3072 * 768
            assert ms == pytest.approx(8 * alone[group] - 7e3 * weights / HAND.copy)
        else:
            assert ms == pytest.approx(8 * alone[group], rel=0.02), group  # weights are read once


def test_optimizer_by_hand(recipe):
    """Adam in bf16, every second step: 22 bytes a number. Muon in bf16 and 16 more bits: 18 bytes, and its products."""
    step = lane(recipe, 0)
    sizes = {"adam": 0, "muon": 0}
    for parameter in step.shapes("embed", "head"):
        sizes["adam"] += parameter[0] * parameter[1]
    for parameter in step.shapes("matrix"):
        sizes["muon"] += parameter[0] * parameter[1]
    by_bytes = 1e3 * (22 / 2 * sizes["adam"] + 18 * sizes["muon"]) / HAND.copy
    # 10 layers of Q and K in 6 blocks of 256 rows, of V and O; 11 of up and down.
    products = 10 * (6 * (3 * 256**2 * 768 + 256**3) + 2 * 4 * 768**3) + 22 * (3 * 768**2 * 3072 + 768**3)
    assert floors.optimizer(step, HAND) == pytest.approx(by_bytes + 1e3 * 5 * products / HAND.bf16, rel=0.01)


def test_other_recipes_have_the_groups_they_use():
    assert {"fp8 products", "fused MLP", "composed attention"}.isdisjoint(
        floors.floors_ms(lane(load_recipe("gpt2"), 0), HAND)
    )
    found = floors.floors_ms(lane(load_recipe("sub3"), 0), HAND)
    assert found["fp8 products"] == floors.head_products(lane(load_recipe("sub3"), 0), HAND)["fp8"]
    tied = lane(load_recipe("gpt2"), 0)
    assert floors.bf16_products(tied, HAND) == pytest.approx(
        floors.projections(tied, HAND)
        + sum(floors.mlp_products(tied, HAND).values())
        + floors.head_products(tied, HAND)["bf16"]
    )


def test_ceilings_of_a_device():
    found = floors.ceilings_of("NVIDIA H200")
    assert (found.bf16, found.fp8, found.copy) == (790e12, 1500e12, 4.24e12)
    assert floors.ceilings_of("NVIDIA GeForce RTX 4090") is None


def test_all_products_in_one_line():
    (line,) = floors.products_line({"fp8 products": 2.0, "fused MLP": 1.0, "fills": 9.0}, {"bf16 products": 1.5})
    assert line.endswith("3.000 ms, floor 1.500, ratio 2.00")
    assert not list(floors.products_line({"fills": 1.0}, {}))
