"""What every recipe is, written down: an edit to a default or to a parent shows here which recipes it moves.

`golden/<recipe>.json` holds the recipe's hash and every value that differs from the default of its dataclass, or has
none; `golden/defaults.json` holds those defaults. The hash leaves defaults out, so a changed default keeps every hash
and yet changes the mathematics: that is what the second kind of golden is for.

After a change that was meant:  python tests/recipes/test_golden.py
"""

import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nanosprint import config
from nanosprint.config.edit import KIND, diff, item_hint, names_class, to_dict
from nanosprint.recipes import all_recipes, load_recipe

GOLDEN = Path(__file__).parent / "golden"
DEFAULTS = "defaults"
UPDATE = "if that was meant: python tests/recipes/test_golden.py"


def deviations(value: Any, hint: Any = Any) -> Any:
    """`value` as plain JSON, without the fields that are at their default; equal neighbours in a list are counted."""
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        out: dict[str, Any] = {KIND: type(value).__name__} if names_class(hint) else {}
        for f in fields(value):
            item = getattr(value, f.name)
            if f.default is MISSING or item != f.default:
                out[f.name] = deviations(item, hints[f.name])
        return out
    if isinstance(value, tuple):
        runs = [(item, len(list(run))) for item, run in groupby(value)]
        plain = [(deviations(item, item_hint(hint, 0)), n) for item, n in runs]
        return [item if n == 1 else {"times": n, "each": item} for item, n in plain]
    return value


def recipe_golden(name: str) -> dict[str, Any]:
    recipe = load_recipe(name)
    return {"hash": recipe.hash, **deviations(recipe)}


def defaults_golden() -> dict[str, Any]:
    """The default of every field of every configuration class that has one."""
    classes = [getattr(config, name) for name in sorted(config.__all__)]
    return {
        cls.__name__: {f.name: to_dict(f.default) for f in fields(cls) if f.default is not MISSING} for cls in classes
    }


def current() -> dict[str, dict[str, Any]]:
    """Every golden by its file's stem, as the code has it now."""
    return {DEFAULTS: defaults_golden(), **{name: recipe_golden(name) for name in all_recipes()}}


def stored() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in GOLDEN.glob("*.json")}


def write() -> list[str]:
    """Bring the folder up to date; the names that changed."""
    before, now = stored(), current()
    GOLDEN.mkdir(exist_ok=True)
    for name in before.keys() - now.keys():
        (GOLDEN / f"{name}.json").unlink()
    for name, value in now.items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


@pytest.mark.parametrize("name", [DEFAULTS, *all_recipes()])
def test_golden(name):
    path = GOLDEN / f"{name}.json"
    assert path.exists(), f"{name} has no golden yet: python tests/recipes/test_golden.py"
    now = defaults_golden() if name == DEFAULTS else recipe_golden(name)
    now = json.loads(json.dumps(now))  # tuples become lists
    moved = [f"  {key}: {old!r} -> {new!r}" for key, old, new in diff(json.loads(path.read_text("utf-8")), now)]
    assert not moved, "\n".join([f"{name} moved; {UPDATE}", *moved])


def test_no_golden_without_a_recipe():
    stale = stored().keys() - {DEFAULTS, *all_recipes()}
    assert not stale, f"{sorted(stale)} are not recipes any more; {UPDATE}"


def test_a_golden_says_what_is_not_default():
    """The form itself, on values that this test knows."""
    layer = config.LayerSpec(mixer=None, mlp=config.MLPSpec(hidden=8))
    assert deviations(layer) == {"mixer": None, "mlp": {"hidden": 8}}
    assert deviations((layer, layer, 3)) == [{"times": 2, "each": deviations(layer)}, 3]
    group = config.ParamGroup(role="head", rule=config.AdamConfig(eps=1e-10), lr=0.1)
    assert deviations(group) == {"role": "head", "rule": {"kind": "AdamConfig", "eps": 1e-10}, "lr": 0.1}


if __name__ == "__main__":
    print("changed:", ", ".join(write()) or "nothing", file=sys.stderr)
