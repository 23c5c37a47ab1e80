"""Loss curves of one or several runs, as PNG or SVG.

Training loss is noisy and there is much of it: drawn raw and faint, with a smoothed line on top. Validation loss is
what counts: drawn with a mark at every point, and named with its last value where it ends. Runs that differ in their
seed alone are drawn as one line, their mean, in a band from the lowest to the highest of them. Colours are Okabe and
Ito's, which colour-blind readers can tell apart too.
"""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanosprint.errors import UserError
from nanosprint.extras import require
from nanosprint.files import atomic_write
from nanosprint.results.curves import AXES, Axis, Curve, RunCurves, banded, load_curves
from nanosprint.results.runs import RunDir
from nanosprint.results.words import duration, short

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))  # once the colours are used up
INK, FAINT, GRID = "#222222", "#6f6f6f", "#e6e6e6"
MOST_DIRECT_LABELS = 16  # more lines than that get a legend: labels would no longer find room
MOST_RAW = 4  # runs whose single batches are drawn: those of more would bury the lines


def plot_runs(
    run_dirs: Sequence[RunDir | str | Path],
    out: str | Path,
    x: Axis = "step",
    *,
    title: str | None = None,
    size_inches: tuple[float, float] = (8.0, 4.5),
    dpi: int = 160,
    bands: bool = True,
) -> Path:
    """Draw training and validation loss of runs over steps, tokens, seconds or joules into `out` (.png or .svg).

    Three runs or more of one recipe become a band, unless `bands` is off. Runs that are going on can be drawn. The
    file is written atomically. Returns `out`. Raises ValueError for an unknown axis or suffix, a folder
    without a run, a run without losses, and where matplotlib is missing.
    """
    out = Path(out)
    if x not in AXES:
        raise UserError(f"x={x!r}: the axes are {', '.join(AXES)}")
    if out.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"{out}: a plot is a .png or a .svg file")
    if not run_dirs:
        raise UserError("no run was given to plot")
    require("matplotlib", extra="quickstart", purpose="a plot")
    runs = [load_curves(r if isinstance(r, RunDir) else RunDir(r), x) for r in run_dirs]
    figure = _draw(banded(runs) if bands else runs, x, title, size_inches)
    atomic_write(out, _render(figure, out.suffix.lower()[1:], dpi))
    return out


def loss_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits of the loss axis: everything but the plunge of the first steps and lone spikes, with a margin."""
    shown = [value for curve in curves for value in curve.y[min(len(curve.y) // 20, 50) :]]
    low = min(value for curve in curves for value in curve.y)
    # the 98th percentile, unless nothing is gained by it
    ordered = sorted(shown)
    high, top = ordered[min(len(ordered) - 1, math.ceil(0.98 * len(ordered)))], ordered[-1]
    high = top if top - low < 1.5 * (high - low) else high
    margin = 0.06 * (high - low) or 0.05 * max(abs(high), 1e-3)
    return low - margin, high + margin


def _draw(runs: Sequence[RunCurves], x: Axis, title: str | None, size_inches: tuple[float, float]) -> Any:
    """The figure. Built without pyplot, so that nothing global (backend, style, open figures) is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    ends: list[tuple[float, str, str]] = []  # y, text, colour of a label
    for index, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
        ends += _draw_run(axes, run, name, index, num_runs=len(runs))
    # the smoothed line sets the range: single noisy batches need not fit
    axes.set_ylim(*loss_range([c for run in runs for c in (run.line, run.val) if c.x]))
    style(axes, x)
    if len(ends) > MOST_DIRECT_LABELS:
        columns = math.ceil(len(ends) / 28)
        legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), frameon=False, fontsize=8, labelcolor=INK,
                    labelspacing=0.25, ncols=columns, handlelength=1.6)  # fmt: skip
        for text in legend.get_texts():
            text.set_parse_math(False)  # a name may hold dollars
    else:
        figure.draw_without_rendering()  # labels are spaced in pixels, so the layout must be settled
        _label_ends(axes, ends)
    _head(axes, runs, title)
    return figure


def _draw_run(axes: Any, run: RunCurves, name: str, index: int, *, num_runs: int) -> list[tuple[float, str, str]]:
    """The lines of one run; the labels for their ends."""
    single, has_val = num_runs == 1, bool(run.val.x)
    colour = COLOURS[index % len(COLOURS)]
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    ends = []
    if run.line.x:
        grey = single and has_val
        train_colour, line = "#8a8a8a" if grey else colour, run.line
        if run.train.x and num_runs <= MOST_RAW:
            axes.plot(*_points(run.train), color=train_colour, alpha=0.3 if single else 0.14, linewidth=0.7, zorder=1)
        draw_band(axes, line, train_colour, strength=0.12 if has_val else 0.25)
        label = f"{name}  {line.y[-1]:.3f}"
        axes.plot(*_points(line), linestyle=dash, color=train_colour, alpha=1.0 if single or not has_val else 0.45,
                  linewidth=1.2 if single or not has_val else 0.9, marker="." if len(line.x) < 30 else None, zorder=2,
                  label=None if has_val else label)  # fmt: skip
        if single:
            ends.append((line.y[-1], "training" if has_val else f"training  {line.y[-1]:.3f}", FAINT))
        elif not has_val:
            ends.append((line.y[-1], label, colour))
    if has_val:
        draw_band(axes, run.val, colour, strength=0.25)
        label = f"{name}  {run.val.y[-1]:.3f}"
        axes.plot(*_points(run.val), linestyle=dash, color=colour, linewidth=1.8, marker="o", zorder=3, label=label,
                  markersize=5.0 if len(run.val.x) <= 40 else 2.5, markeredgecolor="white",
                  markeredgewidth=0.7)  # fmt: skip
        ends.append((run.val.y[-1], f"validation  {run.val.y[-1]:.3f}" if single else label, colour))
    return ends


