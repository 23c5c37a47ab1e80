"""Dotted overrides, JSON both ways, and the difference of two configurations.

Works on any tree of frozen dataclasses by their type hints. It is strict: an unknown key names the nearest known
one, and a value of the wrong type says what was expected.
"""

import difflib
import functools
import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

KIND = "kind"  # names the class of a value where several could stand
_TERM = {"source", "weight"}  # the fields of a `Term`


_hints = functools.cache(get_type_hints)  # which evaluates the text of every annotation anew


def to_dict(config: Any, hashed_only: bool = False) -> Any:
    """Plain dicts, lists and scalars, ready for JSON.

    `hashed_only` leaves out fields marked hashed=False and those at their default, so that a switch added later does
    not change the hash of what came before it.
    """
    return _plain(config, type(config), hashed_only)


def _plain(value: Any, hint: Any, hashed_only: bool) -> Any:
    """`to_dict` of a value whose type is declared as `hint`, which tells whether its class must be named."""
    if is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        out = {KIND: type(value).__name__} if names_class(hint) else {}
        for f in fields(value):
            item = getattr(value, f.name)
            if hashed_only and (not f.metadata.get("hashed", True) or item == f.default):
                continue
            out[f.name] = _plain(item, hints[f.name], hashed_only)
        return out
    if isinstance(value, tuple | list):
        return [_plain(item, item_hint(hint, i), hashed_only) for i, item in enumerate(value)]
    return value


def names_class(hint: Any) -> bool:
    """Whether values of several classes can stand where `hint` is declared, so that JSON must say which."""
    return len(_classes_in(hint)) > 1


def from_dict(cls: Any, data: Any, path: str = "") -> Any:
    """The inverse of `to_dict`. Raises ValueError for unknown or missing keys and wrong types."""
    return _convert(cls, data, path)


