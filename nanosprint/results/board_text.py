"""The leaderboard as columns of text, and these as tables in a terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from nanosprint.results.leaderboard import Board, Entry, Leaderboard
from nanosprint.results.words import duration, energy, p_value, short


@dataclass(frozen=True)
class Column:
    """A column: its head, what is shown of an entry, and by which value it is sorted (None: last)."""

    head: str
    text: Callable[[Entry], str]
    value: Callable[[Entry], Any]
    is_number: bool = True


def _rank(entry: Entry) -> str:
    return "–" if entry.rank is None else str(entry.rank)


def _recipe(entry: Entry) -> str:
    return f"{entry.first.recipe_name} {entry.first.recipe_hash[:6]}"


def _runs(entry: Entry) -> str:
    others = ", ".join(f"{count} {status}" for status, count in entry.others.items())
    return f"{len(entry.results)}" + (f" (+ {others})" if others else "")


def _loss(entry: Entry) -> str:
    return f"{entry.loss:.4f}" + ("" if entry.loss_sd is None else f" ± {entry.loss_sd:.4f}")


def _time(entry: Entry) -> str:
    mean = entry.mean("train_s")
    if mean is None:
        return "–"
    seconds = [r.train_s for r in entry.results if r.train_s is not None]
    return duration(mean) + (f" ± {stdev(seconds) / mean:.1%}" if len(seconds) > 1 and mean else "")


def _shown(name: str, words: Callable[[float], str]) -> Callable[[Entry], str]:
    def text(entry: Entry) -> str:
        mean = entry.mean(name)
        return "–" if mean is None else words(mean)

    return text


def _commit(entry: Entry) -> str:
    newest = entry.newest
    return "–" if newest.commit is None else newest.commit[:9] + (" + edits" if newest.dirty else "")


COLUMNS = (
    Column("rank", _rank, lambda e: e.rank),
    Column("recipe", _recipe, lambda e: e.first.recipe_name, is_number=False),
    Column("runs", _runs, lambda e: len(e.results)),
    Column("loss", _loss, lambda e: e.loss),
    Column("p", lambda e: p_value(e.p), lambda e: e.p),
    Column("time", _time, lambda e: e.mean("train_s")),
    Column("energy", _shown("energy_j", energy), lambda e: e.mean("energy_j")),
    Column("tokens", _shown("tokens", short), lambda e: e.mean("tokens")),
    Column("devices", lambda e: e.first.devices, lambda e: e.first.devices, is_number=False),
    Column("date", lambda e: (e.newest.created or "–")[:10], lambda e: e.newest.created, is_number=False),
    Column("commit", _commit, lambda e: e.newest.commit, is_number=False),
)
_LESS = ("tokens", "devices", "date", "commit")


def print_leaderboard(board: Leaderboard, console: Any) -> None:
    """Every board as a table on a rich console, with its rule, why entries have no rank, and what was left out."""
    for one in board.boards:
        for table in _tables(one, console):
            console.print(table)
        for entry in one.entries:
            if entry.note:
                console.print(f"– {entry.first.recipe_name} ({entry.first.recipe_hash}): {entry.note}",
                              style="dim", markup=False, highlight=False)  # fmt: skip
        console.print(one.rule, style="dim", markup=False, highlight=False)
        console.print()
    for _, reason in board.left_out:
        console.print(f"left out: {reason}", style="yellow", markup=False, highlight=False)


def _tables(board: Board, console: Any) -> list[Any]:
    """One table where it fits the terminal; else a second one with what matters less, for the same ranks."""
    whole = _table(board, COLUMNS)
    if console.measure(whole, options=console.options.update(width=10_000)).maximum <= console.width:
        return [whole]
    measured = [column for column in COLUMNS if column.head not in _LESS]
    others = [column for column in COLUMNS if column.head in ("rank", "recipe", *_LESS)]
    return [_table(board, measured), _table(board, others)]


def _table(board: Board, columns: Sequence[Column]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(board.name), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.head, justify="right" if column.is_number else "left", overflow="fold")
    for entry in board.entries:
        table.add_row(*(Text(c.text(entry)) for c in columns), style="bold" if entry.rank == 1 else "")
    return table