def draw_band(axes: Any, curve: Curve, colour: str, strength: float) -> None:
    """The range of a band's runs, lightly; nothing for a single run."""
    if curve.low is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=strength, linewidth=0, zorder=1)


def _points(curve: Curve) -> tuple[list[float], list[float]]:
    return curve.x, curve.y


def style(axes: Any, x: Axis, *, faint: str = FAINT, grid: str = GRID) -> None:
    """Quiet axes of loss over `x`: horizontal lines, no frame, counts as people read them."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(faint)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=faint, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=x in ("step", "tokens")))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel(AXES[x][1], color=faint, fontsize=10)
    axes.set_ylabel("loss (nats per token)", color=faint, fontsize=10)
    axes.margins(x=0.02)


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name each line right of the axes, at the height of its end; labels that would touch are moved apart."""
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height * 72 / axes.figure.dpi  # points
    line_height = 14.0 / height
    wanted = [min(1.0, max(0.0, (y - low) / (high - low))) for y, _, _ in ends]
    for (_, text, colour), place in zip(ends, spread(wanted, line_height), strict=True):
        axes.annotate(text, (1.0, place), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points",
                      color=colour, fontsize=9.5, va="center", annotation_clip=False, parse_math=False)  # fmt: skip


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights in 0 .. 1 near `wanted`, in the same order, with at least `gap` between any two where they find room."""
    # labels that would touch become a block, centred on what its members want; blocks that touch become one
    blocks: list[list[int]] = []
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        blocks.append([i])
        while len(blocks) > 1 and _touch(blocks[-2], blocks[-1], wanted, gap):
            last = blocks.pop()
            blocks[-1] += last
    out = [0.0] * len(wanted)
    for block in blocks:
        for rank, i in enumerate(block):
            out[i] = _base(block, wanted, gap) + rank * gap
    return out


def _touch(lower: Sequence[int], upper: Sequence[int], wanted: Sequence[float], gap: float) -> bool:
    return _base(lower, wanted, gap) + len(lower) * gap > _base(upper, wanted, gap)


def _base(block: Sequence[int], wanted: Sequence[float], gap: float) -> float:
    """The lowest height of a block of labels: centred on what they want, and within 0 .. 1."""
    height = gap * (len(block) - 1)
    centred = sum(wanted[i] for i in block) / len(block) - height / 2
    return max(0.0, min(1.0 - height, centred))


def _head(axes: Any, runs: Sequence[RunCurves], title: str | None) -> None:
    """The title in ink, and below it the outcome in a fainter line."""
    names = sorted({run.recipe for run in runs})
    if title is None:
        title = ", ".join(names) if len(names) <= 3 else f"{len(names)} recipes"
    second = _outcome(runs[0]) if len(runs) == 1 else _outcome_of_many(runs)
    if any(run.num_runs > 1 for run in runs):
        second += "; bands: lowest to highest run"
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=24, parse_math=False)
    axes.annotate(second, (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points",
                  color=FAINT, fontsize=9.5, annotation_clip=False)  # fmt: skip


def _outcome(run: RunCurves) -> str:
    loss = f"validation loss {run.val.y[-1]:.3f}" if run.val.y else f"training loss {run.train.y[-1]:.3f}"
    state = "" if run.status == "finished" else f"  ({run.status or 'no record yet'})"
    if run.num_runs > 1:
        loss = f"mean {loss} of {run.num_runs} runs"
    return f"{loss} after {duration(run.seconds)} of training and {short(run.tokens)} tokens{state}"


def _outcome_of_many(runs: Sequence[RunCurves]) -> str:
    best = min((run.val.y[-1] for run in runs if run.val.y), default=None)
    losses = "" if best is None else f", final validation loss from {best:.3f}; training loss faint"
    return f"{sum(run.num_runs for run in runs)} runs{losses}"


def _names(runs: Sequence[RunCurves]) -> list[str]:
    """The shortest names that tell the runs apart: recipe, else with the seed, else the folder."""
    ways: list[Callable[[RunCurves], str]] = [
        lambda run: run.recipe,
        lambda run: f"{run.recipe}, seed {run.seed}" if run.num_runs == 1 else _band_name(run),
        lambda run: run.run.name if run.num_runs == 1 else f"{_band_name(run)}, {run.key[:12]}",
    ]
    for way in ways:
        names = [way(run) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run.run.path) if run.num_runs == 1 else names[i] for i, run in enumerate(runs)]


def _band_name(run: RunCurves) -> str:
    return f"{run.recipe}, {run.num_runs} seeds"


def _render(figure: Any, kind: str, dpi: int) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    # the same runs give the same SVG, byte for byte; its text stays text
    with matplotlib.rc_context({"svg.hashsalt": "nanosprint", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
