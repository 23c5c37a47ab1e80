"""Carries out training runs, those of a rung in one process, and keeps what their records say as small rows of JSON."""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.requests import request_of
from nanosprint.evidence.jobs import Preparation, Runner, check_prepare, cold_caches, gpus_for, orderly_end
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.training.request import RunRequest, parse_budget, start_run

_SETTLING_STEPS = 5  # of a run, left out of its steady rate


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: which table it belongs to ("full" or "worth"), its rung, budget and seed, and what it is asked."""

    kind: str
    rung: str
    setting: str
    seed: int
    overrides: dict[str, str]
    cold: bool = False  # whether nothing compiled before may be used
    data: str | None = None
    budget: str | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.rung}-{self.setting.replace(' ', '-')}-{self.seed}"

    @property
    def group(self) -> str | None:
        """The jobs with which this one can share a process: its rung's. None: with none."""
        return None if self.cold or self.overrides.get("exec.gpus", "1") != "1" else self.rung

    def request(self) -> RunRequest:
        """What the run is asked. Raises ValueError for overrides that cannot work."""
        words = {"train.checkpoint_last": "false", **self.overrides}  # gigabytes, and the record has what is asked for
        request = request_of(self.rung, words, self.seed, self.data)
        budget = None if self.budget is None else parse_budget(self.budget)
        return replace(request, budget=budget, command=tuple(sys.argv))


def run_jobs(
    jobs: Sequence[Job],
    results: Path,
    runs: Path,
    *,
    parallel: int = 1,
    share: bool = True,
    stop_after_s: float = float("inf"),
    prepare: int = 1,
) -> None:
    """Carry out those of `jobs` that have no row in `results` yet, `parallel` at a time, in order.

    share: the runs of a rung share a process, and so a GPU; else each has its own. `prepare`, above 1: so many rungs on
    a GPU get their graphs side by side before any run there begins; raises UserError where runs share no process.
    """
    together = share and all(one.group for one in jobs)
    check_prepare(prepare, together, "--processes each, --cold or exec.gpus above 1")
    results.mkdir(parents=True, exist_ok=True)
    left = [one for one in jobs if not _is_done(one, results)]
    print(f"{len(left)} of {len(jobs)} runs to do", flush=True)
    runner = Runner(partial(print, flush=True))
    begun: dict[str, Path] = {}

    def begin(one: Job) -> Path:
        begun[one.name] = folder = _begin(one, runs)
        return folder

    def carry_out(one: Job, gpu: str | None) -> str:
        started = time.monotonic()
        folder = begun.pop(one.name, None) or _begin(one, runs)
        row = _carry_out(one, folder, gpu, runner, one.group if share else None)
        (results / f"{one.name}.json").write_text(json.dumps(row, indent=1) + "\n")
        loss = "no loss" if row["val_loss"] is None else f"loss {row['val_loss']:.4f}"
        return (
            f"{loss}, {row['steps']} steps, {row['tokens_per_s']:,.0f} tokens/s, start-up "
            f"{row['startup_s']:.0f} s, {time.monotonic() - started:.0f} s in all"
        )

    with orderly_end():
        not_started = runner.run(
            left,
            carry_out,
            gpus=gpus_for(parallel),
            group=lambda one: one.group if share else None,
            stop_after_s=stop_after_s,
            ahead=Preparation(prepare, begin) if prepare > 1 else None,
        )
    if not_started:
        print(f"{not_started} runs were not started, {stop_after_s:g} s are over: start again for them", flush=True)


def _is_done(one: Job, results: Path) -> bool:
    """Whether there is a row of this run, with the same overrides."""
    path = results / f"{one.name}.json"
    return path.exists() and json.loads(path.read_text())["overrides"] == one.overrides


def _begin(one: Job, runs: Path) -> Path:
    """A directory of its own for this attempt, with the request in it. Raises ValueError for what cannot work."""
    request, folder = one.request(), _unused(runs / one.name)
    start_run(request, folder)
    return folder


def _carry_out(one: Job, folder: Path, gpu: str | None, runner: Runner, group: str | None) -> dict[str, Any]:
    """Run it and read its record. Raises ValueError with the last thing it said where it did not finish."""
    with cold_caches() if one.cold else nullcontext() as environment:
        runner.train(folder, gpu=gpu, group=group, environment=environment)
    row = row_of(one, folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return row


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3 ... where earlier attempts lie."""
    attempts = [folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 100))]
    return next(path for path in attempts if not path.exists())


def row_of(one: Job, folder: Path) -> dict[str, Any]:
    """What the tables need of a finished run. Raises ValueError where its record is missing or it did not finish."""
    record = RunRecord.load(RunDir(folder))
    if record.status != "finished":
        raise ValueError(f"{folder} is {record.status}, not finished")
    rate = steady_rate([line for line in RunDir(folder).read_metrics() if line["kind"] == "train"])
    rate = rate or record.tokens_per_s
    mfu = record.mfu
    known = mfu is not None and mfu.peak_flops is not None and rate is not None
    about = {key: value for key, value in asdict(one).items() if key not in ("data", "budget")}
    return {
        **about,
        "recipe_hash": record.recipe_hash,
        "steps": record.steps,
        "tokens": record.tokens,
        "train_s": record.train_ms / 1000,
        "startup_s": record.startup_ms / 1000,
        "shared_graphs": record.shared_graphs,
        "tokens_per_s": rate,
        "mfu": rate * mfu.flops_per_token / mfu.peak_flops if known else None,
        "memory_gib": None if record.peak_memory_bytes is None else record.peak_memory_bytes / 2**30,
        "val_loss": record.val_loss,
        "val_tokens": record.data.val_tokens,
        "execution": record.execution,
        "devices": record.devices,
        "versions": record.versions,
        "commit": record.commit,
        "dirty": record.dirty,
    }


def steady_rate(lines: list[dict[str, Any]]) -> float | None:
    """Tokens per second over all steps but the first few; None where there are no more than those."""
    if len(lines) <= _SETTLING_STEPS + 1:
        return None
    first, last = lines[_SETTLING_STEPS], lines[-1]
    return 1000 * float(last["tokens"] - first["tokens"]) / float(last["train_ms"] - first["train_ms"])
