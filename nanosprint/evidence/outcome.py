"""Publishes the outcome of a race or an ablation: the files of its report, and tables in the terminal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanosprint.errors import UserError
from nanosprint.evidence.ablate import ablation_markdown, draw_effects, effect_table
from nanosprint.evidence.report import make_report, markdown, notes, print_tables, race_tables
from nanosprint.evidence.series import Race, load_race
from nanosprint.files import atomic_write
from nanosprint.recipes import base_of
from nanosprint.results import jsonfile
from nanosprint.results.leaderboard import leaderboard
from nanosprint.results.report import write_report


def publish(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the report of the race in `folder`, show it, and return its numbers."""
    race = load_race(folder)
    report = make_report(race, folder)
    jsonfile.write(folder / "report.json", report)
    atomic_write(folder / "report.md", markdown(report))
    files = [folder / "report.md"]
    if report["baseline"] is None:
        print_tables(race_tables(report), notes(report))
    else:
        files.append(folder / "ablation.md")
        atomic_write(files[-1], ablation_markdown(report))
        print_tables([effect_table(report)], notes(report))
        files += _made(folder / "ablation.png", lambda path: draw_effects(report, path), say)
    if report["conditions"]["devices"]:  # at least one run counts
        files += _made(folder / "report.html", lambda path: _write_page(race, path), say)
    say(f"report: {', '.join(map(str, files))}")
    return report


def _write_page(race: Race, path: Path) -> None:
    """The runs beside it as a page, ranked by the race's target."""
    names = ", ".join(one.name for one in race.contestants) if race.baseline is None else race.baseline
    board = leaderboard([path.parent], target=race.target)
    write_report(board, path, title=f"{'Race' if race.baseline is None else 'Ablation'}: {names}", base_of=base_of)


def _made(path: Path, make: Callable[[Path], Any], say: Callable[[str], None]) -> list[Path]:
    """The path, once it is made; nothing, and a word, where a package is missing: that must not cost hours of runs."""
    try:
        make(path)
    except UserError as error:
        say(f"no {path.name}: {error}")
        return []
    return [path]
