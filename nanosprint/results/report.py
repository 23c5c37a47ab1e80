"""The leaderboard as one HTML page that needs nothing but itself: no network, no other files.

Everything that comes from runs (names, paths, versions) is text to the page: it passes through `html.escape`, and
numbers for the scripts through JSON whose "<" cannot end the element it stands in. The page can be read without
scripts; they add sorting, values under the pointer, and a switch between light and dark.
"""

import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from nanosprint.config.edit import diff_lines
from nanosprint.errors import UserError
from nanosprint.extras import require
from nanosprint.files import atomic_write
from nanosprint.results.board_text import COLUMNS
from nanosprint.results.charts import NUM_COLOURS, Chart, Line, histogram, lines_of, loss_chart
from nanosprint.results.curves import Axis, RunCurves, banded, load_curves
from nanosprint.results.leaderboard import Board, Entry, Leaderboard, Result
from nanosprint.results.metrics import at_target, effective_lines, read_metrics
from nanosprint.results.record import JOULES_PER_KWH
from nanosprint.results.words import duration, energy, short

BaseOf = Callable[[dict[str, Any]], tuple[str, dict[str, Any]] | None]
FEWEST_FOR_A_HISTOGRAM = 3
NOT_COMPARED = ("name:", "source:")  # of a recipe's diff, as in `nanosprint recipes diff`


@dataclass
class Page:
    """What is collected while the page is written: charts by number, for the script."""

    base_of: BaseOf
    charts: list[dict[str, Any]]

    def salt(self) -> str:
        return f"nanosprint-{len(self.charts)}"


def write_report(
    board: Leaderboard, out: str | Path, *, title: str = "nanosprint leaderboard", base_of: BaseOf = lambda recipe: None
) -> Path:
    """Write the page to `out` (.html), atomically; returns it.

    `base_of` gives the name and content of what a recipe is compared with. Raises ValueError for another suffix and
    where matplotlib is missing.
    """
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: a report is an .html file")
    require("matplotlib", extra="quickstart", purpose="a report")
    atomic_write(out, render(board, title=title, base_of=base_of))
    return out


def render(board: Leaderboard, *, title: str, base_of: BaseOf) -> str:
    """The page as text."""
    page = Page(base_of, [])
    body = "".join(_board(page, one, number) for number, one in enumerate(board.boards, start=1))
    assets = files("nanosprint.results") / "assets"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<title>{_text(title)}</title>
