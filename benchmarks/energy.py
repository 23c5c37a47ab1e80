"""Batch size against energy: the table and the picture of docs/energy.md, from the records that there are.

    python -m benchmarks.energy

Reads benchmarks/results/record/*.json and benchmarks/results/batch/*.jsonl: runs of record-third and of smaller batches
of it. Energy is what NVML counted over the training clock, of the GPU alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import between, table
from nanosprint.extras import require
from nanosprint.files import atomic_write
from nanosprint.results.plots import COLOURS, GRID, INK
from nanosprint.results.record import JOULES_PER_KWH

RESULTS, DOC, PICTURE = Path("benchmarks/results"), Path("docs/energy.md"), Path("docs/images/energy.svg")


@dataclass(frozen=True)
class Point:
    """A run: the largest step's tokens, what its rates are multiplied by, tokens, joules, seconds, final loss."""

    batch: int
    rate: float
    seed: int
    tokens: int
    joules: float
    seconds: float
    loss: float

    @property
    def per_million(self) -> float:
        return 1e6 * self.joules / self.tokens

    @property
    def per_kwh(self) -> float:
        return JOULES_PER_KWH * self.tokens / self.joules

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


def load(results: Path) -> list[Point]:
    """All runs with a count of energy, the largest batches first; those with other techniques are left out."""
    rows = [json.loads(path.read_text()) for path in sorted((results / "record").glob("*.json"))]
    for path in sorted((results / "batch").glob("*.jsonl")):
        rows += [json.loads(line) for line in path.read_text().splitlines()]
    points = [point_of(row) for row in rows if row["energy_j"] is not None and not _is_other(row)]
    return sorted(points, key=lambda p: (-p.batch, p.rate, p.seed))


def _is_other(row: dict[str, Any]) -> bool:
    return any(word.startswith("precision.") for word in row.get("overrides", []))


def point_of(row: dict[str, Any]) -> Point:
    words = dict(word.split("=", 1) for word in row.get("overrides", []))
    batch = words.get("train.batch_tokens") or row["recipe"]["train"]["batch_tokens"]
    rate = float(words.get("schedule.stages.stages.0.lr", 1.0))
    seconds = row["train_ms"] / 1000
    return Point(int(batch), rate, row["seed"], row["tokens"], row["energy_j"], seconds, row["val_loss"])


def as_table(points: list[Point]) -> str:
    head = ["tokens a step", "rates", "seed", "tokens, M", "loss", "kJ", "J a million tokens", "tokens/kWh", "W", "s"]
    return table(head, [_cells(p) for p in points])


def _cells(p: Point) -> list[str]:
    per_kwh = f"{p.per_kwh / 1e9:.2f}e9"
    run = [f"{p.batch:,}", f"{p.rate:g}", str(p.seed), f"{p.tokens / 1e6:.1f}", f"{p.loss:.4f}"]
    return [*run, f"{p.joules / 1e3:.1f}", f"{p.per_million:,.0f}", per_kwh, f"{p.watts:.0f}", f"{p.seconds:.1f}"]


def draw(points: list[Point], out: Path) -> None:
    """What a token costs by batch, and what a loss costs."""
    require("matplotlib", extra="quickstart", purpose="a plot")
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    batches = sorted({p.batch for p in points})
    colours = {batch: COLOURS[i % len(COLOURS)] for i, batch in enumerate(batches)}
    means = [_mean([p.per_million for p in points if p.batch == batch]) for batch in batches]
    left.plot(batches, means, color=INK, linewidth=1, zorder=1)
    for p in points:
        left.plot(p.batch, p.per_million, "o", color=colours[p.batch])
        right.plot(p.joules / 1e3, p.loss, "o", color=colours[p.batch])
        right.annotate(f"  rates {p.rate:g}", (p.joules / 1e3, p.loss), fontsize=7, va="center")
    for batch in batches:
        right.plot([], [], "o", color=colours[batch], label=f"{batch:,} tokens a step")
    left.set(
        xscale="log",
        xlabel="tokens a step, last stage",
        ylabel="joules a million tokens",
        ylim=(0, 1.15 * max(p.per_million for p in points)),
    )
    left.set_xticks(batches, [f"{batch // 1024}k" for batch in batches])
    left.minorticks_off()
    right.set(xlabel="kJ of the run", ylabel="validation loss")
    right.margins(x=0.15)
    right.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    atomic_write(out, text.getvalue().encode())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    points = load(RESULTS)
    draw(points, PICTURE)
    page = between(DOC.read_text(), "<!-- energy -->", "<!-- /energy -->", as_table(points))
    atomic_write(DOC, page.encode())
    print(f"{len(points)} runs: {DOC}, {PICTURE}")


if __name__ == "__main__":
    main()
