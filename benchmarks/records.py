"""Races and ablations as evidence: a folder each under records/, and the pages that are made of them.

    python -m benchmarks.records add runs/20261130-101500-race modern-sub3
    python -m benchmarks.records pages

"add" copies a race to records/<date>_<name>: its plan, and of every run what `nanosprint verify` reads (request, log,
record); weights and what processes said stay behind. The report and its page are then made anew, beside the copies.
What tells of the machine but not of the run goes: folders before the data's and the program's name and in messages, and
serial numbers of GPUs. The log's last line repeats the record, so both are written anew, checksum included; all else is
kept to the byte. A run that failed is copied like the others: a series is published whole.

"pages" writes the table in records/README.md, and all ablations into docs/ablations.md, from every report.json.
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.markdown import between, or_dash, table
from nanosprint.errors import UserError
from nanosprint.evidence.ablate import ablation_markdown
from nanosprint.evidence.outcome import publish
from nanosprint.evidence.report import show_p
from nanosprint.evidence.series import load_race, save_race
from nanosprint.files import atomic_write
from nanosprint.results.metrics import encode_line, metrics_sha256
from nanosprint.results.record import OUTCOME, RunRecord, outcome_of
from nanosprint.results.runs import RunDir

RECORDS, INDEX, ABLATIONS = Path("records"), Path("records/README.md"), Path("docs/ablations.md")
_FOLDERS = re.compile(rb"(?<![^\s\"'])/(?:[^/\s\"']+/)+(?=[^/\s\"']+)")  # of a path among words
MARKS = ("<!-- made from report.json -->", "<!-- /made -->")
NOTHING = "Nothing has been run yet."


def add(race_dir: Path, name: str, records: Path = RECORDS, say: Callable[[str], None] = print) -> Path:
    """Publish the race in a folder; the new folder. Raises ValueError for a bad or taken name, or runs not begun."""
    race = load_race(race_dir)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise UserError(f"name {name!r}: small letters, digits, dots and dashes")
    folder = records / f"{race.created[:10]}_{name}"
    if folder.exists():
        raise UserError(f"{folder} is there already: choose another name")
    found = [RunDir(race_dir / entry.dir) for entry in race.order]
    if missing := [run.name for run in found if not run.has_run or not run.metrics_path.exists()]:
        raise UserError(f"{race_dir}: {', '.join(missing)} not begun: `nanosprint race --resume {race_dir}`")
    folder.mkdir(parents=True)
    try:
        save_race(folder, replace(race, data=_last(race.data), command=_plain(race.command)))
        for run in found:
            _copy(run, RunDir(folder / run.name))
        publish(folder, say)
    except BaseException:
        shutil.rmtree(folder)  # nothing half published
        raise
    return folder


def _copy(run: RunDir, to: RunDir) -> None:
    """What a run is verified by, without its machine's folders and serial numbers."""
    to.path.mkdir()
    request = run.read_request()
    to.write_request({**request, "data": _last(request.get("data")), "command": _plain(request.get("command", ()))})
    if not run.has_record:
        to.metrics_path.write_bytes(run.metrics_path.read_bytes())
        return
    if metrics_sha256(run.metrics_path) != RunRecord.load(run).metrics_sha256:
        raise UserError(f"{run.metrics_path} is not the log that its record was made from")
    raw: dict[str, Any] = json.loads(run.record_path.read_text())
    raw["data"]["dir"] = _last(raw["data"]["dir"])
    raw["devices"] = [{**device, "uuid": None} if "uuid" in device else device for device in raw["devices"]]
    *lines, last = run.metrics_path.read_bytes().splitlines(keepends=True)
    end = json.loads(last)
    if end.get("name") != OUTCOME:
        raise UserError(f"{run.metrics_path} does not end with the outcome: it cannot be verified")
    to.metrics_path.write_bytes(
        b"".join(map(_without_folders, lines)) + encode_line({**end, "record": outcome_of(raw)}).encode() + b"\n"
    )
    raw["metrics_sha256"] = metrics_sha256(to.metrics_path)
    atomic_write(to.record_path, json.dumps(raw, indent=2) + "\n")


def _without_folders(line: bytes) -> bytes:
    """A line of the log; if it is a message, with files that begin at the root by their names."""
    return _FOLDERS.sub(b"", line) if b'"kind": "event"' in line else line


def _last(path: str | None) -> str | None:
    return None if path is None else Path(path).name


def _plain(command: Any) -> tuple[str, ...]:
    """Words of a command line, paths that begin at the root by their last part."""
    return tuple(Path(word).name if word.startswith("/") else word for word in command)


# --- pages ------------------------------------------------------------------------------------------------------------


def reports(records: Path) -> dict[str, dict[str, Any]]:
    """Every report.json by its folder's name, the newest first."""
    found = sorted(records.glob("*/report.json"), reverse=True)
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def index(found: dict[str, dict[str, Any]]) -> str:
    """A line for every contestant of every race, and one for every ablation."""
    head = ["folder", "recipe", "runs", "validation loss", "training, s", "tokens/kWh", "target", "p", "devices"]
    lines = []
    for name, report in found.items():
        shown = [one for one in report["contestants"] if report["baseline"] in (None, one["name"])]
        for one in shown:
            measures = one["measures"]
            lines.append(
                [
                    f"[{name}]({name}/report.md)",
                    one["name"] if report["baseline"] is None else f"{one['name']}, ablated",
                    f"{one['finished']}/{report['runs']}",
                    or_dash(measures["val_loss"]["mean"], "{:.4f}"),
                    or_dash(measures["train_s"]["mean"], "{:,.1f}"),
                    or_dash(measures["tokens_per_kwh"]["mean"], "{:.3g}"),
                    or_dash(report["target"], "{:g}"),
                    show_p((one["below_target"] or {}).get("p")),
                    ", ".join(report["conditions"]["devices"]),
                ]
            )
    return table(head, lines) if lines else NOTHING


def ablations(found: dict[str, dict[str, Any]], to_records: str = "../records") -> str:
    """Every ablation's report, one after the other."""
    parts = [
        f"{ablation_markdown(report, level=2, picture=f'{to_records}/{name}/ablation.png')}\nRuns: "
        f"[records/{name}]({to_records}/{name}/report.md)."
        for name, report in found.items()
        if report["baseline"] is not None
    ]
    return "\n\n".join(parts) or NOTHING


def write_pages(records: Path = RECORDS, page: Path = ABLATIONS) -> None:
    """Raises ValueError where a page lacks the marks."""
    found = reports(records)
    for path, text in ((records / INDEX.name, index(found)), (page, ablations(found))):
        atomic_write(path, between(path.read_text(), *MARKS, text))


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="publish a race under records/, and write the pages")
    adding.add_argument("race", type=Path, metavar="RACE")
    adding.add_argument("name", metavar="NAME")
    commands.add_parser("pages", help="write the pages")
    args = top.parse_args()
    try:
        if args.command == "add":
            print(f"published: {add(args.race, args.name)}")
        write_pages()
    except ValueError as error:
        top.error(str(error))


if __name__ == "__main__":
    main()
