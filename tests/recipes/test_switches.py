"""Switches: each takes something out of some recipe, says why where it cannot, and leaves a recipe that trains."""

from functools import cache

import pytest
import torch
from test_ladder import small

from nanosprint.config import AdamConfig, Execution, MuonConfig
from nanosprint.config.edit import diff_lines, to_dict
from nanosprint.recipes import all_recipes, load_recipe
from nanosprint.recipes.switches import SWITCHES, one_out, without
from nanosprint.training.distributed import World
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state
from nanosprint.training.warmup import warm_up

IN_NO_RECIPE = {
    "precision.fp8_projections": "{}",
    "model.bigram.orders": "[2, 3]",
    "model.bigram.longer_rows": 500,
    "groups.2.gradient": "last",
}


@cache
def variants(name):
    return one_out(load_recipe(name))


@cache
def variants_of_all():
    return one_out(load_recipe("record", IN_NO_RECIPE))


def changes(name, switch):
    """What a switch changes in a recipe, as lines."""
    return diff_lines(to_dict(load_recipe(name)), to_dict(without(load_recipe(name), switch)))


def test_every_switch_takes_something_out_of_some_recipe():
    found = {name: variants(name) for name in all_recipes()}
    assert set().union(variants_of_all()[0], *(made for made, _ in found.values())) == set(SWITCHES)
    for recipe, (made, left_out) in found.items():
        assert not made.keys() & left_out.keys()
        assert len(made) + len(left_out) == len(SWITCHES)
        assert len({*made.values(), load_recipe(recipe)}) == len(made) + 1
        assert all(f"recipe {recipe!r}" in reason for reason in left_out.values())


def trains(name, switch, **more):
    """A step of every kind with its update, at reduced size."""
    recipe = without(load_recipe(name, {**small(name), **more}), switch)
    execution = resolve(Execution(device="cpu", compile="off"), recipe, World(0, 1, torch.device("cpu")))
    state = build_state(recipe, execution, 1, torch.device("cpu"))
    before, after = state.snapshot()["model"], {}
    state.put_back = lambda _: after.update(state.snapshot()["model"])  # looked at instead
    warm_up(state, state.model.loss_sum, recipe, execution)
    assert all(value.isfinite().all() for value in after.values() if value.is_floating_point())
    unmoved = [name for name, _ in state.model.named_parameters() if torch.equal(before[name], after[name])]
    assert not unmoved or (recipe.model.init.head == "zero" and "head.weight" not in unmoved)  # which moves first


@pytest.mark.parametrize("switch", sorted(variants("sub3")[0]))
def test_sub3_trains_without_each(switch):
    trains("sub3", switch)


@pytest.mark.parametrize("switch", sorted(variants_of_all()[0]))
def test_the_record_trains_without_each(switch):
    trains("record", switch, **({} if switch in variants("record")[0] else IN_NO_RECIPE))


def test_what_a_switch_changes():
    assert changes("sub3", "fp8_head") == [
        'precision.fp8_head: {"x": 0.5, "weight": 0.001953125, "gradient": 0.002232142857142857} -> null'
    ]
    assert all("table" in line for line in changes("sub3", "value_tables"))
    assert [line for line in changes("sub3", "skips") if "model.layers" not in line] == []
    assert changes("modern", "qk_norm") == ["model.qk_norm: true -> false"]
    assert "schedule.stages.stages.0.loss.tokens: [1.0, 0.5, 0.25] -> [1.0]" in changes("record", "mtp")
    without_mudd = without(load_recipe("record"), "dynamic_weights").model
    assert {net.name for net in without_mudd.nets} == {"pre", "post"}  # still ask for xsa, gates of heads and compose


def test_a_batch_that_does_not_grow_has_as_many_tokens():
    old, new = load_recipe("record"), without(load_recipe("record"), "growing_batch")
    assert set(new.batches().values()) == {262_144} == {new.train.batch_tokens}
    extension = old.schedule.stages.extension_steps * (393_216 - 262_144)
    assert old.tokens - new.tokens == pytest.approx(extension, abs=262_144)
    with pytest.raises(ValueError, match="it has no such technique"):
        without(load_recipe("normuon"), "growing_batch")


def test_decay_that_is_no_longer_cautious_is_as_strong_at_the_full_rate():
    old, new = load_recipe("record"), without(load_recipe("record"), "cautious_decay")
    for before, after in zip(old.groups, new.groups, strict=True):
        assert after.rule.decay == "plain"
        assert after.lr * after.weight_decay == pytest.approx(before.lr**2 * before.weight_decay)


def test_without_muon_the_others_stay():
    recipe = without(load_recipe("record"), "muon")
    assert not any(isinstance(group.rule, MuonConfig) for group in recipe.groups)
    kept = [group for group in load_recipe("record").groups if isinstance(group.rule, AdamConfig)]
    assert [group for group in recipe.groups if group in kept] == kept


def test_senseless_switches_are_refused():
    with pytest.raises(ValueError, match=r"unknown switch 'rotery': did you mean 'rotary'\?"):
        without(load_recipe("sub3"), "rotery")
    with pytest.raises(ValueError, match=r"switch 'xsa' changes nothing in recipe 'sub3': it has no such technique"):
        without(load_recipe("sub3"), "xsa")
