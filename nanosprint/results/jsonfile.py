"""Reading and writing the JSON files of a run: errors name the file and the place, newer schemas are refused."""

import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from nanosprint.config.edit import from_dict, to_dict
from nanosprint.errors import UserError
from nanosprint.files import atomic_write

T = TypeVar("T")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError naming the file, and the line and column of damage."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged at byte {error.start}: not UTF-8 text") from None
    return parse_object(text, str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object from text; `where` names its origin in the ValueError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{where} is damaged at {place}: {error.msg}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is damaged: expected a JSON object, found {type(value).__name__}")
    return value


def dump(value: Any, where: str) -> str:
    """A dataclass or dict as indented JSON. Raises ValueError where a number is not finite, which JSON cannot say."""
    plain = to_dict(value)
    for key, number in _numbers(plain):
        if not math.isfinite(number):
            raise ValueError(f"{where}: {key}={number} is not finite, which JSON cannot say: give None instead")
    return json.dumps(plain, indent=2, allow_nan=False) + "\n"


def write(path: Path, value: Any) -> None:
    """Write a dataclass or dict as indented JSON, atomically."""
    atomic_write(path, dump(value, path.name))


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every float of a tree with its dotted key."""
    if isinstance(value, float):
        yield key, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, item in items:
        yield from _numbers(item, f"{key}.{name}" if key else str(name))


def build(cls: type[T], data: dict[str, Any], *, schema: int, where: str) -> T:
    """A dataclass with a `schema` field from a JSON object.

    Raises ValueError naming `where` for a schema newer than `schema`, and for unknown, missing and ill-typed fields.
    """
    found = data.get("schema")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UserError(f"{where}: schema={found!r} is not a schema number, so this is no {cls.__name__}")
    if found > schema:
        unknown = sorted(data.keys() - {f.name for f in fields(cls)})  # type: ignore[arg-type]
        detail = f"; it has fields unknown here: {', '.join(unknown)}" if unknown else ""
        raise UserError(
            f"{where} was written by a newer nanosprint (schema {found}, this one reads up to {schema}){detail}. "
            "Upgrade: pip install --upgrade nanosprint"
        )
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    missing = [name for name in needed if name not in data]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}: it is damaged or was not written by nanosprint")
    try:
        value: T = from_dict(cls, data)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return value
