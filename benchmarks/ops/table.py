"""Rows as a table in Markdown. What there is no time for is a number in brackets, explained once below."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
HEAD = ("operator", "shape", "ms", "rate", "floor, ms", "of the floor", "eager", "compiled", "library", "error")


def table(rows: Sequence[Row]) -> str:
    """Times in milliseconds; those of others with their ratio to ours."""
    notes = _Notes()
    lines = [HEAD, ("---",) * len(HEAD), *(_cells(row, notes) for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join((text, *notes.lines()))


def line(row: Row) -> str:
    """A row while the rest is still being measured."""
    name = f"{title(row):55s} {row.get('shape', ''):32s}"
    if "failed" in row:
        return f"{name} {row['failed']}"
    share = f" = {row['share']:4.0%} of the floor" if "share" in row else ""
    return f"{name} {row['ms']:8.3f} ms ({row['p20']:.3f} .. {row['p80']:.3f}, {row['how']}){share}"


def title(row: Row) -> str:
    return ", ".join(filter(None, (row["operator"], row.get("case"))))


class _Notes:
    """Texts numbered in the order in which they are first used."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    def lines(self) -> list[str]:
        return [f"[{number}] {text}." for text, number in self.numbers.items()]


def _cells(row: Row, notes: _Notes) -> tuple[str, ...]:
    start = title(row), row.get("shape", "")
    if "failed" in row:
        error = f"{row['error']:.0e}" if "error" in row else "-"
        what = "WRONG" if row["failed"].startswith("WRONG") else "failed"
        return *start, f"{what} {notes.mark(row['failed'])}", *("-",) * 6, error
    how = "" if row["how"] == "events" else f" ({row['how']})"
    ours = f"{_figures(row['ms'])}{how}", *_against_the_floor(row)
    return *start, *ours, *(_rival(row, name, notes) for name in ("reference", "compiled", "library")), _error(row)


def _against_the_floor(row: Row) -> tuple[str, str, str]:
    if "floor_ms" not in row:
        return "-", "-", "-"
    return f"{_figures(row['rate'])} {row['unit']}", _figures(row["floor_ms"]), f"{row['share']:.0%}"


def _rival(row: Row, column: str, notes: _Notes) -> str:
    """Its time, and how many times ours that is."""
    name = row.get(f"{column}_name")
    if f"{column}_why" in row:
        why = row[f"{column}_why"]
        return notes.mark(f"{name}: {why}" if name else why)
    ms = row[f"{column}_ms"]
    mark = f" {notes.mark(name)}" if name else ""
    return f"{_figures(ms)} = {ms / row['ms']:.2f} x{mark}"


def _figures(number: float) -> str:
    """Three significant digits, in full."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:#.3g}"


def _error(row: Row) -> str:
    return "0" if row["error"] == 0 else f"{row['error']:.0e}"
