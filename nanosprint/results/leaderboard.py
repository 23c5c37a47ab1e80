"""Runs on the disk as a ranked list of entries: what `nanosprint leaderboard` prints and `nanosprint report` draws.

An *entry* is all runs of one recipe hash that were carried out alike on alike devices. Entries are compared only where
they were scored on the same validation targets: each such set is a *board*.

The rule. With a target, an entry is ranked once its runs prove that its mean loss is below the target (one-sided
t-test, p < alpha), and ranks follow the mean training time: that of the whole run, not up to the first crossing, which
noise would flatter. Entries that prove nothing stand below without a rank, those whose mean is at the target first.
Without a target (other data than FineWeb, whose 3.28 is the benchmark's), ranks follow the mean loss.

Only finished runs count, but the others are counted beside them. A record whose log no longer has the checksum that the
record states is left out, and said so.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nanosprint.errors import UserError
from nanosprint.results.curves import recipe_key
from nanosprint.results.metrics import effective_lines, metrics_sha256
from nanosprint.results.record import DataRecord, RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.results.stats import test_below

FINEWEB_TARGET = 3.28  # the benchmark's, on FineWeb in GPT-2's tokens
ALPHA = 0.01
DEFAULT_DIRS = ("runs", "records")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a list needs of a run; a number that was never measured is None."""

    run: RunDir
    status: str  # as in a record, or "imported"
    recipe_name: str
    recipe: dict[str, Any]
    recipe_hash: str
    execution: dict[str, Any]
    devices: str
    board: str
    seed: int | None
    val_loss: float | None
    train_s: float | None
    energy_j: float | None
    tokens: int | None
    steps: int
    created: str | None
    commit: str | None
    dirty: bool
    versions: dict[str, Any]
    imported: str | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """The same for copies of a run; imported logs, which say too little, are each their own."""
        if self.created is None:
            return (self.run.path,)
        execution = json.dumps(self.execution, sort_keys=True)
        return (self.recipe_hash, execution, self.devices, self.seed, self.created, self.val_loss, self.train_s)

    @property
    def counts(self) -> bool:
        return self.status in ("finished", "imported") and self.val_loss is not None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Runs of one recipe, carried out alike. `rank` is None where `note` says why there is none."""

    results: tuple[Result, ...]  # those that count, by seed
    others: dict[str, int]  # runs that do not, by status
    p: float | None = None
    rank: int | None = None
    note: str = ""

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def newest(self) -> Result:
        return max(self.results, key=lambda r: r.created or "")

    @property
    def losses(self) -> list[float]:
        return [r.val_loss for r in self.results if r.val_loss is not None]

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    @property
    def loss_sd(self) -> float | None:
        return stdev(self.losses) if len(self.losses) > 1 else None

    def mean(self, name: str) -> float | None:
        """The mean of a field over all runs; None where one run lacks it."""
        values = [getattr(r, name) for r in self.results]
        return None if None in values else fmean(values)


@dataclass(frozen=True, kw_only=True)
class Board:
    """Entries that were scored on the same targets, in order."""

    name: str
    target: float | None
    alpha: float
    entries: tuple[Entry, ...]

    @property
    def rule(self) -> str:
        """How the ranks came about."""
        if self.target is None:
            return "Ranked by mean validation loss; no target is known for this data (--target sets one)."
        return (
            f"Ranked by mean training time of the whole run, among entries whose mean loss is below {self.target:g} "
            f"(one-sided t-test, p < {self.alpha:g}); the others follow without a rank."
        )


@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """All boards, and what was left out: path and reason."""

    boards: tuple[Board, ...]
    left_out: tuple[tuple[str, str], ...]


def leaderboard(dirs: Sequence[str | Path] = (), *, target: float | None = None, alpha: float = ALPHA) -> Leaderboard:
    """Rank all runs below `dirs`, by default runs/ and records/. `target`: for every board.

    Raises ValueError for a folder that does not exist, and where there is no run to list.
    """
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha={alpha} must lie between 0 and 0.5")
    folders = [Path(d) for d in dirs] or [Path(d) for d in DEFAULT_DIRS if Path(d).is_dir()]
    if not folders:
        raise UserError(f"there is neither {' nor '.join(DEFAULT_DIRS)} here: name folders that hold runs")
    results: list[Result] = []
    left_out: list[tuple[str, str]] = []
    seen: dict[tuple[Any, ...], Result] = {}
    for run in find_runs(folders):
        try:
            result = read_result(run)
        except ValueError as error:
            left_out.append((str(run.path), str(error)))
            continue
        first = seen.setdefault(result.identity, result)
        if first is result:
            results.append(result)
        else:  # counted twice it would make a claim look better founded than it is
            left_out.append((str(run.path), f"{run.path} is a copy of {first.run.path}"))
    boards = tuple(_boards(results, target, alpha))
    if not boards:
        reasons = "".join(f"\n  {reason}" for _, reason in left_out)
        raise UserError(f"no finished run with a validation loss below {', '.join(map(str, folders))}{reasons}")
    return Leaderboard(boards=boards, left_out=tuple(left_out))


def find_runs(folders: Iterable[Path]) -> Iterator[RunDir]:
    """Every folder below that holds a request or a record, each once, in the order of their paths."""
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: name folders that hold runs")
        for path, names, files in os.walk(folder):
            names.sort()
            run = RunDir(path)
            if {run.request_path.name, run.record_path.name} & set(files) and run.path.resolve() not in seen:
                seen.add(run.path.resolve())
                names.clear()
                yield run


def read_result(run: RunDir) -> Result:
    """A run as a list needs it. Raises ValueError where it has neither record nor import, or an edited log."""
    if not run.has_record and run.imported_from is not None:
        return _imported(run)
    record = RunRecord.load(run)
    if run.metrics_path.is_file() and metrics_sha256(run.metrics_path) != record.metrics_sha256:
        raise UserError(f"{run.metrics_path} is not the log that its record was made from: its checksum differs")
    return Result(
        run=run,
        status=record.status,
        recipe_name=str(record.recipe.get("name") or run.name),
        recipe=record.recipe,
        recipe_hash=record.recipe_hash,
        execution=record.execution,
        devices=_devices(record),
        board=_board_name(record.data),
        seed=record.seed,
        val_loss=record.val_loss,
        train_s=record.train_ms / 1e3,
        energy_j=record.energy_j,
        tokens=record.tokens,
        steps=record.steps,
        created=record.created,
        commit=record.commit,
        dirty=bool(record.dirty),
        versions=record.versions,
    )


def _imported(run: RunDir) -> Result:
    request, lines = run.read_request(), run.read_metrics()
    val = effective_lines(lines, "val")
    if not val:
        raise UserError(f"{run.path} has no validation loss: it cannot be listed")
    last, imported = val[-1], request["imported"]
    train_ms = last.get("train_ms")
    return Result(
        run=run,
        status="imported",
        recipe_name=str(request["recipe"]["name"]),
        recipe=request["recipe"],
        recipe_hash=recipe_key(request),
        execution={},
        devices=imported["devices"] or "not stated",
        board="imported logs",
        seed=None,
        val_loss=last["loss"],
        train_s=None if train_ms is None else train_ms / 1e3,
        energy_j=None,
        tokens=last.get("tokens"),
        steps=last["step"],
        created=None,
        commit=None,
        dirty=False,
        versions={},
        imported=f"{imported['format']} log {imported['log']}",
    )


def _devices(record: RunRecord) -> str:
    """ "8 x NVIDIA H200"; processes of one CPU share it."""
    names = Counter(str(device.get("name")) for device in record.devices)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())


def _board_name(data: DataRecord) -> str:
    """What the validation targets are: the files by name and content, and how many of their targets were scored."""
    files = [f for f in data.files if "val" in f.name] or list(data.files)
    content = "+".join(f.sha256[:8] for f in files)
    stem = files[0].name.split("_val")[0] if files else Path(data.dir).name
    count = "unknown" if data.val_tokens is None else f"{data.val_tokens:,}"
    return f"{stem}, {count} validation targets" + (f" ({content})" if content else "")


def _boards(results: Sequence[Result], target: float | None, alpha: float) -> Iterator[Board]:
    by_board: dict[str, list[Result]] = {}
    for result in results:
        by_board.setdefault(result.board, []).append(result)
    for name, members in sorted(by_board.items(), key=lambda item: (not item[0].startswith("fineweb"), item[0])):
        goal = target if target is not None else FINEWEB_TARGET if name.startswith("fineweb") else None
        entries = rank(_entries(members), goal, alpha)
        if entries:
            yield Board(name=name, target=goal, alpha=alpha, entries=tuple(entries))


def _entries(results: Sequence[Result]) -> list[Entry]:
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((r.recipe_hash, json.dumps(r.execution, sort_keys=True), r.devices), []).append(r)
    entries = []
    for group in groups.values():
        counted = sorted((r for r in group if r.counts), key=lambda r: (r.seed or 0, str(r.run.path)))
        others = dict(Counter(r.status for r in group if not r.counts))
        if counted:
            entries.append(Entry(results=tuple(counted), others=others))
    return entries


def rank(entries: Sequence[Entry], target: float | None, alpha: float) -> list[Entry]:
    """The entries in order, with ranks and p; see the module's head for the rule."""
    if target is None:
        ordered = sorted(entries, key=lambda e: e.loss)
        return [replace(e, rank=i) for i, e in enumerate(ordered, start=1)]
    judged = [_judged(e, target, alpha) for e in entries]
    ordered = sorted(judged, key=lambda e: (_class(e, target), _time(e) if e.loss <= target else e.loss))
    return [replace(e, rank=i) if not e.note else e for i, e in enumerate(ordered, start=1)]


def _judged(entry: Entry, target: float, alpha: float) -> Entry:
    """With `p`, and a note where it may not be ranked."""
    p = test_below(entry.losses, target).p if len(entry.losses) > 1 else None
    if entry.loss > target:
        note = f"mean loss is above the target {target:g}"
    elif p is None:
        note = "one run proves nothing" if len(entry.losses) == 1 else "losses without any spread prove nothing"
    elif p >= alpha:
        note = f"p = {p:.3f} is not below {alpha:g}: more runs are needed"
    else:
        note = "" if entry.mean("train_s") is not None else "training time is not known"
    return replace(entry, p=p, note=note)


def _class(entry: Entry, target: float) -> int:
    return 0 if not entry.note else 1 if entry.loss <= target else 2


def _time(entry: Entry) -> float:
    seconds = entry.mean("train_s")
    return float("inf") if seconds is None else seconds
