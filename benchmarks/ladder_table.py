"""The tables of docs/ladder.md from the rows of finished runs."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import between, or_dash, table
from nanosprint.recipes import all_recipes

Row = dict[str, Any]
_BASE = "gpt2"  # the foot of the ladder, with which every rung is compared besides its parent


def write_table(results: Path, doc: Path) -> str:
    """Put both tables between their marks in `doc`; returns them. Raises ValueError where `doc` has no such marks."""
    rows = read_rows(results)
    tables = {"full": full_table(rows), "worth": worth_tables(rows)}
    text = doc.read_text()
    for name, content in tables.items():
        text = between(text, f"<!-- {name} -->", f"<!-- /{name} -->", content)
    doc.write_text(text)
    return "\n\n".join(tables.values())


def read_rows(results: Path) -> list[Row]:
    """All rows, those of a rung together and in the order of the ladder."""
    order = list(all_recipes())
    rows = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    return sorted(rows, key=lambda row: (_place(order, row["rung"]), row["setting"], row["seed"]))


def full_table(rows: Iterable[Row]) -> str:
    """Speed and size of each rung; the newest row of each."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("rung", lambda row: f"`{row['rung']}`"),
        ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
        ("MFU", lambda row: or_dash(row["mfu"], "{:.1%}")),
        ("peak memory, GiB", lambda row: or_dash(row["memory_gib"], "{:.1f}")),
        ("start-up, s", lambda row: f"{row['startup_s']:.0f}{_warmth(row)}"),
        ("steps", lambda row: str(row["steps"])),
        ("attention", lambda row: str(row["execution"]["attention"])),
        ("tokens a micro-batch", lambda row: f"{row['execution']['tokens_per_microbatch']:,}"),
    ]
    chosen = [row for row in rows if row["kind"] == "full"]
    if not chosen:
        return "Not measured yet."
    return table([name for name, _ in columns], [[show(row) for _, show in columns] for row in chosen]) + _about(chosen)


def _warmth(row: Row) -> str:
    """What start-up found: nothing, compiled code in the caches, or the graphs of a run of the same process."""
    return "" if row["cold"] else " (shared)" if row.get("shared_graphs") else " (cached)"


def worth_tables(rows: Iterable[Row]) -> str:
    """A table for each budget."""
    chosen = [row for row in rows if row["kind"] == "worth"]
    settings = sorted({row["setting"] for row in chosen}, key=lambda setting: (setting[-1] != "s", setting))
    if not settings:
        return "Not measured yet."
    return "\n\n".join(_worth_table(s, [row for row in chosen if row["setting"] == s]) for s in settings)


def _worth_table(setting: str, rows: list[Row]) -> str:
    """Loss of every rung at one budget against its parent and the foot. Spread: largest less smallest of its seeds."""
    by_rung: dict[str, list[Row]] = {}
    for row in rows:
        by_rung.setdefault(row["rung"], []).append(row)
    losses = {rung: [row["val_loss"] for row in own] for rung, own in by_rung.items()}
    seeds = sorted({row["seed"] for row in rows})
    recipes, lines = all_recipes(), []
    for rung, own in by_rung.items():
        parent = recipes[rung].parent if rung in recipes else None
        by_seed = {row["seed"]: row["val_loss"] for row in own}
        lines.append(
            [
                f"`{rung}`",
                *(or_dash(by_seed.get(seed), "{:.4f}") for seed in seeds),
                f"{statistics.mean(losses[rung]):.4f}",
                f"{max(losses[rung]) - min(losses[rung]):.4f}" if len(own) > 1 else "-",
                _difference(losses, rung, parent),
                _difference(losses, rung, _BASE if rung != _BASE else None),
                f"{statistics.mean(row['tokens'] for row in own) / 1e6:.1f}",
                f"{statistics.mean(row['train_s'] for row in own):.1f}",
            ]
        )
    head = ["rung", *(f"seed {seed}" for seed in seeds), "mean", "spread", "to parent", f"to {_BASE}"]
    head += ["tokens, M", "training, s"]
    return f"**Budget {setting}**\n\n" + table(head, lines) + _about(rows)


def _difference(losses: dict[str, list[float]], rung: str, other: str | None) -> str:
    """Signed difference of the means; negative is better."""
    if other not in losses:
        return "-"
    return f"{statistics.mean(losses[rung]) - statistics.mean(losses[other]):+.4f} (`{other}`)"


def _about(rows: Sequence[Row]) -> str:
    """On what the rows were measured, all of them named."""
    devices = {str(row["devices"][0].get("name", row["devices"][0])) for row in rows if row["devices"]}
    torches = {str(row["versions"].get("torch")) for row in rows}
    targets = {f"{row['val_tokens']:,}" for row in rows}
    commits = {str(row["commit"])[:7] + ("+" if row["dirty"] else "") for row in rows}
    return (
        f"\n\n{', '.join(sorted(devices))}; torch {', '.join(sorted(torches))}; "
        f"{', '.join(sorted(targets))} validation targets; commit {', '.join(sorted(commits))}."
    )


def _place(order: list[str], rung: str) -> int:
    """Where a rung stands on the ladder; what no recipe is called comes last."""
    return order.index(rung) if rung in order else len(order)
