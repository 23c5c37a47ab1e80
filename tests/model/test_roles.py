"""Every parameter has a role, every role a group, and the longest match wins."""

import pytest
import torch
from torch import nn

from nanosprint.config import AdamConfig, ParamGroup
from nanosprint.config.groups import match_group
from nanosprint.model.gpt import GPT
from nanosprint.model.roles import collect_roles
from nanosprint.recipes import all_recipes, load_recipe


@pytest.mark.parametrize("name", list(all_recipes()))
def test_every_parameter_of_every_recipe_is_covered(name):
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = GPT(recipe.model)
    roles = collect_roles(model)
    assert roles.keys() == dict(model.named_parameters()).keys()
    for role in roles.values():
        match_group(role.name, recipe.groups)


def test_gpt2_decays_tensors_of_two_axes_only():
    recipe = load_recipe("gpt2")
    with torch.device("meta"):
        model = GPT(recipe.model)
    for name, role in collect_roles(model).items():
        decay = match_group(role.name, recipe.groups).weight_decay
        assert decay == (0.1 if model.get_parameter(name).ndim > 1 else 0.0), name


def test_longest_prefix_wins_and_respects_dots():
    short, long, other = (ParamGroup(role=r, rule=AdamConfig(), lr=1.0) for r in ("gate", "gate.smear", "ga"))
    groups = (short, other, long)
    assert match_group("gate.smear", groups) is long
    assert match_group("gate.smear.weight", groups) is long
    assert match_group("gate.smeared", groups) is short
    assert match_group("ga.x", groups) is other
    with pytest.raises(
        ValueError, match=r"no group for parameters of role 'gates': the recipe has groups for gate, ga"
    ):
        match_group("gates", groups)


def test_a_parameter_without_a_role_is_named():
    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    with pytest.raises(ValueError, match=r"Loose declares no role for its parameter 'weight'"):
        collect_roles(nn.Sequential(Loose()))
