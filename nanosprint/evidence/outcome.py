"""Publishes the outcome of a race or an ablation: the files of its report, and tables in the terminal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanosprint.errors import UserError
from nanosprint.evidence.ablate import ablation_markdown, draw_effects, effect_table
from nanosprint.evidence.report import make_report, markdown, notes, print_tables, race_tables
from nanosprint.evidence.series import load_race
from nanosprint.files import atomic_write
from nanosprint.results import jsonfile


def publish(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the report of the race in `folder`, show it, and return its numbers."""
    report = make_report(load_race(folder), folder)
    jsonfile.write(folder / "report.json", report)
    atomic_write(folder / "report.md", markdown(report))
    files = [folder / "report.md"]
    if report["baseline"] is None:
        print_tables(race_tables(report), notes(report))
    else:
        files.append(folder / "ablation.md")
        atomic_write(files[-1], ablation_markdown(report))
        print_tables([effect_table(report)], notes(report))
        try:
            draw_effects(report, folder / "ablation.png")
            files.append(folder / "ablation.png")
        except UserError as error:  # hours of runs are not lost to a missing package
            say(f"no picture: {error}")
    say(f"report: {', '.join(map(str, files))}")
    return report
