"""What each run of a race came to, read from its record and its metrics, and never from what a process printed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanosprint.errors import UserError
from nanosprint.evidence.series import Entry, Race
from nanosprint.results.metrics import at_target, effective_lines, metrics_sha256
from nanosprint.results.record import RunRecord, mean_watts, tokens_per_kwh
from nanosprint.results.runs import RunDir


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. `problem` says why its numbers do not count; those that were not measured are None.

    Times are of training alone. `..._to_target` are interpolated between the two validations around the target, or
    those of the first validation where that is below it already; None where no validation reached it.
    """

    contestant: str
    seed: int
    index: int
    dir: str
    problem: str | None
    steps: int | None = None
    val_loss: float | None = None
    train_s: float | None = None
    tokens_per_s: float | None = None
    startup_s: float | None = None
    energy_j: float | None = None
    energy_reason: str | None = None
    mean_watts: float | None = None
    tokens_per_kwh: float | None = None
    time_to_target_s: float | None = None
    tokens_to_target: float | None = None
    energy_to_target_j: float | None = None


def read_results(race: Race, folder: Path) -> tuple[list[Result], list[RunRecord]]:
    """Every run of the race in its order, and the records of those that count.

    Raises ValueError where runs of one series are of unlike recipes: their mean would mean nothing.
    """
    results, records = [], []
    hashes: dict[str, str] = {}
    for entry in race.order:
        run = RunDir(folder / entry.dir)
        record = RunRecord.load(run) if run.has_record else None
        problem = _problem(race, entry, run, record)
        if record is None or problem is not None:
            results.append(_result(entry, problem or "no record"))
            continue
        first = hashes.setdefault(entry.contestant, record.recipe_hash)
        if record.recipe_hash != first:
            raise UserError(
                f"{run.path} trained recipe {record.recipe_hash}, other runs of {entry.contestant} {first}: these are "
                "not one series; start a new race"
            )
        results.append(_measured(entry, record, run, race.target))
        records.append(record)
    return results, records


def _problem(race: Race, entry: Entry, run: RunDir, record: RunRecord | None) -> str | None:
    """Why a run does not count, if so."""
    if not run.has_run:
        return "not started"
    if record is None:
        return _last_event(run, "failed") or "not finished"
    if record.status in ("failed", "diverged"):
        return f"{record.status}: {_last_event(run, record.status) or 'no reason was logged'}"
    if record.val_loss is None or not math.isfinite(record.val_loss):
        return "no validation loss"
    if (
        record.seed != entry.seed
        or record.series is None
        or record.series.id != race.contestant(entry.contestant).series
    ):
        return f"its record is that of another run (seed {record.seed}, series {record.series and record.series.id})"
    if metrics_sha256(run.metrics_path) != record.metrics_sha256:
        return "its metrics are not those that its record was made from"
    return None


def _last_event(run: RunDir, name: str) -> str | None:
    if not run.metrics_path.is_file():
        return None
    told = [line for line in run.read_metrics(lambda _: None) if line["kind"] == "event" and line["name"] == name]
    return str(told[-1].get("message")) if told else None


def _result(entry: Entry, problem: str | None, **measured: Any) -> Result:
    return Result(
        contestant=entry.contestant,
        seed=entry.seed,
        index=entry.index,
        dir=entry.dir,
        problem=problem,
        **measured,
    )


def _measured(entry: Entry, record: RunRecord, run: RunDir, target: float | None) -> Result:
    validations = effective_lines(run.read_metrics(), "val")
    reached = {
        field: None if target is None else at_target(validations, target, field)
        for field in ("train_ms", "tokens", "energy_j")
    }
    return _result(
        entry,
        None,
        steps=record.steps,
        val_loss=record.val_loss,
        train_s=record.train_ms / 1000,
        tokens_per_s=record.tokens_per_s,
        startup_s=record.startup_ms / 1000,
        energy_j=record.energy_j,
        energy_reason=record.energy_reason,
        mean_watts=mean_watts(record.energy_j, record.train_ms),  # not the record's, which older ones lack
        tokens_per_kwh=tokens_per_kwh(record.tokens, record.energy_j),
        time_to_target_s=None if reached["train_ms"] is None else reached["train_ms"] / 1000,
        tokens_to_target=reached["tokens"],
        energy_to_target_j=reached["energy_j"],
    )
