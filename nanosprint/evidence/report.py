"""The outcome of a race as one tree of numbers (`report.json`), and for people as Markdown and in the terminal.

Everything is recomputed from the runs' records and metrics each time. Means come with the interval that holds the true
one in 95 of 100 races; differences are taken seed by seed where both sides have the seed; p-values of several
differences in the same measure are corrected for their number (Holm). What could not be shown is said, too.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from nanosprint.config.edit import to_dict
from nanosprint.errors import UserError
from nanosprint.evidence.series import Race
from nanosprint.evidence.tally import Result, read_results
from nanosprint.results.record import RunRecord
from nanosprint.results.stats import (
    difference,
    holm,
    pair_by_seed,
    runs_needed,
    smallest_effect,
    summarize,
    test_below,
)

ALPHA, POWER = 0.05, 0.8
EFFECTS = (0.001, 0.002, 0.005)  # nats that a speedrun's changes are about
MEASURES = {  # a result's field: what it is called, how it is shown
    "val_loss": ("validation loss", "{:.4f}"),
    "train_s": ("training, s", "{:,.2f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "time_to_target_s": ("time to target, s", "{:,.2f}"),
    "tokens_to_target": ("tokens to target", "{:,.0f}"),
    "energy_j": ("energy, J", "{:,.0f}"),
    "energy_to_target_j": ("energy to target, J", "{:,.0f}"),
    "mean_watts": ("mean power, W", "{:,.1f}"),
    "tokens_per_kwh": ("tokens/kWh", "{:.3g}"),
}
COMPARED = ("val_loss", "train_s", "time_to_target_s", "energy_j", "energy_to_target_j")


def make_report(race: Race, folder: Path) -> dict[str, Any]:
    """All numbers of a race, as far as it has come, as plain values."""
    results, records = read_results(race, folder)
    by_name = {
        one.name: [r for r in results if r.contestant == one.name and r.problem is None] for one in race.contestants
    }
    pairs = _pairs(race)
    return {
        "schema": 1,
        "target": race.target,
        "runs": race.runs,
        "budget": to_dict(race.budget),
        "max_steps": race.max_steps,
        "baseline": race.baseline,
        "left_out": race.left_out,
        "conditions": _conditions(records),
        "contestants": [
            {
                "name": one.name,
                "series": one.series,
                "recipe_hash": one.recipe_hash,
                "finished": len(by_name[one.name]),
                "steps": by_name[one.name][0].steps if by_name[one.name] else None,
                "measures": {field: _summary(by_name[one.name], field) for field in MEASURES},
                "energy_reason": next((r.energy_reason for r in by_name[one.name] if r.energy_reason), None),
                "below_target": _below(by_name[one.name], race.target),
            }
            for one in race.contestants
        ],
        "differences": {field: _differences(by_name, pairs, field) for field in COMPARED},
        "problems": [
            {"contestant": r.contestant, "seed": r.seed, "dir": r.dir, "problem": r.problem}
            for r in results
            if r.problem is not None
        ],
        "results": [to_dict(r) for r in results],
    }


def _pairs(race: Race) -> list[tuple[str, str]]:
    """Who is compared with whom: everyone with the baseline, or without one everyone with everyone before."""
    names = [one.name for one in race.contestants]
    if race.baseline is not None:
        return [(name, race.baseline) for name in names if name != race.baseline]
    return [(b, a) for a, b in combinations(names, 2)]


def _values(results: Sequence[Result], field: str) -> list[tuple[int, float]]:
    """(seed, value) of the runs where the field was measured."""
    return [(r.seed, float(getattr(r, field))) for r in results if getattr(r, field) is not None]


def _summary(results: Sequence[Result], field: str) -> dict[str, Any]:
    """n, mean, sd, low and high over those that have the field; what cannot be had from so few is None."""
    values = [value for _, value in _values(results, field)]
    if len(values) >= 2:
        return asdict(summarize(values))
    mean = values[0] if values else None
    return {"n": len(values), "mean": mean, "sd": None, "low": None, "high": None}


def _below(results: Sequence[Result], target: float | None) -> dict[str, Any] | None:
    """The one-sided test of mean loss <= target, and how far below these runs would have told it from the target."""
    values = [value for _, value in _values(results, "val_loss")]
    if target is None or len(values) < 2:
        return None
    return {**asdict(test_below(values, target)), **_reach(statistics.stdev(values), len(values), "below")}


def _differences(by_name: dict[str, list[Result]], pairs: list[tuple[str, str]], field: str) -> list[dict[str, Any]]:
    """Every pair's difference in a measure, first minus second, p-values corrected together."""
    rows = [_difference(a, by_name[a], b, by_name[b], field) for a, b in pairs]
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    return rows


