"""`nanosprint ablate`: what each technique of a recipe is worth, as a race of the recipe against its variants.

    one out   the recipe without each of its techniques (recipes/switches.py), or without those that are named
    ladder    the recipe's ancestors, from the foot up
    grid      one or several keys through given values

The table is sorted by effect and says which effects these runs could not tell from zero.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from nanosprint.config.edit import parse_overrides
from nanosprint.config.recipe import Recipe
from nanosprint.errors import UserError
from nanosprint.evidence.report import ALPHA, as_markdown, notes, show_interval, show_p, summary_table
from nanosprint.extras import require
from nanosprint.files import atomic_write
from nanosprint.recipes import all_recipes, load_recipe
from nanosprint.recipes.switches import SWITCHES, checked, one_out, without
from nanosprint.results.plots import FAINT, GRID, INK

Words = Mapping[str, str]
Variants = tuple[dict[str, Recipe], dict[str, str]]  # by name; and what was left out, with the reason
PREFIX = "no-"
TOLD, UNTOLD = "#0072B2", "#b0b0b0"  # bars that can be told from zero, and others


def without_each(name: str, words: Words, switches: Sequence[str], everything: bool) -> Variants:
    """The recipe without each technique that `switches` names, NAME or NAME=KEY=VALUE, or without each it has.

    NAME=KEY=VALUE is a switch of one's own; given twice, it has two overrides. `everything` adds all known ones.
    Raises ValueError for a named switch that makes no sense in the recipe.
    """
    recipe = load_recipe(name, words)
    own: dict[str, list[str]] = {}
    for text in switches:
        switch, _, override = text.partition("=")
        own.setdefault(switch, []).extend([override] if override else [])
    variants, left_out = one_out(recipe) if everything else ({}, {})
    for switch, overrides in own.items():
        if overrides:
            changed = {**words, **parse_overrides(overrides)}
            variants[switch] = checked(recipe, switch, lambda changed=changed: load_recipe(name, changed))  # type: ignore[misc]
            left_out.pop(switch, None)
        else:
            variants[switch] = without(recipe, switch)
    return {name: recipe, **{f"{PREFIX}{switch}": variant for switch, variant in variants.items()}}, left_out


def load_all(names: Sequence[str], words: Words) -> dict[str, Recipe]:
    """Recipes by name with the overrides that are for all of them, and with their own, RECIPE:KEY=VALUE."""
    for word in words:
        if ":" in word and word.partition(":")[0] not in names:
            raise UserError(f"override {word!r} is for a recipe that does not take part: there are {', '.join(names)}")
    common = {key: value for key, value in words.items() if ":" not in key}
    own = {name: {k.partition(":")[2]: v for k, v in words.items() if k.startswith(f"{name}:")} for name in names}
    return {name: load_recipe(name, {**common, **own[name]}) for name in names}


def ancestors(name: str, words: Words) -> Variants:
    """The recipe and all it descends from, the oldest last; `words` as for `load_all`."""
    entries, chain = all_recipes(), [name]
    if name not in entries:
        load_recipe(name)  # says what there is
    while (parent := entries[chain[-1]].parent) is not None:
        chain.append(parent)
    if len(chain) == 1:
        raise UserError(f"recipe {name!r} has no parent, so that there is no ladder to walk: try --one-out")
    return load_all(chain, words), {}


def grid(name: str, words: Words, sweeps: Iterable[str]) -> Variants:
    """The recipe as it is, and with every combination of the sweeps' values, KEY=A,B,C each."""
    axes: list[list[tuple[str, str]]] = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not key or not equals or not all(_split(values)):
            raise UserError(f"--grid {sweep!r} is not of the form KEY=A,B,C")
        axes.append([(key, value) for value in _split(values)])
    recipe = load_recipe(name, words)
    variants = {name: recipe}
    for point in product(*axes):
        variant = load_recipe(name, {**words, **dict(point)})
        if variant not in variants.values():  # the recipe's own value, say
            variants[",".join(f"{key}={value}" for key, value in point)] = variant
    if len(variants) == 1:
        raise UserError(f"--grid {', '.join(sweeps)}: every value is the one that recipe {name!r} has already")
    return variants, {}


def _split(values: str) -> list[str]:
    """ "a,[b,c],d" at the commas outside brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# --- the outcome ----------------------------------------------------------------------------------------------------


def effects(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The variants' differences in loss from the recipe, the largest first; those with too few runs last."""
    rows = report["differences"]["val_loss"]
    return sorted(rows, key=lambda d: (d["estimate"] is None, -(d["estimate"] or 0.0)))


