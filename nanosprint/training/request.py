"""What was asked for: everything needed to start a run, or to start it again. Standard library only.

The command line writes it into the run directory before anything slow is imported, so that a run killed at any
moment can be resumed.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from nanosprint.config.edit import from_dict, to_dict
from nanosprint.config.recipe import Execution, Recipe
from nanosprint.errors import UserError
from nanosprint.results.runs import RunDir, Series, claim_run_dir, new_run_dir

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much training a run may have; its schedule is stretched or shrunk to fit."""

    amount: float
    unit: Literal["seconds", "tokens"]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A recipe, how to carry it out, on what, and for how long."""

    recipe: Recipe
    execution: Execution = Execution()
    seed: int = 1337
    data: str | None = None  # a folder of shards; None: the recipe's data set under data/
    max_steps: int | None = None  # stop early, the schedule unchanged
    budget: Budget | None = None  # None once the recipe has been fitted to it
    profile: bool = False
    wandb: bool = False
    tensorboard: bool = False
    series: Series | None = None
    command: tuple[str, ...] = ()
    created: str = ""  # ISO 8601 with the offset from UTC

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"--max-steps {self.max_steps} must be at least 1")
        if self.execution.threads < 0:
            raise ValueError(f"exec.threads={self.execution.threads} must not be negative; 0 leaves torch's choice")
        if not 1 <= self.execution.timeout_s < float("inf"):
            raise ValueError(f"exec.timeout_s={self.execution.timeout_s:g} must be a number of seconds, 1 at least")
        if self.execution.gpus < 1:
            raise ValueError(f"--gpus {self.execution.gpus} must be at least 1")

    @property
    def last_step(self) -> int:
        """The number of steps after which the run ends."""
        steps = self.recipe.train.num_steps
        return steps if self.max_steps is None else min(steps, self.max_steps)


def parse_budget(text: str) -> Budget:
    """Read "60s", "5m", "20M" or "1.5B": seconds, minutes, millions or thousand millions of tokens.

    Raises ValueError for anything else.
    """
    units: dict[str, tuple[float, Literal["seconds", "tokens"]]] = {
        "s": (1, "seconds"),
        "m": (60, "seconds"),
        "h": (3600, "seconds"),
        "K": (1e3, "tokens"),
        "M": (1e6, "tokens"),
        "B": (1e9, "tokens"),
    }
    try:
        factor, unit = units[text[-1:]]
        amount = float(text[:-1]) * factor
        if not 0 < amount < float("inf"):
            raise ValueError
    except (KeyError, ValueError):
        raise ValueError(
            f"budget {text!r}: expected a positive time such as 60s or 5m, or tokens such as 20M"
        ) from None
    return Budget(amount=amount, unit=unit)


def start_run(request: RunRequest, out: str | Path | None) -> RunDir:
    """Make the run directory, by default a new one under runs/, and write the request into it.

    Raises ValueError where `out` already holds a run.
    """
    run_dir = claim_run_dir(out) if out is not None else new_run_dir("runs", request.recipe.name)
    save_request(run_dir, request)
    return run_dir


def save_request(run_dir: RunDir, request: RunRequest) -> None:
    """Write or replace `run.json`, atomically."""
    run_dir.write_request({"schema": SCHEMA, "recipe_hash": request.recipe.hash, **to_dict(request)})


def load_request(run_dir: RunDir) -> RunRequest:
    """What a run was asked for. Raises UserError for a file of another schema or an edited recipe."""
    stored = run_dir.require_own().read_request()
    schema, recipe_hash = stored.pop("schema", None), stored.pop("recipe_hash", None)
    where = run_dir.request_path
    if schema != SCHEMA:
        raise UserError(f"{where} has schema {schema}; this version of nanosprint reads schema {SCHEMA}")
    request: RunRequest = from_dict(RunRequest, stored)
    if request.recipe.hash != recipe_hash:
        raise UserError(
            f"{where} was edited: its recipe has hash {request.recipe.hash}, not {recipe_hash}. "
            "Start a new run for another recipe"
        )
    return request


def resumed(request: RunRequest, execution: Execution) -> RunRequest:
    """The request to go on with under `execution`; what depends on processes and device is chosen anew if they change.

    What `execution` itself says differently from before stands.
    """
    before = request.execution
    anew: set[str] = set()
    if execution.gpus != before.gpus or execution.device != before.device:
        anew |= {"lanes_per_microbatch", "tokens_per_microbatch", "parts_per_microbatch", "activation_budget"}
        anew.add("compilers")
        execution = replace(execution, threads=0 if execution.threads == before.threads else execution.threads)
    if execution.compile != before.compile:
        anew.add("compilers")
    if execution.lanes_per_microbatch != before.lanes_per_microbatch:
        anew.add("tokens_per_microbatch")
    if execution.device != before.device:
        anew |= {"compute", "attention", "compile"}
    plain = Execution()  # what it says by default is chosen anew
    choices = {name: getattr(plain, name) for name in anew if getattr(execution, name) == getattr(before, name)}
    return replace(request, execution=replace(execution, **choices), profile=False)


def timestamp() -> str:
    """The time now, ISO 8601 with the offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
