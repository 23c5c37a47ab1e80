"""Runs from start to record: `train` for a new one, `carry_out` for one whose request lies in a run directory.

The order matters. The run directory with its request exists before anything slow begins; the record is written last;
whatever ends a run in between leaves an event in its metrics and a checkpoint to go on from.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanosprint.config.edit import apply_overrides, to_dict
from nanosprint.config.recipe import Execution, Recipe
from nanosprint.data.lock import try_lock
from nanosprint.data.tokenizers import save_tokenizer
from nanosprint.errors import DivergedError, Interrupted, UserError
from nanosprint.optim.sharding import from_all, from_first
from nanosprint.results.metrics import metrics_sha256
from nanosprint.results.record import (
    OUTCOME,
    DataRecord,
    Mfu,
    RunRecord,
    ShardFile,
    Status,
    mean_watts,
    outcome_of,
    tokens_per_kwh,
)
from nanosprint.results.runs import RunDir
from nanosprint.training import checkpoint, distributed
from nanosprint.training.attention_choice import ATTENTION_LOGGER
from nanosprint.training.clock import Clock
from nanosprint.training.console import Display, open_display
from nanosprint.training.distributed import World
from nanosprint.training.energy import CountedElsewhere, EnergyMeter, open_meter
from nanosprint.training.environment import environment
from nanosprint.training.graphs import GraphCounter
from nanosprint.training.log import RunLog, noted
from nanosprint.training.loop import Loop
from nanosprint.training.peak import Peak, peak
from nanosprint.training.phases import Phases
from nanosprint.training.replay import Replayed
from nanosprint.training.request import RunRequest, save_request, start_run, timestamp
from nanosprint.training.reuse import Kept, release_memory
from nanosprint.training.selfcheck import check_data, check_processes
from nanosprint.training.setup import Data, Prepared, find_data, out_of_memory, prepare
from nanosprint.training.watch import Watch, open_watch


def train(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    seed: int = 1337,
    execution: Execution | Mapping[str, Any] | None = None,
    max_steps: int | None = None,
) -> RunRecord:
    """Train `recipe` and return its record; under torchrun every process calls this and gets the main one's record.

    out: the run directory, by default a new one under runs/. data: a folder of shards, by default the recipe's own
    under data/. execution: how to carry it out, an `Execution` or a mapping of its fields. Raises ValueError for what
    cannot work and DivergedError for a loss that is not finite.
    """
    carried: Execution = (
        execution if isinstance(execution, Execution) else apply_overrides(Execution(), execution or {})
    )
    if carried.gpus > 1 and distributed.launched_rank() is None:
        raise UserError(
            f"execution gpus={carried.gpus}: from Python this trains in the process that calls it; start several with "
            "torchrun, or use `nanosprint train --gpus`"
        )
    request = RunRequest(
        recipe=recipe.validate(),
        execution=carried,
        seed=seed,
        data=None if data is None else str(data),
        max_steps=max_steps,
        created=timestamp(),
    )
    return carry_out(request, start_run(request, out) if not distributed.launched_rank() else None)


def carry_out(
    request: RunRequest,
    run_dir: RunDir | None,
    *,
    resume: bool = False,
    console: bool = False,
    started: float | None = None,
    kept: Kept | None = None,
) -> RunRecord:
    """Train what `request` asks for, from its checkpoint with `resume`, and write the record into `run_dir`.

    `run_dir` is None on every process but the main one, which tells the others; all get its record.
    `started` is the time.time() of the command, for the start-up time. `kept`: of the runs before it in this process,
    whose graphs serve again where they are the same; what this run leaves is in it afterwards.
    Raises ValueError where `kept` is given to one of several processes.
    """
    started = time.time() if started is None else started
    if kept is not None and distributed.launched_rank() is not None:
        raise ValueError("several runs in one process are for one process: start each under torchrun by itself")
    world = distributed.start(request.execution.device, request.execution.timeout_s)
    with open_watch(world.rank, world.size, request.execution.timeout_s) as watch, taken(run_dir):
        check_processes(request, world)
        request, path = from_first((request, run_dir and str(run_dir.path)))
        session = _Session(request, RunDir(Path(path)), world, watch, resume, console, started)
        record: RunRecord = from_first(session.run(kept))
    # After an error the group is left standing: closing it would wake the others with errors of their own, and the
    # first to speak would not be the one that knows.
    distributed.stop()
    return record


def carry_out_in_turn(
    requests: Iterable[RunRequest], run_dirs: Iterable[RunDir], *, console: bool = False
) -> Iterator[RunRecord]:
    """Train one request after the other in this process; their records as they come.

    Runs whose compiled graphs are the same, such as seeds of one recipe or other learning rates, share them, and each
    is bit for bit what it would be by itself (on a CPU; on a GPU as far as that is repeatable). What a run raises ends
    the series: its run directory tells. Raises ValueError under torchrun.
    """
    kept = Kept()
    for request, run_dir in zip(requests, run_dirs, strict=True):
        record = carry_out(request, run_dir, console=console, kept=kept)
        release_memory()
        yield record


class _Session:
    """One process's part in one run, from its parts to its record."""

    def __init__(
        self,
        request: RunRequest,
        run_dir: RunDir,
        world: World,
        watch: Watch | None,
        resume: bool,
        console: bool,
        started: float,
    ) -> None:
        self.request, self.run_dir, self.world, self.started = request, run_dir, world, started
        self.watch = watch
        self.resume = resume
        self.began_before = run_dir.metrics_path.exists()
        self.graphs = GraphCounter()
        self.phases = Phases()
        self.phases.add("import", time.time() - started)
        self.environment = environment()
        self.gpu = self.environment["gpus"][world.device.index or 0] if world.device.type == "cuda" else None
        self.gpus = from_all(self.gpu)  # a process may see no other than its own
        display: Display | None = None
        if console and world.is_main:
            display = open_display(request.recipe.name, request.last_step)
        self.display = display
        if world.is_main:
            run_dir.write_environment(self.environment)
            if resume:
                save_request(run_dir, request)  # what the command line changed holds from now on
                run_dir.record_path.unlink(missing_ok=True)
                checkpoint.clean(run_dir.checkpoints_path)
        self.log = RunLog(
            run_dir, rank=world.rank, console=display, wandb=request.wandb, tensorboard=request.tensorboard
        )

    def run(self, kept: Kept | None = None) -> RunRecord | None:
        """Train; the record, on the main process. kept: see `carry_out`."""
        wanted = self.request.execution
        with self.log:
            try:
                with self.phases("data"):
                    data = find_data(self.request)
                    check_data(data, self.world)
                saved = self._saved()
                with noted(self.log, ATTENTION_LOGGER, "attention"):
                    prepared = prepare(self.request, self.world, data, kept, self.phases)
                if self.world.is_main:
                    save_tokenizer(data.tokenizer, self.run_dir.path)  # for sampling where the data is not
            except Exception as error:
                told = self._explained(error)
                self.log.event("failed", show=False, message=str(told) or type(told).__name__)
                raise told from error
            self._settle(prepared)
            try:
                return self._train(prepared, saved)
            finally:
                if kept is not None:
                    kept.put(wanted, prepared.request, prepared.state.model, prepared.loss_sum)

    def _saved(self) -> dict[str, Any] | None:
        """The checkpoint to go on from, the same on every process."""
        saved = None
        if self.resume and self.world.is_main:
            saved = checkpoint.load_latest(self.run_dir.checkpoints_path)
            if saved is not None and saved["recipe_hash"] != self.request.recipe.hash:
                raise UserError(
                    f"the checkpoint in {self.run_dir.path} belongs to recipe {saved['recipe_hash']}, "
                    f"not {self.request.recipe.hash}: start a new run for another recipe"
                )
        return from_first(saved)

    def _settle(self, prepared: Prepared) -> None:
        """Store what start-up decided, so that a resumed run and other seeds repeat it."""
        if self.display is not None:
            self.display.total_steps = prepared.request.last_step
        if prepared.request != self.request and self.world.is_main:
            save_request(self.run_dir, prepared.request)
        self.request = prepared.request

    def _train(self, prepared: Prepared, saved: dict[str, Any] | None) -> RunRecord | None:
        meter = self._meter()
        if isinstance(prepared.backward, Replayed):
            self.graphs.recorded = prepared.backward.recorded
        clock = Clock(prepared.synchronize, hooks=[meter, self.graphs])
        ceiling = peak(self.world.device, str(self.request.execution.compute))
        loop = Loop(prepared, self.run_dir, self.log, clock, ceiling, meter)
        if self.watch is not None:
            self.watch.step = lambda: prepared.state.step
            if self.world.is_main:
                self.watch.on_cause = lambda message: self.log.event("failed", show=False, message=message)
        if saved is not None:
            loop.resume_from(saved)
        if self.resume and self.began_before:  # a request that was only written is begun by resuming it, too
            self.log.event("resume", step=prepared.state.step)
        startup_ms = 1000 * (time.time() - self.started)
        parameters = prepared.state.model.num_parameters()
        self.log.event(
            "start",
            startup_ms=startup_ms,
            phases_s={name: round(seconds, 3) for name, seconds in self.phases.seconds.items()},
            graphs=[first._asdict() for first in prepared.first_calls],
            parameters=parameters,
            message=f"{parameters:,} parameters, {self._described()}, ready after {startup_ms / 1000:.1f} s",
        )
        try:
            loop()
        except BaseException as error:
            told = self._explained(error)
            # What ended the run is told, whatever else goes wrong now (a full disk, say).
            with contextlib.suppress(OSError, ValueError):
                self._end(loop, startup_ms, told)
            if told is not error:
                raise told from error
            raise
        return self._end(loop, startup_ms)

    def _explained(self, error: BaseException) -> BaseException:
        """What to tell of an error: the setting to lower, or which process was lost."""
        if isinstance(error, torch.OutOfMemoryError):
            return out_of_memory(self.request, error)
        return error if self.watch is None else self.watch.explained(error)

    def _end(self, loop: Loop, startup_ms: float, error: BaseException | None = None) -> RunRecord | None:
        """Close everything; the main process writes the record, unless the run was interrupted and will be resumed."""
        with contextlib.suppress(RuntimeError):  # a device that failed cannot be waited for
            loop.stop_clock()
        loop.meter.close()
        status = _status(error, loop.run)
        if error is not None:
            told = str(error) or type(error).__name__
            self.log.event(status, show=False, step=loop.run.state.step, message=told)
        if not self.world.is_main or isinstance(error, Interrupted | KeyboardInterrupt):
            self.log.close()
            return None
        record = self._record(loop, status, startup_ms)
        self.log.event(OUTCOME, show=False, step=record.steps, record=outcome_of(to_dict(record)))
        self.log.close()
        record = replace(record, metrics_sha256=metrics_sha256(self.run_dir.metrics_path))
        record.save(self.run_dir)
        return record

    def _record(self, loop: Loop, status: Status, startup_ms: float) -> RunRecord:
        request, state, train_ms = self.request, loop.run.state, loop.clock.train_ms
        val = loop.outcome.val if status in ("finished", "stopped") else None
        tokens_per_s = 1000 * state.tokens / train_ms if train_ms else None
        return RunRecord(
            status=status,
            recipe=to_dict(request.recipe),
            recipe_hash=request.recipe.hash,
            execution=to_dict(request.execution),
            seed=request.seed,
            world_size=self.world.size,
            devices=(self.environment["cpu"],) if self.gpu is None else tuple(self.gpus),
            versions=self.environment["versions"],
            commit=self.environment["commit"],
            dirty=self.environment["dirty"],
            data=_data_record(loop.run.data, val and val.tokens),
            epochs=loop.epochs_read(),
            steps=state.step,
            tokens=state.tokens,
            train_ms=train_ms,
            startup_ms=startup_ms,
            val_loss=val and val.loss,
            peak_memory_bytes=loop.memory.read(),
            tokens_per_s=tokens_per_s,
            mfu=_mfu(tokens_per_s, loop.flops_per_token, loop.peak, self.world.size),
            energy_j=loop.outcome.energy_j,
            energy_reason=loop.outcome.energy_reason,
            wait_fraction=1000 * loop.outcome.wait_s / train_ms if train_ms else None,
            metrics_sha256="",  # once the log is closed
            series=request.series,
            created=request.created,
            clock_graphs=self.graphs.count,
            mean_watts=mean_watts(loop.outcome.energy_j, train_ms),
            tokens_per_kwh=tokens_per_kwh(state.tokens, loop.outcome.energy_j),
            shared_graphs=loop.run.shares_graphs,
        )

    def _described(self) -> str:
        """How the run is carried out, in a few words."""
        execution = self.request.execution
        words = [f"{self.world.size} x {execution.device}", str(execution.compute), f"attention {execution.attention}"]
        words += [f"compile {execution.compile}", f"micro-batches of {execution.tokens_per_microbatch:,} tokens"]
        if execution.parts_per_microbatch != 1:
            words.append(f"in {execution.parts_per_microbatch} parts")
        if execution.activation_budget != 1:
            words.append(f"{execution.activation_budget:.0%} of the activations kept")
        return ", ".join(words)

    def _meter(self) -> EnergyMeter:
        """This process's share of the energy: its own GPU, or on a CPU the whole machine for one process of it."""
        if self.gpu is not None:
            return open_meter("cuda", [self.gpu["uuid"]])
        if self.world.local_rank:
            return EnergyMeter(CountedElsewhere())
        return open_meter(self.world.device.type)


@contextlib.contextmanager
def taken(run_dir: RunDir | None) -> Iterator[None]:
    """Keep other processes from training in `run_dir`. Raises UserError where one already does."""
    if run_dir is None:
        yield
        return
    file = try_lock(run_dir.path / ".lock")
    if file is None:
        raise UserError(f"another process is training in {run_dir.path}: wait for it, or stop it")
    with file:
        yield


def _status(error: BaseException | None, run: Prepared) -> Status:
    if error is None:
        return "finished" if run.state.step == run.recipe.train.num_steps else "stopped"
    if isinstance(error, DivergedError):
        return "diverged"
    return "stopped" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"


def _data_record(data: Data, val_tokens: int | None) -> DataRecord:
    described = data.describe()
    return DataRecord(dir=str(data.folder), files=tuple(ShardFile(**f) for f in described), val_tokens=val_tokens)


def _mfu(tokens_per_s: float | None, flops_per_token: float, ceiling: Peak, processes: int) -> Mfu:
    total = None if ceiling.flops is None else ceiling.flops * processes
    value = None if total is None or tokens_per_s is None else tokens_per_s * flops_per_token / total
    return Mfu(value=value, peak_flops=total, peak_source=ceiling.source, flops_per_token=flops_per_token)
