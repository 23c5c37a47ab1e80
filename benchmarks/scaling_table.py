"""The tables of docs/scaling.md from the rows of `benchmarks/scaling.py`.

Rows of one recipe, variant and host belong together: there is a table for each, the newest row of each line in it.
Efficiency is tokens/s over those of as many times one GPU, of the same table.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import between, or_dash, table

Row = dict[str, Any]
NOTHING = "Not measured yet."
WHOLE = "whole run"  # all stages, each as often as the recipe has it


def write_tables(results: Path, doc: Path) -> str:
    """Put the tables between their marks in `doc`; returns them. Raises ValueError where `doc` has no such marks."""
    text = tables(results)
    doc.write_text(between(doc.read_text(), "<!-- measured -->", "<!-- /measured -->", text))
    return text


def tables(results: Path) -> str:
    """Of all rows in a folder."""
    rows = [json.loads(line) for path in sorted(results.glob("*.jsonl")) for line in path.read_text().splitlines()]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("benchmark") in ("scaling", "agreement", "training"):  # a run's metrics lie beside them
            groups.setdefault(json.dumps([row["recipe"], row["variant"], row["devices"]]), []).append(row)
    return "\n\n".join(map(_tables_of, groups.values())) or NOTHING


def _tables_of(rows: list[Row]) -> str:
    """Of one recipe on one host."""
    words = "".join(f" {key}={value}" for key, value in rows[0]["variant"].items())
    texts = [f"**`{rows[0]['recipe']}{words}`**"]
    steps = newest((row for row in rows if row["benchmark"] == "scaling"), "stage", "gpus")
    runs = newest((row for row in rows if row["benchmark"] == "training"), "gpus")
    if steps:
        texts.append(steps_table(steps))
    if runs:
        texts.append(training_table(runs))
    compared = newest((row for row in rows if row["benchmark"] == "agreement"), "gpus")
    texts += agreement(compared, "After the steps measured") + agreement(runs, "At the end of training")
    texts += recordings(steps)
    return "\n\n".join([*texts, _about(rows)])


def newest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The last row for each value of `keys`, in the order of these."""
    found = {tuple(row[key] for key in keys): row for row in rows}
    return [found[key] for key in sorted(found)]


def steps_table(rows: Sequence[Row]) -> str:
    """A line for each stage and number of GPUs, and for the whole run where all its stages are there."""
    rows = [*rows, *_whole_runs(rows)]
    head = ["stage", "GPUs", "tokens a step", "ms a step", "us a token", "tokens/s", "efficiency", "communication, ms"]
    head += ["exposed, ms", "idle", "peak GiB", "sent, MB", "GB/s sending", "GB/s on average"]
    return table(head, [_steps_line(row, efficiency(row, rows, "stage")) for row in rows])


def _steps_line(row: Row, share: float | None) -> list[str]:
    sending, sent = _range(row.get("communication_ms")), row.get("sent_mb")
    exposed = _range(row.get("exposed_ms"))
    return [
        row["stage"],
        str(row["gpus"]),
        f"{row['batch_tokens']:,.0f}",
        f"{row['ms']:.2f}",
        f"{row['us_per_token']:.4f}",
        f"{row['tokens_per_s']:,.0f}",
        or_dash(share, "{:.1%}"),
        "-" if sending is None else "{:.2f} to {:.2f}".format(*sending),
        "-" if exposed is None else "{:.2f} to {:.2f}".format(*exposed),
        or_dash(row.get("idle"), "{:.1%}"),
        or_dash(row["memory_gib"], "{:.1f}"),
        or_dash(sent, "{:.1f}"),
        "-" if sent is None or sending is None or not sending[0] else f"{sent / sending[0]:.0f}",
        or_dash(row.get("sent_gb_per_s"), "{:.1f}"),
    ]


def _range(of_ranks: Sequence[float | None] | None) -> tuple[float, float] | None:
    """Least and most of all processes; None where there is nothing."""
    known = [value for value in of_ranks or () if value is not None]
    return (min(known), max(known)) if known else None


