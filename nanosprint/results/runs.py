"""The run directory, as a contract between the program that trains and everything that looks at runs.

    run.json          what was asked for: the resolved recipe, how to carry it out, the command line
    environment.json  on what it runs: versions, devices, commit
    metrics.jsonl     the log, a JSON object a line (results/metrics.py)
    record.json       the outcome, written once at the end (results/record.py)
    checkpoints/      what `nanosprint resume` starts from
    profile/          traces of --profile
    loss.png          the loss curve

A folder is a run directory once it holds `run.json`, which is written before anything slow begins.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanosprint.errors import UserError
from nanosprint.results import jsonfile
from nanosprint.results.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Series:
    """The place of a run in a series of seeds: `index` counts from 0 and is below `size`."""

    id: str
    index: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"series.index={self.index} must lie between 0 and series.size - 1 = {self.size - 1}")


@dataclass(frozen=True, init=False)
class RunDir:
    """The files of one run by name. Building one touches nothing on the disk."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def request_path(self) -> Path:
        return self.path / "run.json"

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def record_path(self) -> Path:
        return self.path / "record.json"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def profile_path(self) -> Path:
        return self.path / "profile"

    @property
    def loss_plot_path(self) -> Path:
        return self.path / "loss.png"

    @property
    def has_run(self) -> bool:
        """Whether a run was ever started here."""
        return self.request_path.is_file()

    @property
    def has_record(self) -> bool:
        """Whether the run came to an end and wrote its record."""
        return self.record_path.is_file()

    def require(self) -> "RunDir":
        """Return self; raise ValueError where this is not a run directory."""
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not a run directory: there is no such folder")
        if not self.has_run:
            raise UserError(
                f"{self.path} is not a run directory: it holds no {self.request_path.name}. "
                "Runs are folders such as runs/<time>-<recipe>"
            )
        return self

    @property
    def imported_from(self) -> str | None:
        """The log that `nanosprint import` made this run from, or None for a run of this program."""
        return self.read_request().get("imported", {}).get("log")

    def require_own(self) -> "RunDir":
        """Return self; raise ValueError where this is no run directory, or an imported one."""
        if self.require().imported_from is not None:
            raise UserError(
                f"{self.path} was imported from {self.imported_from}: it has losses and times as that log tells them, "
                "but no record, recipe or weights, so it can be drawn and listed, not verified, resumed or sampled"
            )
        return self

    def read_request(self) -> dict[str, Any]:
        """What was asked for, as `train.request` wrote it. Raises ValueError without a run and for a damaged file."""
        return jsonfile.read_object(self.require().request_path)

    def write_request(self, request: dict[str, Any]) -> None:
        """Write or replace `run.json`, atomically. From now on the folder is a run directory."""
        jsonfile.write(self.request_path, request)

    def read_environment(self) -> dict[str, Any]:
        """Versions, devices and commit, as `training.environment.environment` gave them."""
        return jsonfile.read_object(self.require().environment_path)

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Write or replace `environment.json`, atomically."""
        jsonfile.write(self.environment_path, environment)

    def read_metrics(self, on_torn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
        """Every complete line of the log; see `metrics.read_metrics`."""
        path = self.require().metrics_path
        return list(read_metrics(path, on_torn) if on_torn else read_metrics(path))


def new_run_dir(root: str | Path, recipe_name: str) -> RunDir:
    """Make `root/<YYYYmmdd-HHMMSS>-<recipe>/` in local time; a number is added where another run took the name.

    `root` is made where it is missing. Raises ValueError where it is not a folder.
    """
    root = Path(root)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9._-]+', '-', recipe_name)}"
    _make_folder(root)
    number = 1
    while True:
        path = root / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()  # fails where another process was faster, which makes the name ours alone
            return RunDir(path)
        except FileExistsError:
            number += 1


def claim_run_dir(out: str | Path) -> RunDir:
    """Make the folder of --out ready for a new run. Raises ValueError where it already holds one, or parts of one."""
    run = RunDir(out)
    if run.has_run:
        raise UserError(
            f"--out {out} already holds a run: choose another folder, or continue it with `nanosprint resume {out}`"
        )
    leftovers = [p.name for p in (run.metrics_path, run.record_path, run.checkpoints_path) if p.exists()]
    if leftovers:
        raise UserError(
            f"--out {out} holds {', '.join(leftovers)} of a run whose {run.request_path.name} is gone: "
            "choose another folder"
        )
    _make_folder(run.path)
    return run


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path} cannot be a folder: a file of that name is in the way") from None
    except PermissionError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}; choose another place with --out") from None