def _difference(a: str, of_a: list[Result], b: str, of_b: list[Result], field: str) -> dict[str, Any]:
    """By shared seeds where there are two of them, else independent; Nones where there are too few runs."""
    values_a, values_b = _values(of_a, field), _values(of_b, field)
    side_a, side_b = pair_by_seed(values_a, values_b)
    paired = len(side_a) >= 2
    if not paired:
        side_a, side_b = tuple(v for _, v in values_a), tuple(v for _, v in values_b)
    row: dict[str, Any] = {"a": a, "b": b, "n": [len(side_a), len(side_b)], "paired": paired}
    if min(row["n"]) < 2:
        return {**row, "estimate": None, "low": None, "high": None, "p": None, "p_holm": None}
    if paired:
        sd, n = statistics.stdev([x - y for x, y in zip(side_a, side_b, strict=True)]), len(side_a)
    else:  # what one run scatters by, as if alike on both sides
        sd, n = math.sqrt((statistics.variance(side_a) + statistics.variance(side_b)) / 2), min(row["n"])
    found = asdict(difference(side_a, side_b, paired=paired))
    return {**row, **found, "p_holm": None, "sd": sd, **_reach(sd, n, "paired" if paired else "independent")}


def _reach(sd: float, n: int, design: Any) -> dict[str, Any]:
    """What n runs could have shown, and how many runs given effects would take."""
    needed: dict[str, int | None] = {}
    for effect in EFFECTS:
        try:
            needed[f"{effect:g}"] = runs_needed(sd, effect, power=POWER, alpha=ALPHA, design=design)
        except UserError:  # more than anyone will ever make
            needed[f"{effect:g}"] = None
    return {"smallest_effect": smallest_effect(sd, n, POWER, ALPHA, design), "runs_needed": needed}


def _conditions(records: Sequence[RunRecord]) -> dict[str, Any]:
    """On what the runs were made, and what differs between them although it should not."""
    kinds: dict[str, set[str]] = {
        "devices": {f"{r.world_size} x {r.devices[0].get('name', r.devices[0])}" for r in records if r.devices},
        "torch": {str(r.versions.get("torch")) for r in records},
        "commit": {str(r.commit)[:12] + ("+" if r.dirty else "") for r in records},
        "validation targets": {f"{r.data.val_tokens:,}" for r in records},
        "compute": {str(r.execution.get("compute")) for r in records},
    }
    data = {tuple(file.sha256 for file in r.data.files) for r in records}
    unlike = [name for name, values in kinds.items() if len(values) > 1] + (["data files"] if len(data) > 1 else [])
    return {**{name: sorted(values) for name, values in kinds.items()}, "unlike": unlike}


# --- for people -----------------------------------------------------------------------------------------------------