def _whole_runs(rows: Sequence[Row]) -> list[Row]:
    """For each number of GPUs that all stages were measured on, their mean by how many steps the run has of each."""
    stages = {row["stage"] for row in rows}
    whole = []
    for gpus in sorted({row["gpus"] for row in rows}):
        own = [row for row in rows if row["gpus"] == gpus]
        if len(own) < len(stages) or len(stages) == 1:
            continue
        steps = sum(row["steps_of_run"] for row in own)
        ms, tokens = (sum(row[key] * row["steps_of_run"] for row in own) / steps for key in ("ms", "batch_tokens"))
        memory = [row["memory_gib"] for row in own if row["memory_gib"] is not None]
        whole.append(
            {
                "stage": WHOLE,
                "gpus": gpus,
                "ms": ms,
                "batch_tokens": tokens,
                "us_per_token": 1e3 * ms / tokens,
                "tokens_per_s": 1e3 * tokens / ms,
                "memory_gib": max(memory, default=None),
            }
        )
    return whole


def efficiency(row: Row, rows: Iterable[Row], *keys: str) -> float | None:
    """Tokens/s over those of as many times one GPU, of the row with equal `keys`; None where there is no such row."""
    for other in rows:
        if other["gpus"] == 1 and all(other[key] == row[key] for key in keys):
            return float(row["tokens_per_s"] / (row["gpus"] * other["tokens_per_s"]))
    return None


def training_table(rows: Sequence[Row]) -> str:
    """A line for each whole training; losses beside those of one GPU."""
    head = ["GPUs", "training, s", "tokens/s", "efficiency", "start-up, s", "start-up warm, s", "joules", "steps"]
    head += ["val loss", "to one GPU", "most, of any validation", "peak GiB"]
    one = next((row for row in rows if row["gpus"] == 1), None)
    return table(head, [_training_line(row, one, efficiency(row, rows)) for row in rows])


def _training_line(row: Row, one: Row | None, share: float | None) -> list[str]:
    kind = {True: "", False: " (caches as found)", None: " (earlier run)"}[row["cold"]]
    differs = one is not None and one is not row and None not in (row["val_loss"], one["val_loss"])
    return [
        str(row["gpus"]),
        f"{row['train_s']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        or_dash(share, "{:.1%}"),
        f"{row['startup_s']:.1f}{kind}",
        or_dash(row["warm_start_s"], "{:.1f}"),
        or_dash(row["energy_j"], "{:,.0f}"),
        str(row["steps"]),
        or_dash(row["val_loss"], "{:.4f}"),
        f"{row['val_loss'] - one['val_loss']:+.4f}" if differs and one is not None else "-",
        or_dash(_most_apart(row, one) if differs and one is not None else None, "{:.4f}"),
        or_dash(row["memory_gib"], "{:.1f}"),
    ]


def _most_apart(row: Row, other: Row) -> float | None:
    """The largest difference of two runs' losses at a validation that both had."""
    losses = dict(map(tuple, other["val_curve"]))
    return max((abs(loss - losses[step]) for step, loss in row["val_curve"] if step in losses), default=None)


def agreement(rows: Iterable[Row], when: str) -> list[str]:
    """A sentence for each number of processes whose weights were compared."""
    said = []
    for row in rows:
        if row["gpus"] == 1 or row["differing"] is None:
            continue
        verdict = "all parameters are the same bits on every rank"
        if row["differing"]:
            some = ", ".join(row["differing"][:5])
            verdict = f"{len(row['differing'])} parameters **differ** between ranks: {some}"
        said.append(f"{when} on {row['gpus']} GPUs {verdict}.")
    return said


def recordings(rows: Iterable[Row]) -> list[str]:
    """A sentence on whose steps were recorded, of the rows that know."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.get("recorded") is not None:
            failure = row.get("recording_failure")
            how = "recorded" if row["recorded"] else "not recorded" + (f" ({failure})" if failure else "")
            said.setdefault(how, []).append(f"{row['stage']} on {row['gpus']}")
    return [f"Steps were {how}: {', '.join(where)}." for how, where in said.items()]


def _about(rows: Sequence[Row]) -> str:
    """On what the rows were measured, all of it named."""
    devices = rows[0]["devices"]
    names = sorted({str(device.get("name", device)) for device in devices})
    measured = [row.get("measured", row) for row in rows]
    torches = sorted({str(row["versions"].get("torch")) for row in measured})
    commits = sorted({str(row["commit"])[:7] + ("+" if row["dirty"] else "") for row in measured})
    return f"A host with {len(devices)} x {', '.join(names)}; torch {', '.join(torches)}; commit {', '.join(commits)}."
