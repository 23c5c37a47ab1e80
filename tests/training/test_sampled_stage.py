"""Stages whose softmax has a part of the vocabulary."""

import json

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.config.edit import to_dict
from nanosprint.errors import DivergedError
from nanosprint.recipes import load_recipe
from nanosprint.results.record import RunRecord
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state
from nanosprint.training.warmup import graph_of
from tests.training.test_batch import STAGED, STAGES


def staged(**sampled):
    stages = to_dict(STAGES)
    for key, value in sampled.items():
        stages["stages"][int(key[1:])]["loss"]["sampled"] = value
    return (*STAGED[:3], "schedule.stages=" + json.dumps(stages), *STAGED[4:])


def test_a_stage_trains_with_a_part(train_tiny):
    """And the next with all; the validation is whole in any case."""
    plain, sampled = train_tiny("plain", *staged()), train_tiny("sampled", *staged(s0=160))
    one, two = RunRecord.load(plain).val_loss, RunRecord.load(sampled).val_loss
    assert one != two
    assert two == pytest.approx(one, abs=0.3)


def test_random_tokens_leave_room_for_a_rest():
    """With more labels than columns every loss of a warm-up or a benchmark would be NaN."""
    recipe = load_recipe("tiny", staged(s0=16))
    device = torch.device("cpu")
    state = build_state(recipe, resolve(Execution(device="cpu"), recipe, World(0, 1, device)), 0, device)
    given = random_input(recipe, recipe.plan(0), 4, device)
    assert given.context.loss.sampled == 16
    assert given.targets.unique().numel() == 10
    assert state.model.loss_sum(*given).isfinite()
    assert random_input(recipe, recipe.plan(19), 4, device).targets.max() > 16


def test_too_few_columns_are_named(train_tiny):
    with pytest.raises(DivergedError, match=r"became nan at step 1: .*raise schedule.stages' loss.sampled \(now 16\)"):
        train_tiny("run", *staged(s0=16))


def test_bad_numbers():
    for value, said in ((100, "positive multiple of 16"), (0, "positive multiple of 16"), (4096, "model.vocab_size=")):
        with pytest.raises(ValueError, match=said):
            load_recipe("tiny", staged(s0=value))


def test_a_graph_of_its_own():
    """Steps that differ in the part alone, which is a constant of their graphs."""
    execution = Execution(attention="fa2", compile="default", tokens_per_microbatch=1 << 20, parts_per_microbatch=1)
    plans = [load_recipe("tiny", staged(**choice)).plan(0) for choice in ({}, {"s0": 160}, {"s0": 176})]
    assert len({graph_of(plan, execution) for plan in plans}) == 3