def is_told(row: dict[str, Any]) -> bool:
    """Whether an effect can be told from zero, among as many as there are."""
    return row["p_holm"] is not None and row["p_holm"] < ALPHA


def effect_table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: each variant's effect on loss and speed, and whether the one on loss can be told from zero."""
    by_name = {one["name"]: one for one in report["contestants"]}
    base = by_name[report["baseline"]]["measures"]
    head = ["variant", "what goes", "loss", "effect", "95 %", "p (Holm)", "loss is", "tokens/s", "runs"]
    rows = [[report["baseline"], "nothing", _form(base["val_loss"]["mean"], "{:.4f}"), *["-"] * 4, "-"]]
    rows[0].append(f"{by_name[report['baseline']]['finished']}/{report['runs']}")
    for row in effects(report):
        one = by_name[row["a"]]
        rate, own = one["measures"]["tokens_per_s"]["mean"], base["tokens_per_s"]["mean"]
        rows.append(
            [
                row["a"],
                _what_goes(row["a"]),
                _form(one["measures"]["val_loss"]["mean"], "{:.4f}"),
                _form(row["estimate"], "{:+.4f}"),
                show_interval(row, "{:+.4f}"),
                show_p(row["p_holm"]),
                _verdict(row),
                "-" if rate is None or own is None else f"{rate / own - 1:+.1%}",
                f"{one['finished']}/{report['runs']}",
            ]
        )
    return head, rows


def ablation_markdown(report: dict[str, Any], *, level: int = 1, picture: str = "ablation.png") -> str:
    """`ablation.md`, or a part of a page: with a heading of that level, the picture at that address."""
    head, rows = effect_table(report)
    if not any(row[1] for row in rows[1:]):  # no switches: a grid, or a ladder
        head, rows = [*head[:1], *head[2:]], [[*row[:1], *row[2:]] for row in rows]
    untold = [row["a"] for row in effects(report) if row["estimate"] is not None and not is_told(row)]
    text = [
        f"{'#' * level} Ablation of {report['baseline']}",
        "Effect: mean validation loss less that of the whole recipe; positive, where it is worse. Nothing else was "
        "tuned again. p-values are corrected for the number of variants, intervals are not.",
        as_markdown(head, rows),
        f"![effects with their 95 % intervals]({picture})",
    ]
    if untold:
        text.append(f"Could not be told from zero by these runs: {', '.join(untold)}.")
    lacking = [name for name, reason in report["left_out"].items() if "changes nothing" in reason]
    others = [reason for reason in report["left_out"].values() if "changes nothing" not in reason]
    if lacking:
        text.append(f"Not in this recipe: {', '.join(lacking)}.")
    text.append("\n".join(f"- {note}" for note in [*others, *notes(report)]))
    text += ["All that was measured, times and energy to the target included:", as_markdown(*summary_table(report))]
    return "\n\n".join(text) + "\n"


def draw_effects(report: dict[str, Any], out: Path) -> None:
    """A bar for each variant's effect with its interval, as PNG. Raises UserError where matplotlib is missing."""
    require("matplotlib", extra="quickstart", purpose="the picture of an ablation")
    from matplotlib.figure import Figure

    rows = [row for row in effects(report) if row["estimate"] is not None][::-1]
    figure = Figure(figsize=(8.0, 1.4 + 0.3 * max(1, len(rows))), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    spans = [[row["estimate"] - row["low"] for row in rows], [row["high"] - row["estimate"] for row in rows]]
    axes.barh(
        places,
        [row["estimate"] for row in rows],
        xerr=spans,
        height=0.62,
        color=[TOLD if is_told(row) else UNTOLD for row in rows],
        error_kw={"ecolor": INK, "elinewidth": 1.0, "capsize": 2.5},
    )
    axes.set_yticks(places, [row["a"] for row in rows])
    axes.axvline(0, color=INK, linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.set_xlabel("change of validation loss (nats per token), 95 % interval; grey: not told from zero", color=FAINT)
    axes.set_title(f"Ablation of {report['baseline']}", loc="left", color=INK, fontsize=12, fontweight="bold")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    atomic_write(out, buffer.getvalue())


def _what_goes(variant: str) -> str:
    known = SWITCHES.get(variant.removeprefix(PREFIX)) if variant.startswith(PREFIX) else None
    return known.summary if known else ""


def _verdict(row: dict[str, Any]) -> str:
    if row["estimate"] is None:
        return "unknown: too few runs"
    if not is_told(row):
        return "not told from zero"
    return "higher" if row["estimate"] > 0 else "lower"


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