<style>{(assets / "report.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header class="top"><div class="wide">
<div><h1>{_text(title)}</h1><p class="sub">{_summary(board)}</p></div>
<button id="theme" type="button" aria-pressed="false">Dark</button>
</div></header>
<main class="wide">
{body}{_left_out(board)}
</main>
<footer class="wide">Written by <code>nanosprint report</code> on {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.
Losses in nats a token. Times are of training steps alone, without start-up and validation.</footer>
<script type="application/json" id="charts">{_json(page.charts)}</script>
<script>{(assets / "report.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _summary(board: Leaderboard) -> str:
    entries = [entry for one in board.boards for entry in one.entries]
    runs = sum(len(entry.results) for entry in entries)
    parts = [_count(len(entries), "entry", "entries"), _count(runs, "run", "runs")]
    if len(board.boards) > 1:
        parts.append(_count(len(board.boards), "set", "sets") + " of validation data")
    return " · ".join(parts)


def _board(page: Page, board: Board, number: int) -> str:
    ids = [f"b{number}e{i}" for i in range(1, len(board.entries) + 1)]
    entries = "".join(
        _entry(page, e, i, board.target, is_open=number == 1 and n == 0)
        for n, (e, i) in enumerate(zip(board.entries, ids, strict=True))
    )
    return f"""<section class="board">
<h2>{_text(board.name)}</h2>
<p class="rule">{_text(board.rule)}</p>
<div class="scroll" tabindex="0" role="region" aria-label="Entries on {_text(board.name)}"><table class="sortable">
<thead><tr>{"".join(_head(c.head, c.is_number) for c in COLUMNS)}</tr></thead>
<tbody>{"".join(_row(e, i) for e, i in zip(board.entries, ids, strict=True))}</tbody>
</table></div>
{_overview(page, board)}{entries}
</section>
"""


def _head(head: str, is_number: bool) -> str:
    kind = ' class="num"' if is_number else ""
    button = f'<button type="button">{head}<span aria-hidden="true"></span></button>'
    return f'<th scope="col"{kind} aria-sort="none">{button}</th>'


def _row(entry: Entry, anchor: str) -> str:
    cells = []
    for column in COLUMNS:
        value, text = column.value(entry), _text(column.text(entry))
        kind = ' class="num"' if column.is_number else ""
        if column.head == "recipe":
            name, hash_ = _text(entry.first.recipe_name), _text(entry.first.recipe_hash[:6])
            text, kind = f'<a href="#{anchor}">{name}</a> <code>{hash_}</code>', ' class="name"'
        cells.append(f'<td{kind} data-v="{"" if value is None else _text(value)}">{text}</td>')
    return f"<tr{' class=first' if entry.rank == 1 else ''}>{''.join(cells)}</tr>"


# --- an entry ---------------------------------------------------------------------------------------------------------


def _entry(page: Page, entry: Entry, anchor: str, target: float | None, is_open: bool) -> str:
    rank = "–" if entry.rank is None else f"{entry.rank}"
    note = f'<p class="note">Not ranked: {_text(entry.note)}.</p>' if entry.note else ""
    return f"""<details class="entry" id="{anchor}"{" open" if is_open else ""}>
<summary><span class="rank">{rank}</span><span class="title">{_text(entry.first.recipe_name)}</span>
<code>{_text(entry.first.recipe_hash)}</code><span class="brief">{_brief(entry)}</span></summary>
{note}<dl class="tiles">{_tiles(entry, target)}</dl>
<div class="grid">{_charts(page, entry)}</div>
<div class="grid facts">{_difference(page, entry)}{_hardware(entry)}</div>
{_runs(entry)}
</details>
"""


def _brief(entry: Entry) -> str:
    seconds = entry.mean("train_s")
    return f"{entry.loss:.4f}" + ("" if seconds is None else f" in {duration(seconds)}")


def _tiles(entry: Entry, target: float | None) -> str:
    tiles = []
    for column in COLUMNS:
        if column.head in ("loss", "p", "time", "energy", "tokens", "runs"):
            tiles.append((column.head, column.text(entry)))
    joules, tokens, seconds = (entry.mean(name) for name in ("energy_j", "tokens", "train_s"))
    if joules and tokens:
        tiles.append(("tokens/kWh", short(tokens * JOULES_PER_KWH / joules)))
    if joules and seconds:
        tiles.append(("mean power", f"{joules / seconds:,.0f} W"))
    if target is not None:
        shown: list[tuple[str, str, Callable[[float], str]]] = [
            ("time", "train_ms", lambda ms: duration(ms / 1000)), ("energy", "energy_j", energy)]  # fmt: skip
        for name, field, words in shown:
            if (mean := _mean_at_target(entry, target, field)) is not None:
                tiles.append((f"{name} to {target:g}", words(mean)))
    return "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in tiles if v != "–")


def _mean_at_target(entry: Entry, target: float, field: str) -> float | None:
    """The mean of `field` when the validation loss fell to the target; None where a run does not tell."""
    found = []
    for result in entry.results:
        path = result.run.metrics_path
        lines = read_metrics(path) if path.is_file() else []
        found.append(at_target(effective_lines(lines, "val"), target, field))
    known = [value for value in found if value is not None]
    return fmean(known) if len(known) == len(found) else None


def _charts(page: Page, entry: Entry) -> str:
    parts = [_loss(page, entry, "step"), _loss(page, entry, "seconds")]
    seconds = [r.train_s for r in entry.results if r.train_s is not None]
    if len(seconds) >= FEWEST_FOR_A_HISTOGRAM:
        svg = histogram(seconds, page.salt() + "h")
        label = f"Histogram of the training times of {len(seconds)} runs"
        parts.append(
            _figure("Runs by training time", f'<div class="chart" role="img" aria-label="{label}">{svg}</div>')
        )
    return "".join(parts)


def _loss(page: Page, entry: Entry, x: Axis) -> str:
    caption = {"step": "Loss over steps", "seconds": "Loss over seconds"}[x]
    try:
        runs = banded([load_curves(r.run, x) for r in entry.results])
    except ValueError as error:
        return _figure(caption, f'<p class="missing">Not drawn: {_text(error)}.</p>')
    names = ["" if len(runs) == 1 else f", {_who(r)}" for r in runs]
    chart = loss_chart(lines_of(runs, names), x, page.salt())
    band = "band: lowest to highest run" if any(r.num_runs > 1 for r in runs) else ""
    return _figure(caption, _interactive(page, chart, caption), band)


def _who(run: RunCurves) -> str:
    return f"mean of {run.num_runs}" if run.num_runs > 1 else run.run.name if run.seed is None else f"seed {run.seed}"


def _figure(caption: str, inner: str, note: str = "") -> str:
    small = f"<small>{_text(note)}</small>" if note else ""
    return f'<figure class="card"><figcaption>{_text(caption)}{small}</figcaption>{inner}</figure>'


def _interactive(page: Page, chart: Chart, caption: str) -> str:
    page.charts.append(chart.data)
    last = "; ".join(f"{s['name']} ends at {s['y'][-1]:.4f}" for s in chart.data["series"])
    label = _text(f"{caption}: {last}. Arrow keys move along the curve.")
    return (
        f'<div class="chart hover" tabindex="0" role="img" aria-label="{label}" '
        f'data-chart="{len(page.charts) - 1}">{chart.svg}</div>'
    )


def _overview(page: Page, board: Board) -> str:
    """Validation loss of all entries over time, where at least two can be drawn."""
    lines: list[Line] = []
    keys = []
    for entry in board.entries[:NUM_COLOURS]:
        try:
            first = banded([load_curves(r.run, "seconds") for r in entry.results])[0]
        except ValueError:
            continue  # its own section says why
        if first.val.x:
            line = Line(f"{entry.first.recipe_name} {entry.first.recipe_hash[:6]}", first.val, len(lines))
            lines.append(line)
            keys.append(_key(line, entry))
    if len(lines) < 2:
        return ""
    chart = loss_chart(lines, "seconds", page.salt())
    more = len(board.entries) - len(lines)
    some = "" if more == 0 else f"{_count(more, 'entry', 'entries')} not shown"
    drawn = _interactive(page, chart, "Validation loss over seconds")
    inner = f'<div class="split">{drawn}<ul class="keys">{"".join(keys)}</ul></div>'
    return f'<div class="overview">{_figure("Validation loss over seconds", inner, some)}</div>'


def _key(line: Line, entry: Entry) -> str:
    return (
        f'<li><i style="background:var(--s{line.colour})"></i><span>{_text(line.name)}</span>'
        f"<small>{_text(_brief(entry))}</small></li>"
    )


def _difference(page: Page, entry: Entry) -> str:
    base = None if entry.first.imported else page.base_of(entry.first.recipe)
    if base is None:
        reason = "an imported log holds no recipe" if entry.first.imported else "no recipe of that name is registered"
        return f'<div class="card"><h3>Recipe</h3><p class="missing">Not compared: {reason}.</p></div>'
    name, recipe = base
    lines = [line for line in diff_lines(recipe, entry.first.recipe) if not line.startswith(NOT_COMPARED)]
    rows = "".join(f"<li>{_change(line)}</li>" for line in lines)
    inner = f'<ul class="diff">{rows}</ul>' if rows else '<p class="missing">No difference.</p>'
    head = f"Against <code>{_text(name)}</code> · {_count(len(lines), 'change', 'changes')}"
    return f'<div class="card"><h3>{head}</h3>{inner}</div>'


def _change(line: str) -> str:
    key, _, values = line.partition(": ")
    old, _, new = values.partition(" -> ")
    return f"<b>{_text(key)}</b> <del>{_text(old)}</del> <ins>{_text(new)}</ins>"


def _hardware(entry: Entry) -> str:
    newest = entry.newest
    rows: list[tuple[str, Any]] = [("devices", newest.devices)]
    rows += [(k, v) for k, v in newest.versions.items() if v is not None]
    rows += [(k, v) for k, v in newest.execution.items() if v is not None]
    rows += [("source", newest.imported)] if newest.imported else []
    rows += [("commit", newest.commit + (", with edits" if newest.dirty else ""))] if newest.commit else []
    items = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in rows)
    return f'<div class="card"><h3>Hardware and versions</h3><dl class="pairs">{items}</dl></div>'


def _runs(entry: Entry) -> str:
    heads = ("seed", "loss", "time", "energy", "steps", "date", "folder")
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in _cells(r))}</tr>" for r in entry.results)
    others = "; ".join(f"{count} {status}" for status, count in entry.others.items())
    more = f'<p class="missing">Not counted: {_text(others)}.</p>' if others else ""
    head = "".join(f'<th scope="col">{h}</th>' for h in heads)
    return (
        f'<div class="card"><h3>Runs</h3>{more}<div class="scroll" tabindex="0" role="region" aria-label="Runs">'
        f'<table class="runs"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>'
    )


def _cells(r: Result) -> Iterator[str]:
    yield "–" if r.seed is None else str(r.seed)
    yield "–" if r.val_loss is None else f"{r.val_loss:.4f}"
    yield "–" if r.train_s is None else duration(r.train_s)
    yield "–" if r.energy_j is None else energy(r.energy_j)
    yield f"{r.steps:,}"
    yield (r.created or "–")[:16].replace("T", " ")
    yield str(r.run.path)


def _left_out(board: Leaderboard) -> str:
    if not board.left_out:
        return ""
    rows = "".join(f"<li>{_text(reason)}</li>" for _, reason in board.left_out)
    count = _count(len(board.left_out), "run", "runs")
    inner = f'<details class="entry"><summary>Left out: {count}</summary><ul class="out">{rows}</ul></details>'
    return f'<section class="board">{inner}</section>'


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _json(value: Sequence[Any]) -> str:
    """JSON for a script element, which only "</" could end."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
