"""Whole steps in which look-ups add their gradients to the banks' rows, against steps in which autograd adds tables."""

import torch

from nanosprint.config import Execution
from nanosprint.model import gpt
from nanosprint.model.techniques import bigram
from nanosprint.ops.embedding import sort_rows
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import ModelStage, random_input
from nanosprint.training.setup import build_state
from nanosprint.training.step import backward_of, train_step
from tests.recipes.test_ladder import small

CPU = torch.device("cpu")


def test_rows_added_in_place_train_the_same_weights_bit_for_bit(monkeypatch):
    """The record's three tables in bf16, sorted as on a GPU: ties, turns of two steps, two micro-batches a step."""
    for module in (gpt, bigram):
        monkeypatch.setattr(module, "rows_of", sort_rows)
    recipe = load_recipe("record", small("record", **{"train.num_steps": 7}))
    execution = Execution(device="cpu", compute="fp32", attention="sdpa", compile="off", fp8="off")
    results = []
    for in_place in (True, False):
        state = build_state(recipe, execution, 0, CPU)
        tables = (state.model.embed, state.model.bigram, state.model.value_tables)
        assert all(table.in_place and table.weight.dtype == torch.bfloat16 for table in tables)
        for table in tables:
            table.in_place = in_place
        backward, stage = backward_of(state.model.loss_sum), ModelStage(state.model)
        for step in range(recipe.train.num_steps):
            plan = recipe.plan(step)
            rows, scale = plan.batch_tokens // plan.seq_len // 2, stage.enter(plan)
            inputs = [random_input(recipe, plan, rows, CPU, scale, seed=2 * step + i) for i in range(2)]
            train_step(backward, state, inputs, plan, recipe.train)
        results.append([table.weight.detach() for table in tables])
    assert all(map(torch.equal, *results))
