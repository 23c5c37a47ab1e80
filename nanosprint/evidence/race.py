"""`nanosprint race`: recipes against each other over several seeds, in processes that the seeds of a recipe share.

    race.json        what is to be run, written first (evidence/series.py)
    <name>-<seed>/   a run directory each, with <name>-<seed>.log beside it: what the process said
    report.md        the outcome, for people; report.json holds the same numbers and every run's
    report.html      the runs as a page (results/report.py)

A run is begun by writing its request and carried out as by `nanosprint resume`, so that beginning and going on are one
thing: after Ctrl-C, a reboot or `kill -9`, `--resume` keeps what is finished and goes on with the rest. A run that
diverged is an outcome, too, and is kept; one that failed is tried again.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from nanosprint.data.datasets import ensure_dataset
from nanosprint.data.lock import locked, try_lock
from nanosprint.errors import UserError
from nanosprint.evidence.jobs import Preparation, Runner, check_prepare, gpus_for, orderly_end
from nanosprint.evidence.series import Entry, Race, claim_race_dir, load_race, save_race
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.training.request import Budget, load_request, save_request

_OFF = 0.1  # of a budget: 12 runs of 30 s, on a GPU of their own, took 30.0 to 30.6


def start(race: Race, out: Path | None) -> Path:
    """Make the race's folder and write its plan. Raises ValueError where its data are missing."""
    for one in race.contestants:
        ensure_dataset(one.recipe.data.name, None if race.data is None else Path(race.data))
    folder = claim_race_dir(out, "race" if race.baseline is None else "ablation")
    save_race(folder, race)
    return folder


def carry_on(folder: Path, say: Callable[[str], None], parallel: int = 1, prepare: int = 1) -> Race:
    """Carry out what is not done yet of the race in `folder`, `parallel` runs at a time, each on a GPU of its own.

    All runs of a contestant stay on one GPU, so that its budget is fitted once, and there. `prepare`, above 1: so many
    contestants on a GPU get their graphs side by side before any run there begins. Raises UserError where another
    process is at it, for several runs at a time of several processes each, and to prepare runs that share no process.
    """
    race = load_race(folder)
    if parallel > 1 and race.execution.gpus > 1:
        raise UserError(
            f"--gpus-parallel {parallel} is for runs of one process: this race has --gpus {race.execution.gpus}"
        )
    check_prepare(prepare, race.group(race.order[0]) is not None, "--processes each, nor with --gpus above 1")
    lock = try_lock(folder / ".lock")
    if lock is None:
        raise UserError(f"another process is carrying out the race in {folder}: wait for it, or stop it")
    with lock, orderly_end():
        left = [entry for entry in race.order if not is_settled(RunDir(folder / entry.dir))]
        say(f"{len(left)} of {len(race.order)} runs to do, in {folder}")
        runner = Runner(say)
        runner.run(
            left,
            lambda entry, gpu: _carry_out(race, entry, folder, runner, gpu),
            gpus=gpus_for(parallel),
            group=race.group if parallel == 1 else lambda entry: entry.contestant,
            ahead=Preparation(prepare, lambda entry: _begin(race, entry, folder, runner).path) if prepare > 1 else None,
        )
    return race


def is_settled(run: RunDir) -> bool:
    """Whether a run came to its end, by its last step or by divergence."""
    if not run.has_record:
        return False
    record = RunRecord.load(run)
    if record.status == "diverged":
        return True
    return record.status in ("finished", "stopped") and record.steps >= load_request(run).last_step


def _carry_out(race: Race, entry: Entry, folder: Path, runner: Runner, gpu: str | None) -> str:
    """Begin a run or go on with it; what came out. Raises ValueError where it failed."""
    run = _begin(race, entry, folder, runner)
    if not is_settled(run):
        runner.train(run.path, gpu=gpu, group=race.group(entry))
    if not race.keep_checkpoints:
        shutil.rmtree(run.checkpoints_path, ignore_errors=True)
    record = RunRecord.load(run)
    loss = "no loss" if record.val_loss is None else f"loss {record.val_loss:.4f}"
    rate = "" if record.tokens_per_s is None else f", {record.tokens_per_s:,.0f} tokens/s"
    seconds = f"{record.train_ms / 1000:.1f} s"
    shared = " with shared graphs" if record.shared_graphs else ""
    doubt = off_budget(race.budget, record.train_ms / 1000, record.steps, record.recipe["train"]["num_steps"])
    return f"{loss}, {record.steps} steps in {seconds}{rate}, start-up {record.startup_ms / 1000:.0f} s{shared}{doubt}"


def off_budget(budget: Budget | None, seconds: float, steps: int, planned: int) -> str:
    """What is to be said of a run that took far more or less than its budget of seconds; "" where it did not.

    Then steps took another time when they were timed for the budget, which all runs of the contestant share, than in
    this run. A step more or less is rounding, and a run that made fewer steps than `planned` was cut short.
    """
    if budget is None or budget.unit != "seconds" or steps < planned:
        return ""
    if abs(seconds - budget.amount) <= max(_OFF * budget.amount, seconds / steps):
        return ""
    return (
        f"; FAR FROM ITS BUDGET of {budget.amount:g} s: its steps were timed, or made, while something else used the "
        "device, so do not compare it, and race anew"
    )


def _begin(race: Race, entry: Entry, folder: Path, runner: Runner) -> RunDir:
    """The run's directory with its request in it, and nobody at it."""
    run = RunDir(folder / entry.dir)
    if not run.has_run:
        run.path.mkdir(exist_ok=True)
        save_request(run, race.request(entry, folder))
    _wait_for(run, lambda: runner.say(f"{entry.name}: still training since an earlier race: waiting for it"))
    return run


def _wait_for(run: RunDir, say: Callable[[], None]) -> None:
    """Wait for a process that trains in `run`: it may have outlived the race that began it."""
    path = run.path / ".lock"
    free = try_lock(path)
    if free is not None:
        free.close()
        return
    say()
    with locked(path):
        pass
