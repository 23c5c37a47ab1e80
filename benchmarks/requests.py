"""Runs as the benchmarks ask for them: a recipe with overrides, those of its execution among them."""

from nanosprint.config import Execution
from nanosprint.config.edit import apply_overrides
from nanosprint.recipes import load_recipe
from nanosprint.training.request import RunRequest, timestamp


def request_of(recipe: str, words: dict[str, str], seed: int, data: str | None) -> RunRequest:
    """The run of a recipe with overrides; those of `exec.` are for its execution."""
    execution = {key.removeprefix("exec."): value for key, value in words.items() if key.startswith("exec.")}
    return RunRequest(
        recipe=load_recipe(recipe, {key: value for key, value in words.items() if not key.startswith("exec.")}),
        execution=apply_overrides(Execution(), execution),
        seed=seed,
        data=data,
        created=timestamp(),
    )
