"""The outcome of a run, as one frozen value: `record.json`.

A record is evidence: it names the mathematics (recipe and hash), how they were carried out, on what, from which data
and at what cost, and it carries the checksum of the metrics that its numbers come from. The metrics end with the same
outcome, so that neither file can be changed without the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanosprint.errors import UserError
from nanosprint.results import jsonfile
from nanosprint.results.metrics import metrics_sha256
from nanosprint.results.runs import RunDir, Series

SCHEMA = 1
Status = Literal["finished", "stopped", "failed", "diverged"]
OUTCOME = "record"  # the event that ends a log
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A token file that was read, whole: its number of tokens and hexadecimal SHA-256."""

    name: str
    tokens: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """Which data a run read; `val_tokens` is the number of validation targets that were scored, each once."""

    dir: str
    files: tuple[ShardFile, ...]
    val_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Mfu:
    """Model FLOPs utilisation over training: `value` 0 .. 1 of `peak_flops`, which is per second and for all devices.

    `value` and `peak_flops` are None where the peak of the device is not known; `peak_source` says why.
    """

    value: float | None
    peak_flops: float | None
    peak_source: str
    flops_per_token: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run did. Times cover the clock's segments only; a number that was never measured is None.

    `status`: "finished" the schedule, "stopped" before its end on request, "failed" by an error, "diverged" to a loss
    that is not finite. `wait_fraction` is the share of the step time spent waiting for data, 0 .. 1.
    """

    status: Status
    recipe: dict
    recipe_hash: str
    execution: dict
    seed: int
    world_size: int
    devices: tuple[dict, ...]
    versions: dict
    commit: str | None
    dirty: bool | None
    data: DataRecord
    epochs: float
    steps: int
    tokens: int
    train_ms: float
    startup_ms: float
    val_loss: float | None
    peak_memory_bytes: int | None
    tokens_per_s: float | None
    mfu: Mfu | None
    energy_j: float | None
    energy_reason: str | None  # why energy_j is None
    wait_fraction: float | None
    metrics_sha256: str
    series: Series | None
    created: str  # ISO 8601 with the offset from UTC
    clock_graphs: int | None = None  # compiled while the clock ran; None: by a version that did not count them
    mean_watts: float | None = None  # energy_j by the clock's time; None: no energy, or a version that did not say
    tokens_per_kwh: float | None = None  # tokens by energy_j
    shared_graphs: bool | None = None  # those of a run before it in its process served: `startup_ms` is no cold start
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if (self.energy_j is None) == (self.energy_reason is None):
            raise ValueError(
                f"energy_j={self.energy_j} with energy_reason={self.energy_reason!r}: give either the joules "
                "or the reason why there are none"
            )

    def to_json(self) -> str:
        """Indented JSON. Raises ValueError for a number that is not finite: write None instead."""
        return jsonfile.dump(self, "record")

    @classmethod
    def from_json(cls, text: str, where: str = "record") -> "RunRecord":
        """The inverse of `to_json`. Raises ValueError for damage, unknown fields and newer schemas."""
        return cls._build(jsonfile.parse_object(text, where), where)

    def save(self, run_dir: RunDir | str | Path) -> Path:
        """Write `record.json` into a run directory, atomically; its path."""
        path = _as_run_dir(run_dir).record_path
        jsonfile.write(path, self)
        return path

    @classmethod
    def load(cls, path: RunDir | str | Path) -> "RunRecord":
        """Read a run directory's record, or a record file. Raises ValueError for a run that has none yet."""
        file = path.path if isinstance(path, RunDir) else Path(path)
        if isinstance(path, RunDir) or file.is_dir():
            run = RunDir(file)
            if not run.has_record:
                run.require_own()
                raise UserError(
                    f"{run.path} has no record yet: the run is going on or was killed; "
                    f"`nanosprint resume {run.path}` finishes it"
                )
            file = run.record_path
        return cls._build(jsonfile.read_object(file), str(file))

    @classmethod
    def _build(cls, data: dict[str, Any], where: str) -> "RunRecord":
        return jsonfile.build(cls, data, schema=SCHEMA, where=where)


def mean_watts(energy_j: float | None, train_ms: float) -> float | None:
    """Mean power while the clock ran; None where the energy is not known or there was no time."""
    return None if energy_j is None or not train_ms else 1000 * energy_j / train_ms


def tokens_per_kwh(tokens: int, energy_j: float | None) -> float | None:
    """None where the energy is not known, or zero."""
    return tokens * JOULES_PER_KWH / energy_j if energy_j else None


def check_metrics(run_dir: RunDir | str | Path) -> bool:
    """Whether the metrics of a run are those its record was made from. Raises ValueError where either is missing."""
    run = _as_run_dir(run_dir)
    return RunRecord.load(run).metrics_sha256 == metrics_sha256(run.metrics_path)


def outcome_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record, as a dict, without the checksum: what the last line of the metrics says, which the checksum covers."""
    return {key: value for key, value in record.items() if key != "metrics_sha256"}


def _as_run_dir(run_dir: RunDir | str | Path) -> RunDir:
    return run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
