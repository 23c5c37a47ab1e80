"""Complete runs by name. A recipe is a function from a few dials to a `Recipe`; a child edits its parent's result.

`load_recipe("gpt2", {"model.num_layers": 2})` hands the dials to the function first, so that whatever follows from
them (layers, heads, step counts) follows; what is left of the overrides is then set on the finished recipe.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nanosprint.config.edit import apply_overrides, known_keys, parse_overrides, read_value, to_dict, unknown_key
from nanosprint.config.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Dials:
    """The numbers a recipe is built from; each is reached by the key of the field it ends up in."""

    dim: int = field(metadata={"key": "model.dim"})
    num_heads: int = field(metadata={"key": "model.num_heads"})
    num_layers: int = field(metadata={"key": "model.num_layers"})
    vocab_size: int = field(metadata={"key": "model.vocab_size"})
    seq_len: int = field(metadata={"key": "model.seq_len"})
    batch_tokens: int = field(metadata={"key": "train.batch_tokens"})
    lanes: int = field(default=8, metadata={"key": "train.lanes"})


DIAL_KEYS = {f.metadata["key"]: f.name for f in fields(Dials)}
NUM_STEPS_KEY = "train.num_steps"  # not a dial: it stretches the finished recipe's schedule in proportion


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered recipe: `build(dials)`, or `build(parent_recipe, dials)` where it has a parent."""

    name: str
    summary: str
    parent: str | None
    dials: dict[str, Any]
    build: Callable[..., Recipe]


_REGISTRY: dict[str, Entry] = {}


def recipe(
    name: str, *, summary: str, parent: str | None = None, **dials: Any
) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """Register a recipe function under `name`; a child inherits its parent's dials and changes those given."""

    def register(build: Callable[..., Recipe]) -> Callable[..., Recipe]:
        assert name not in _REGISTRY, f"recipe {name!r} is registered twice"
        _REGISTRY[name] = Entry(name=name, summary=summary, parent=parent, dials=dials, build=build)
        return build

    return register


def all_recipes() -> dict[str, Entry]:
    """Every recipe by name, in order of the modules' names and of registration within them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(_REGISTRY)


def load_recipe(name: str, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Recipe:
    """The recipe `name` with overrides (a mapping, or words "key.sub=value"), validated.

    Raises ValueError for an unknown name or key, a value of the wrong type, or values that contradict each other.
    """
    entries = all_recipes()
    if name not in entries:
        raise unknown_recipe(name, entries)
    todo: dict[str, Any] = dict(overrides) if isinstance(overrides, Mapping) else parse_overrides(tuple(overrides))
    dials = _default_dials(entries, name)
    for key in [k for k in todo if k in DIAL_KEYS]:
        dials = replace(dials, **{DIAL_KEYS[key]: read_value(int, todo.pop(key), key)})
    built = _build(entries, name, dials)
    if NUM_STEPS_KEY in todo:
        built = built.with_num_steps(read_value(int, todo.pop(NUM_STEPS_KEY), NUM_STEPS_KEY))
    try:
        return apply_overrides(built, todo).validate()
    except ValueError as error:
        if str(error).startswith("unknown key"):  # name the nearest among the dials too
            bad = next((k for k in todo if repr(k) in str(error)), None)
            if bad is not None:
                raise unknown_key(bad, [*DIAL_KEYS, *known_keys(built)]) from None
        raise


def unknown_recipe(name: str, entries: Mapping[str, Entry]) -> ValueError:
    """The error for a recipe that does not exist, with the nearest that does."""
    error = unknown_key(name, list(entries))
    return ValueError(str(error).replace("key", "recipe", 1) + f" (known: {', '.join(entries)})")


def _default_dials(entries: Mapping[str, Entry], name: str) -> Dials:
    entry = entries[name]
    if entry.parent is None:
        return Dials(**entry.dials)
    return replace(_default_dials(entries, entry.parent), **entry.dials)


def _build(entries: Mapping[str, Entry], name: str, dials: Dials) -> Recipe:
    entry = entries[name]
    if entry.parent is None:
        return entry.build(dials)
    return entry.build(_build(entries, entry.parent, dials), dials)


def base_of(recipe: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """What a recorded recipe is compared with, by name and as a dict: its parent, or else the recipe of its name.

    None where no recipe of its name is registered.
    """
    entry = all_recipes().get(str(recipe.get("name")))
    if entry is None:
        return None
    base = entry.parent or entry.name
    return base, to_dict(load_recipe(base))
