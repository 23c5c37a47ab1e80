"""Publishes the outcome of a race: its report's files, and the tables in the terminal."""

from pathlib import Path
from typing import Any

from nanosprint.evidence.report import make_report, print_report, save_report
from nanosprint.evidence.series import load_race


def publish(folder: Path) -> dict[str, Any]:
    """Write the report of the race in `folder`, show it, and return its numbers."""
    report = make_report(load_race(folder), folder)
    save_report(folder, report)
    print_report(report)
    return report
