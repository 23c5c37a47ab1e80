"""Races of tiny runs, carried out in this process where the process is not what is tested."""

import pytest
from races import train_here

from nanosprint.config import Execution
from nanosprint.evidence.jobs import Runner
from nanosprint.evidence.series import plan_race
from nanosprint.recipes import load_recipe


@pytest.fixture
def in_process(monkeypatch):
    """Runs without processes of their own; the folders' names in the order in which they were begun."""
    begun = []
    monkeypatch.setattr(Runner, "train", train_here(begun))
    return begun


@pytest.fixture
def plan(tiny_data):
    """plan({"name": ("key=value", ...)}, runs=...): a race between variants of the tiny recipe."""

    def make(variants, *, runs=2, first_seed=5, **options):
        recipes = {name: load_recipe("tiny", words) for name, words in variants.items()}
        execution = Execution(device="cpu")
        return plan_race(recipes, runs=runs, first_seed=first_seed, execution=execution, data=str(tiny_data), **options)

    return make
