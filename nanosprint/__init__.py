"""nanosprint: train GPT-2-class language models to a target loss in the least wall-clock time, and prove it.

The public face. Names are imported when they are first used, so that `import nanosprint` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanosprint import optim
    from nanosprint.config.recipe import Execution, Recipe
    from nanosprint.model.gpt import GPT
    from nanosprint.recipes import load_recipe
    from nanosprint.results.record import RunRecord
    from nanosprint.training.api import train

__all__ = ["GPT", "Execution", "Recipe", "RunRecord", "load_recipe", "optim", "train"]

_HOMES = {
    "GPT": "nanosprint.model.gpt",
    "Execution": "nanosprint.config.recipe",
    "Recipe": "nanosprint.config.recipe",
    "RunRecord": "nanosprint.results.record",
    "load_recipe": "nanosprint.recipes",
    "train": "nanosprint.training.api",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("nanosprint.optim")
    if name not in _HOMES:
        raise AttributeError(f"module 'nanosprint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