def parse_overrides(items: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Split `key=value` words. Raises ValueError for a word without "=" or a key given twice."""
    overrides: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(f"override {item!r} is not of the form key.sub=value")
        if key in overrides:
            raise ValueError(f"override {key!r} is given twice")
        overrides[key] = value
    return overrides


def apply_overrides(config: Any, overrides: Mapping[str, Any]) -> Any:
    """A copy of `config` with each dotted key set; values are typed, or text to be read as the field's type."""
    for key, value in overrides.items():
        config = _set(config, type(config), key.split("."), value, key)
    return config


def diff(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Every dotted key at which two `to_dict` trees differ, with both values; a missing side is None.

    Lists of groups are compared by role, lists of objects and other lists of equal length item by item. Sums of
    sources, and values of different classes, are compared as a whole.
    """
    if old == new:
        return []
    if _is_sum(old) or _is_sum(new):
        return [(path, old, new)]
    if _has_roles(old) and _has_roles(new):
        old, new = ({item["role"]: item for item in side} for side in (old, new))
    if isinstance(old, dict) and isinstance(new, dict) and old.get(KIND) == new.get(KIND):
        keys = list(old) + [k for k in new if k not in old]
        return [row for k in keys for row in diff(old.get(k), new.get(k), f"{path}.{k}" if path else str(k))]
    if isinstance(old, list) and isinstance(new, list) and (len(old) == len(new) or _are_objects(old + new)):
        return [row for i, (a, b) in enumerate(zip_longest(old, new)) for row in diff(a, b, f"{path}.{i}")]
    return [(path, old, new)]


def diff_lines(old: Any, new: Any) -> list[str]:
    """`diff` as lines "key: old -> new", the same change in several items of a list on one line."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for path, before, after in diff(old, new):
        head, index, tail = _split_index(path)
        places.setdefault((head + "{}" + tail, _text(before), _text(after)), []).append(index)
    return [f"{key.format(_spans(indices))}: {before} -> {after}" for (key, before, after), indices in places.items()]


def _has_roles(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "role" in v for v in value)


def _are_objects(values: list[Any]) -> bool:
    return all(isinstance(v, dict) for v in values)


def _is_sum(value: Any) -> bool:
    """Whether a plain value is a tuple of `Term`."""
    return isinstance(value, list) and bool(value) and _are_objects(value) and all(v.keys() <= _TERM for v in value)


def _text(value: Any) -> str:
    """JSON, but sums as formulas."""
    return " + ".join(map(_product_text, value)) if _is_sum(value) else json.dumps(value)


def _product_text(term: dict[str, Any]) -> str:
    """ "skip[1.0]*down5": a learned number of role skip that starts at 1, times a source."""
    weight = _weight_text(term.get("weight", {}))
    return f"{weight}*{term['source']}" if weight else str(term["source"])


def _weight_text(weight: dict[str, Any]) -> str:
    kind = weight.get(KIND, "Fixed")
    if kind == "Fixed":
        return "" if weight.get("value", 1) == 1 else f"{weight['value']:.6g}"
    if kind == "Product":
        return "*".join(filter(None, map(_weight_text, weight["factors"])))
    if kind == "Gate":
        reads = ", ".join(f"{read['source']}:{read['dims']}" for read in weight["reads"])
        return f"{weight.get('scale', 1)}*gate.{weight['role']}({reads})"
    start = f"[{weight.get('init', 0):.6g}]"
    if kind == "Column":
        width = weight.get("width")
        return f"net.{weight['net']}{start}" + (f"x{width}" if width else "")
    number = f"{weight['role']}{start}"
    return f"sigmoid({number})" if weight.get("sigmoid") else number


def _split_index(path: str) -> tuple[str, int, str]:
    """("model.layers.", 3, ".tap") of "model.layers.3.tap"; (path, -1, "") where there is no number in it."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i]) + ".", int(part), "".join(f".{p}" for p in parts[i + 1 :])
    return path, -1, ""


def _spans(indices: list[int]) -> str:
    """ "0-5,7" of [0, 1, 2, 3, 4, 5, 7]; nothing for a path without a number."""
    if indices == [-1]:
        return ""
    spans: list[list[int]] = []
    for i in sorted(indices):
        if spans and spans[-1][1] == i - 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def known_keys(config: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a configuration that holds a value."""
    if is_dataclass(config) and not isinstance(config, type):
        return [key for f in fields(config) for key in known_keys(getattr(config, f.name), f"{prefix}{f.name}.")]
    if isinstance(config, tuple):
        inner = [key for i, value in enumerate(config) for key in known_keys(value, f"{prefix}{i}.")]
        return inner or [prefix[:-1]]
    return [prefix[:-1]]


def unknown_key(key: str, known: list[str]) -> ValueError:
    """The error for a key that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return ValueError(f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def read_value(hint: Any, value: Any, key: str) -> Any:
    """`value`, which may be text from a command line, as the type `hint`; `key` names it in the ValueError."""
    return _convert(hint, _read(value), key)


def _set(config: Any, hint: Any, keys: list[str], value: Any, full: str) -> Any:
    if not keys:
        return read_value(hint, value, full)
    key, rest = keys[0], keys[1:]
    if is_dataclass(config) and not isinstance(config, type):
        hints = _hints(type(config))
        if key in hints:
            return replace(config, **{key: _set(getattr(config, key), hints[key], rest, value, full)})
    if isinstance(config, tuple) and key.isdigit() and int(key) < len(config):
        i = int(key)
        return (*config[:i], _set(config[i], item_hint(hint, i), rest, value, full), *config[i + 1 :])
    stem = full.split(".")[: len(full.split(".")) - len(keys)]
    known = known_keys(config, "".join(f"{s}." for s in stem))
    raise unknown_key(full, known)


def _read(value: Any) -> Any:
    """Text from a command line as JSON where it is JSON, else as it stands."""
    if not isinstance(value, str):
        return value
    lowered = value.strip().lower()
    words = {"none": None, "null": None, "true": True, "false": False, "on": True, "off": False}
    if lowered in words and lowered not in ("on", "off"):
        return words[lowered]
    try:
        return json.loads(value.replace("_", "") if value.replace("_", "").lstrip("+-").isdigit() else value)
    except json.JSONDecodeError:
        return value


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, path)
    if origin is Literal:
        return _convert_literal(hint, value, path)
    if origin is tuple:
        return _convert_tuple(hint, value, path)
    if is_dataclass(hint):
        return _convert_dataclass(hint, value, path)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is bool and value in ("on", "off"):
        return value == "on"
    if hint is str and isinstance(value, int | float | bool):
        return str(value)
    if hint is type(None) and value is None:
        return None
    if hint is Any or (
        isinstance(hint, type) and isinstance(value, hint) and (hint is bool) == isinstance(value, bool)
    ):
        return value
    raise _wrong(path, value, _describe(hint))


def _convert_union(hint: Any, value: Any, path: str) -> Any:
    options = get_args(hint)
    if value is None and type(None) in options:
        return None
    classes = _classes_in(hint)
    if isinstance(value, dict) and len(classes) > 1:
        by_name = {cls.__name__: cls for cls in classes}
        if value.get(KIND) not in by_name:
            raise _wrong(f"{path}.{KIND}", value.get(KIND), "one of " + ", ".join(sorted(by_name)))
        return _convert(by_name[value[KIND]], {k: v for k, v in value.items() if k != KIND}, path)
    for option in options:
        try:
            return _convert(option, value, path)
        except ValueError:
            if isinstance(value, dict) and is_dataclass(option):
                raise
    raise _wrong(path, value, _describe(hint))


def _convert_literal(hint: Any, value: Any, path: str) -> Any:
    if value is None and "none" in get_args(hint):  # the word, read from a command line
        return "none"
    for choice in get_args(hint):
        if value == choice and type(value) is type(choice):
            return choice
    near = difflib.get_close_matches(str(value), [str(c) for c in get_args(hint)], n=1)
    suffix = f" (did you mean {near[0]!r}?)" if near else ""
    raise _wrong(path, value, _describe(hint) + suffix)


def _convert_tuple(hint: Any, value: Any, path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong(path, value, "a list such as [1, 2]")
    args = get_args(hint)
    if args[-1] is not Ellipsis and len(args) != len(value):
        raise _wrong(path, value, f"a list of {len(args)} values")
    return tuple(_convert(item_hint(hint, i), v, f"{path}.{i}") for i, v in enumerate(value))


def _convert_dataclass(cls: Any, value: Any, path: str) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, dict):
        raise _wrong(path, value, f"a {cls.__name__} as a JSON object")
    hints = _hints(cls)
    for key in value:
        if key not in hints:
            raise unknown_key(f"{path}.{key}" if path else key, [f"{path}.{k}" if path else k for k in hints])
    try:
        return cls(**{k: _convert(hints[k], v, f"{path}.{k}" if path else k) for k, v in value.items()})
    except TypeError as error:
        raise ValueError(f"{path or cls.__name__}: {error}") from None


def item_hint(hint: Any, i: int) -> Any:
    """What the `i`-th item of a tuple declared as `hint` is declared as; Any where that is not said."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(o for o in get_args(hint) if get_origin(o) is tuple)
    args = get_args(hint) or (Any, ...)
    return args[0] if args[-1] is Ellipsis else args[i]


def _classes_in(hint: Any) -> list[Any]:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [o for o in options if is_dataclass(o)]


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _wrong(path: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{path}={value!r}: expected {expected}")
