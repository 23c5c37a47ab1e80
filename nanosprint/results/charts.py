"""Charts for a page: SVG by matplotlib, and the numbers behind it for whatever the page does when one points at it.

A page has a light and a dark look, so colours must be the page's: matplotlib draws in stand-ins, which become CSS
variables in the text it writes. Lines are thinned to what a screen can show, which keeps the page small.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanosprint.results.curves import AXES, Axis, Curve, RunCurves
from nanosprint.results.plots import draw_band, loss_range, style
from nanosprint.results.words import duration

SIZE = (460.0, 264.0)  # of the drawing, in its own units, which are points at its natural size
BOX = (38.0, 8.0, 414.0, 208.0)  # the axes within: left, top, width, height
MOST_POINTS = 240  # of a line
NUM_COLOURS = 7
MARKS = {f"#00{i:02x}fe": f"var(--s{i})" for i in range(NUM_COLOURS)}  # stand-ins and what they become
FAINT, GRID = "#00f0fe", "#00f1fe"
MARKS |= {FAINT: "var(--faint)", GRID: "var(--grid)", "#00f2fe": "var(--card)"}
CARD = "#00f2fe"


@dataclass(frozen=True)
class Line:
    """A line to draw: `colour` counts from 0; a faint one is context for the others."""

    name: str
    curve: Curve
    colour: int
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """SVG text for a page, and its numbers: {box, size, x, y, label, series: [{name, color, x, y, low, high}]}."""

    svg: str
    data: dict[str, Any]


def lines_of(runs: Sequence[RunCurves], names: Sequence[str], first_colour: int = 0) -> list[Line]:
    """The training and validation lines of runs, or bands, each run in its colour."""
    lines = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        colour = (first_colour + i) % NUM_COLOURS
        if run.line.x:
            lines.append(Line(f"training{name}", run.line, colour, faint=bool(run.val.x)))
        if run.val.x:
            lines.append(Line(f"validation{name}", run.val, colour))
    return lines


def loss_chart(lines: Sequence[Line], x: Axis, salt: str) -> Chart:
    """Loss over `x`. `salt` makes the names inside the SVG differ from those of other charts on the page."""
    thin = [Line(line.name, thinned(line.curve), line.colour, line.faint) for line in lines]
    figure, axes = _axes()
    for line in thin:
        _draw(axes, line)
    axes.set_ylim(*loss_range([line.curve for line in thin]))
    style(axes, x, faint=FAINT, grid=GRID)
    _label(axes, AXES[x][1])
    data = {
        "size": SIZE,
        "box": BOX,
        "x": [_digits(v) for v in axes.get_xlim()],
        "y": [_digits(v) for v in axes.get_ylim()],
        "label": AXES[x][1],
        "series": [_series(line) for line in thin],
    }
    return Chart(_svg(figure, salt), data)


def histogram(seconds: Sequence[float], salt: str) -> str:
    """How training times of runs are spread, as SVG."""
    figure, axes = _axes()
    bins = max(3, math.ceil(math.sqrt(len(seconds))))
    axes.hist(seconds, bins=bins, color=next(iter(MARKS)), edgecolor=CARD, linewidth=1.5, rwidth=0.96)
    style(axes, "seconds", faint=FAINT, grid=GRID)
    _label(axes, f"seconds of training, {duration(min(seconds))} to {duration(max(seconds))}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    return _svg(figure, salt)


def thinned(curve: Curve) -> Curve:
    """Every k-th point and the last, so that at most MOST_POINTS are left or a few more."""
    n = len(curve.x)
    keep = sorted({*range(0, n, math.ceil(n / MOST_POINTS) or 1), n - 1}) if n else []

    def pick(values: list[float] | None) -> list[float] | None:
        return None if values is None else [values[i] for i in keep]

    return Curve([curve.x[i] for i in keep], [curve.y[i] for i in keep], low=pick(curve.low), high=pick(curve.high))


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    (width, height), (left, top, w, h) = SIZE, BOX
    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    axes = figure.add_axes((left / width, 1 - (top + h) / height, w / width, h / height), facecolor="none")
    return figure, axes


def _label(axes: Any, text: str) -> None:
    """What is along the axis; what is up it stands in the caption, since its label has no room on a phone."""
    axes.set_xlabel(text, color=FAINT, fontsize=10, labelpad=9)
    axes.set_ylabel("")
    axes.tick_params(axis="x", pad=5)


def _draw(axes: Any, line: Line) -> None:
    colour, curve = list(MARKS)[line.colour], line.curve
    draw_band(axes, curve, colour, strength=0.1 if line.faint else 0.22)
    marked = not line.faint and len(curve.x) <= 40
    axes.plot(curve.x, curve.y, color=colour, alpha=0.45 if line.faint else 1.0, linewidth=1.0 if line.faint else 1.9,
              marker="o" if marked else None, markersize=4.2, markeredgecolor=CARD, markeredgewidth=0.8,
              zorder=2 if line.faint else 3)  # fmt: skip


def _series(line: Line) -> dict[str, Any]:
    numbers = {"x": line.curve.x, "y": line.curve.y, "low": line.curve.low, "high": line.curve.high}
    lists = {key: [_digits(v) for v in values] for key, values in numbers.items() if values is not None}
    return {"name": line.name, "color": line.colour, **lists}


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _svg(figure: Any, salt: str) -> str:
    """The figure as SVG for the inside of a page: no prolog, no size of its own, the page's colours and font."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    # groups are named in every figure alike, and names must be the page's only ones
    text = re.sub(r'<g id="(?:figure|patch|axes|matplotlib|xtick|ytick|line2d|text|Fill)[^"]*"', "<g", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    for stand_in, variable in MARKS.items():
        text = text.replace(stand_in, variable)
    return re.sub(r"\n\s*", "\n", text)