def summary_table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: every contestant with all that was measured of anyone."""
    shown = [f for f in MEASURES if any(c["measures"][f]["n"] for c in report["contestants"])]
    head = ["recipe", "runs", "steps"]
    for field in shown:
        head += [MEASURES[field][0], "sd", "95 %"] if field == "val_loss" else [MEASURES[field][0]]
    tested = report["target"] is not None
    if tested:
        head.append(f"p (mean <= {report['target']:g})")
    rows = []
    for one in report["contestants"]:
        row = [one["name"], f"{one['finished']}/{report['runs']}", _or_dash(one["steps"], "{:,}")]
        for field in shown:
            row += _cells(one["measures"][field], field, one["finished"])
        if tested:
            row.append(show_p((one["below_target"] or {}).get("p")))
        rows.append(row)
    return head, rows


def _cells(summary: dict[str, Any], field: str, finished: int) -> list[str]:
    form = MEASURES[field][1]
    mean = _or_dash(summary["mean"], form)
    if field == "val_loss":
        return [mean, _or_dash(summary["sd"], "{:.4f}"), show_interval(summary, form)]
    half = None if summary["low"] is None else (summary["high"] - summary["low"]) / 2
    text = mean if half is None else f"{mean} ± {form.format(half)}"
    return [text if summary["n"] in (0, finished) else f"{text} ({summary['n']} of {finished})"]


def difference_table(report: dict[str, Any], field: str) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a measure's differences; for the loss with what these runs could have shown."""
    form = MEASURES[field][1].replace("{:", "{:+")
    head = ["difference", MEASURES[field][0], "95 %", "p", "p (Holm)", "seeds"]
    effects = [f"runs for {effect:g}" for effect in EFFECTS]
    if field == "val_loss":
        head += [f"smallest effect at power {POWER:g}", *effects]
    rows = []
    for d in report["differences"][field]:
        row = [f"{d['a']} - {d['b']}", _or_dash(d["estimate"], form), show_interval(d, form)]
        row += [show_p(d["p"]), show_p(d["p_holm"])]
        row.append(f"{d['n'][0]} paired" if d["paired"] else f"{d['n'][0]} and {d['n'][1]}")
        if field == "val_loss":
            row.append(_or_dash(d.get("smallest_effect"), "{:.4f}"))
            row += [_or_dash(d.get("runs_needed", {}).get(f"{effect:g}"), "{:,}") for effect in EFFECTS]
        rows.append(row)
    return head, rows


def notes(report: dict[str, Any]) -> list[str]:
    """Sentences that belong below the tables: conditions, what failed, what is missing and why."""
    conditions = report["conditions"]
    said = [f"{name}: {', '.join(values)}" for name, values in conditions.items() if name != "unlike" and values]
    if conditions["unlike"]:
        said.append(f"Not alike in all runs: {', '.join(conditions['unlike'])}. Differences may come from there.")
    for one in report["contestants"]:
        below = one["below_target"]
        if below is not None:
            needed = ", ".join(f"{n if n else '-'} for {e}" for e, n in below["runs_needed"].items())
            said.append(
                f"{one['name']}: these runs would have told a mean {below['smallest_effect']:.4f} below the target "
                f"from the target (power {POWER:g}); runs needed: {needed}."
            )
    reasons = sorted({one["energy_reason"] for one in report["contestants"] if one["energy_reason"]})
    said += [f"No energy: {reason}" for reason in reasons]
    said += [
        f"Not counted: {p['contestant']} seed {p['seed']} ({p['dir']}): {p['problem']}" for p in report["problems"]
    ]
    return said


def markdown(report: dict[str, Any]) -> str:
    """`report.md`."""
    title = "Race" if report["baseline"] is None else "Ablation"
    parts = [f"# {title}", as_markdown(*summary_table(report))]
    for field in COMPARED:
        if any(d["estimate"] is not None for d in report["differences"][field]):
            parts.append(as_markdown(*difference_table(report, field)))
    parts.append("\n".join(f"- {note}" for note in notes(report)))
    return "\n\n".join(part for part in parts if part) + "\n"


def race_tables(report: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """What a terminal shows of a race."""
    compared = report["differences"]["val_loss"]
    return [summary_table(report), *([difference_table(report, "val_loss")] if compared else [])]


def print_tables(tables: Sequence[tuple[list[str], list[list[str]]]], said: Sequence[str]) -> None:
    """Tables and notes in a terminal, or as plain text in a file."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for head, rows in tables:
        if len(rows) < len(head) - 1:  # what is wider than high is turned, to fit a terminal
            head, *rows = [list(column) for column in zip(head, *rows, strict=True)]
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in said:
        console.print(note, markup=False, highlight=False)


def as_markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table; the first column to the left, the others, numbers mostly, to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def show_p(p: float | None) -> str:
    if p is None:
        return "-"
    return f"{p:.3g}" if p >= 1e-4 else "< 0.0001"


def show_interval(row: dict[str, Any], form: str) -> str:
    return "-" if row["low"] is None else f"{form.format(row['low'])} .. {form.format(row['high'])}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
