"""Loss curves of runs as numbers, for whatever draws them: `nanosprint plot` and `nanosprint report`.

Training loss is a noisy sample a step, so a curve carries it raw and smoothed. Runs of one recipe with different seeds
become one curve: the mean of those runs, with a band from the lowest to the highest of them. Lowest to highest rather
than a standard deviation, because it claims nothing about how runs are distributed and can be checked by eye. Runs are
matched step by step, nothing is interpolated between steps; on an axis that runs reach at different values, such as
seconds, a step stands at its mean over the runs.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from nanosprint.errors import UserError
from nanosprint.results.metrics import effective_lines, read_metrics
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir

Axis = Literal["step", "tokens", "seconds", "joules"]
AXES: dict[str, tuple[str, str, float]] = {  # metrics field, label, factor
    "step": ("step", "optimizer steps", 1.0),
    "tokens": ("tokens", "training tokens", 1.0),
    "seconds": ("train_ms", "seconds of training", 1e-3),
    "joules": ("energy_j", "joules of training", 1.0),
}
FEWEST_FOR_A_BAND = 3  # two runs are two lines


@dataclass(frozen=True)
class Curve:
    """Finite points of one kind, ascending in x; a band has bounds, and every curve knows the steps of its points."""

    x: list[float]
    y: list[float]
    steps: list[int] = field(default_factory=list, compare=False)
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class RunCurves:
    """All that is drawn of a run, or of the runs of a band; `seconds` and `tokens` are those at the end, or means."""

    run: RunDir
    recipe: str
    key: str  # equal for runs that differ in their seed alone
    seed: Any
    train: Curve  # raw; empty for a band
    line: Curve  # smoothed
    val: Curve
    seconds: float
    tokens: float
    status: str | None  # None: no record yet
    num_runs: int = 1


def load_curves(run: RunDir, x: Axis) -> RunCurves:
    """The curves of a run. Raises ValueError where it has no finite loss, or lacks the axis."""
    record = RunRecord.load(run) if run.has_record else None
    request = _request(run, record)
    lines = list(read_metrics(run.metrics_path))
    train, val = effective_lines(lines, "train"), effective_lines(lines, "val")
    if not any(_finite(line.get("loss")) for line in (*train, *val)):
        raise UserError(f"{run.path} has nothing to plot: no line of its {run.metrics_path.name} holds a finite loss")
    if x == "joules":
        train, val = _with_joules(run, train, val, record)
    raw = _curve(train, x, run)
    last = max((*train[-1:], *val[-1:]), key=lambda line: line["step"])
    return RunCurves(
        run=run,
        recipe=str(_dig(request, "recipe", "name") or run.name),
        key=recipe_key(request),
        seed=_dig(request, "seed"),
        train=raw,
        line=replace(raw, y=smooth(raw.y, 2 * (len(raw.y) // 80) + 1)),
        val=_curve(val, x, run),
        seconds=last.get("train_ms", 0.0) / 1e3,
        tokens=last.get("tokens", 0),
        status=record.status if record else None,
    )


def _request(run: RunDir, record: RunRecord | None) -> dict[str, Any]:
    """What was asked for; kept records may come without it, and say the same of the recipe."""
    if record is None or run.has_run:
        return run.read_request()
    return {"recipe": record.recipe, "recipe_hash": record.recipe_hash, "seed": record.seed}


def recipe_key(request: Mapping[str, Any]) -> str:
    """What runs of one recipe have in common: its hash, or where a request has none, all it says of the recipe."""
    return str(request.get("recipe_hash") or json.dumps(request.get("recipe"), sort_keys=True))


def banded(runs: Sequence[RunCurves]) -> list[RunCurves]:
    """The runs with those of one recipe made one band, in its first run's place, where at least three end together.

    A run that ended before the others of its recipe, or is still going on, stays a line of its own: in a mean it
    would cut them short.
    """
    groups: dict[tuple[str, int], list[RunCurves]] = {}
    for run in runs:
        groups.setdefault((run.key, max((*run.line.steps[-1:], *run.val.steps[-1:]))), []).append(run)
    return [one for g in groups.values() for one in ([_band(g)] if len(g) >= FEWEST_FOR_A_BAND else g)]


def smooth(y: Sequence[float], width: int) -> list[float]:
    """Centred mean over `width` neighbours (odd), narrower at the ends so that these are not bent."""
    sums = [0.0]
    for value in y:
        sums.append(sums[-1] + value)
    half, out = width // 2, []
    for i in range(len(y)):
        reach = min(half, i, len(y) - 1 - i)
        out.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return out


def _band(runs: Sequence[RunCurves]) -> RunCurves:
    statuses = {run.status for run in runs}
    return replace(
        runs[0],
        seed=None,
        train=Curve([], []),
        line=_mean([run.line for run in runs]),
        val=_mean([run.val for run in runs]),
        seconds=fmean(run.seconds for run in runs),
        tokens=fmean(run.tokens for run in runs),
        status=statuses.pop() if len(statuses) == 1 else "not all finished",
        num_runs=len(runs),
    )


def _mean(curves: Sequence[Curve]) -> Curve:
    """The mean with its bounds, at the steps that all curves have."""
    points = [{step: (x, y) for step, x, y in zip(c.steps, c.x, c.y, strict=True)} for c in curves]
    steps = sorted(set.intersection(*(set(p) for p in points)))
    losses = [[p[step][1] for p in points] for step in steps]
    return Curve(
        x=[fmean(p[step][0] for p in points) for step in steps],
        y=[fmean(values) for values in losses],
        steps=steps,
        low=[min(values) for values in losses],
        high=[max(values) for values in losses],
    )


def _curve(lines: Sequence[Mapping[str, Any]], x: Axis, run: RunDir) -> Curve:
    name, _, factor = AXES[x]
    lacking = next((line for line in lines if name not in line), None)
    if lacking is not None:
        raise UserError(f"{run.metrics_path}: step {lacking['step']} has no {name!r}, which x={x!r} needs")
    kept = [line for line in lines if _finite(line.get("loss"))]
    return Curve([line[name] * factor for line in kept], [line["loss"] for line in kept], [ln["step"] for ln in kept])


def _with_joules(
    run: RunDir, train: list[Mapping[str, Any]], val: list[Mapping[str, Any]], record: RunRecord | None
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Every line with its joules: those it was logged with, or between two readings, on the straight line over time.

    Lines beyond the last reading are left out. Raises ValueError for a run without readings, with the reason.
    """
    read = sorted((ln["train_ms"], ln["energy_j"]) for ln in (*train, *val) if _finite(ln.get("energy_j")))
    if not read:
        reason = (record and record.energy_reason) or "its log was written without it"
        raise UserError(f"{run.path} has no energy by step, which x='joules' needs: {reason}")
    return _at_joules(train, [(0.0, 0.0), *read]), _at_joules(val, [(0.0, 0.0), *read])


def _at_joules(lines: Sequence[Mapping[str, Any]], read: Sequence[tuple[float, float]]) -> list[Mapping[str, Any]]:
    out: list[Mapping[str, Any]] = []
    for line in lines:
        after = bisect_left(read, (line["train_ms"], -math.inf))
        if after < len(read):
            (ms0, j0), (ms1, j1) = read[max(after - 1, 0)], read[after]
            share = (line["train_ms"] - ms0) / (ms1 - ms0) if ms1 > ms0 else 1.0
            out.append({**line, "energy_j": j0 + share * (j1 - j0)})
    return out


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
