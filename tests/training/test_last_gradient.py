"""A head whose gradient is made on the steps that update it alone."""

import pytest
import torch

from nanosprint.config import Execution
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state
from nanosprint.training.step import backward_of, train_step
from tests.training.test_batch import STAGED

CPU = torch.device("cpu")
LAST = ("precision.compute=fp64", "groups.2.every=2", "groups.2.gradient=last")
CASES = {"next token": (), "stages": STAGED}


def inputs_of(recipe, plan):
    """Two micro-batches."""
    return [random_input(recipe, plan, 2, CPU, seed=10 * plan.step + i) for i in range(2)]


def trained(words, steps):
    """The recipe, the state after so many steps, and the head's gradient before each update."""
    recipe = load_recipe("tiny", words)
    state = build_state(recipe, resolve(Execution(device="cpu"), recipe, World(0, 1, CPU)), 0, CPU)
    seen, update = [], state.engine.step

    def step(*args):
        seen.append(state.model.head.weight.grad.clone())
        update(*args)

    state.engine.step = step
    for plan in map(recipe.plan, range(steps)):
        train_step(backward_of(state.model.loss_sum), state, inputs_of(recipe, plan), plan, recipe.train)
    return recipe, state, seen


@pytest.mark.parametrize("case", CASES)
def test_it_is_that_of_the_last_step_and_counts_for_all(case):
    """Against autograd of the second step's loss, by the weights that the first step has left."""
    words = (*CASES[case], *LAST)
    _, _, seen = trained(words, 2)
    recipe, state, _ = trained(words, 1)
    second = inputs_of(recipe, recipe.plan(1))
    plain = (x._replace(context=x.context._replace(head_counts=None)) for x in second)
    divisor = recipe.train.lanes if recipe.train.objective == "lane_mean" else recipe.plan(1).batch_tokens
    loss = sum(state.model.loss_sum(*x) for x in plain) / divisor
    (expected,) = torch.autograd.grad(loss, state.model.head.weight)
    assert not seen[0].any()
    torch.testing.assert_close(seen[1], 2 * expected)


def test_nothing_else_changes():
    """The first step's other weights are those of a head that adds its gradients up."""
    _, last, _ = trained(LAST, 1)
    _, added, seen = trained(LAST[:2], 1)
    assert seen[0].any()
    for (name, one), two in zip(last.model.named_parameters(), added.model.parameters(), strict=True):
        assert torch.equal(one, two), name
