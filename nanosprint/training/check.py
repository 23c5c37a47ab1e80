"""`nanosprint check`: everything about a recipe that can be found out without data, a GPU or time."""

import torch

from nanosprint.config.recipe import Recipe
from nanosprint.model.gpt import GPT
from nanosprint.training.batch import ModelStage, random_input
from nanosprint.training.state import build_engine


def check_recipe(recipe: Recipe) -> str:
    """One line about a recipe that is sound: built, its step traced on the meta device, every parameter in a group.

    Raises ValueError naming what is wrong.
    """
    recipe.validate()
    plan = recipe.plan(0)
    rows = plan.batch_tokens // recipe.train.lanes // plan.seq_len
    with torch.device("meta"):
        model = GPT(recipe.model)
    attn_scale = ModelStage(model).enter(plan)
    model.loss_sum(*random_input(recipe, plan, rows, torch.device("meta"), attn_scale)).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise ValueError(f"recipe {recipe.name!r}: no gradient reaches {', '.join(missing)}")
    build_engine(model, recipe)
    flops = model.flops_per_token(plan.seq_len, recipe.plan(recipe.train.num_steps // 2).windows)
    return (
        f"{recipe.name}: ok  {model.num_parameters():,} parameters, {recipe.train.num_steps:,} steps, "
        f"{recipe.tokens:,} tokens, {flops / 1e6:,.1f} MFLOP a token, hash {recipe.hash}"
    )
