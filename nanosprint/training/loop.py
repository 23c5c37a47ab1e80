"""The training loop, to be read in one sitting.

    while steps are left:  save if due · validate if due · train a step · log if due

The clock runs during training steps only. A step's loss stays on the device until the next log line, so that the
program never waits for the device in between.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanosprint.data.loader import validation_batches
from nanosprint.data.prefixes import prefixes_of
from nanosprint.errors import DivergedError, Interrupted, UserError
from nanosprint.optim.sharding import from_first, sum_over_processes
from nanosprint.results.runs import RunDir
from nanosprint.training import checkpoint, distributed
from nanosprint.training.batch import ModelStage, model_inputs
from nanosprint.training.clock import Clock
from nanosprint.training.energy import EnergyMeter
from nanosprint.training.evaluate import Validation, evaluate
from nanosprint.training.log import RunLog, train_line
from nanosprint.training.memory import PeakMemory
from nanosprint.training.peak import Peak
from nanosprint.training.profile import profiled
from nanosprint.training.selfcheck import differing_weights
from nanosprint.training.setup import Prepared, open_loader
from nanosprint.training.step import train_step
from nanosprint.training.stopping import StopRequest
from nanosprint.training.warmup import validation_batch_tokens

ENERGY_EVERY_S = 2.0  # between two readings on the clock: each takes up to a few milliseconds of it


@dataclass
class Outcome:
    """What the loop leaves for the record."""

    val: Validation | None = None
    wait_s: float = 0.0  # of the training time, waiting for data
    energy_j: float | None = None  # of all processes
    energy_reason: str | None = "the run did not come to its end"


class Loop:
    """Trains a prepared run from its present state to its last step, or until it is stopped."""

    def __init__(
        self, run: Prepared, run_dir: RunDir, log: RunLog, clock: Clock, peak: Peak, meter: EnergyMeter
    ) -> None:
        self.run, self.run_dir, self.log, self.clock, self.peak, self.meter = run, run_dir, log, clock, peak, meter
        self.outcome = Outcome()
        self.stage = ModelStage(run.state.model)
        self.pending: list[tuple[int, int, Tensor, int, Any]] = []  # step, tokens, loss sum, step's tokens, mark
        self._has_prefixes = False
        self._energy_at, self._energy_seen = time.monotonic(), (0.0, 0.0)  # last reading: when; train_ms and joules
        self.memory = PeakMemory(run.world.device)
        self.memory.resume()  # warm-up does not count
        self.saved_step, self.saved_at = run.state.step, time.monotonic()
        middle = run.recipe.plan(run.recipe.train.num_steps // 2)
        self.flops_per_token = run.state.model.flops_per_token(middle.seq_len, middle.windows)

    def resume_from(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.run.state.restore(saved)
        self.clock.restore(self.run.state.train_ms)
        if self.run.world.is_main:
            self.meter.restore(saved["energy"])
        step, last = self.run.state.step, self.run.request.last_step
        if step > last:
            raise UserError(f"the run is at step {step} already, beyond --max-steps {last}")
        self.outcome.wait_s = saved["wait_s"]
        self._energy_seen = (self.run.state.train_ms, self.meter.energy_j or 0.0)
        self.saved_step = self.run.state.step

    def epochs_read(self) -> float:
        """Passes over the training tokens so far."""
        reader = self.run.state.reader
        return 0.0 if reader is None else float(reader["epochs_read"])

    def __call__(self) -> Outcome:
        run, state, recipe = self.run, self.run.state, self.run.recipe
        last = run.request.last_step
        profile_dir = self.run_dir.profile_path if run.request.profile and run.world.is_main else None
        with (
            open_loader(run.request, run.data, run.world, num_steps=last, state=state.reader) as loader,
            StopRequest(patient=run.world.size > 1) as stop,
            profiled(profile_dir, run.world.device) as profiler,
        ):
            steps = iter(loader)
            while True:
                if self._checkpoint_due(last):
                    self.save()
                if self._validation_due(last):
                    self.validate()
                if state.step == last:
                    self._try_blends()
                    self.outcome.energy_j, self.outcome.energy_reason = self.energy()
                    self._compare_weights()
                    return self.outcome
                if not self.clock.running:
                    self.clock.start()
                    self._set_prefixes()
                self._train(next(steps))
                if profiler is not None:
                    if profiler.writes_now:
                        self.stop_clock()
                    profiler.step()
                if state.step % recipe.train.log_every == 0 or state.step == last:
                    self.flush()
                if self._stopped(stop, last):
                    raise Interrupted(stop.signum or 0, state.step, saved=self.save())

    def _train(self, data: Any) -> None:
        run, state = self.run, self.run.state
        plan = run.recipe.plan(state.step)
        inputs = model_inputs(data.micro_batches, plan, self.stage.enter(plan), run.parts)
        loss = train_step(run.backward, state, inputs, plan, run.recipe.train)
        state.step += 1
        state.tokens += plan.batch_tokens
        state.reader = data.state_after
        self.outcome.wait_s += data.wait_s
        self.pending.append((state.step, state.tokens, loss, plan.batch_tokens, self._mark()))

    def _set_prefixes(self) -> None:
        """Build the table that the loss of prefixes needs, once, on the clock: it is part of training."""
        run, stages = self.run, self.run.recipe.schedule.stages
        if self._has_prefixes or stages is None or not any(stage.loss.prefix for stage in stages.stages):
            return
        table = prefixes_of(run.data.tokenizer, run.recipe.model.vocab_size)
        run.state.model.set_prefixes(torch.from_numpy(table))
        self._has_prefixes = True

    def flush(self) -> None:
        """Bring the losses of the last steps to the log. Raises DivergedError at the first that is not finite."""
        rows, self.pending = self.pending, []
        if not rows:
            return
        losses = sum_over_processes(torch.stack([row[2] for row in rows])).tolist()
        now = self._mark(wait=True)
        now_ms = self.clock.train_ms
        lines = []
        for (step, tokens, _, step_tokens, mark), loss_sum in zip(rows, losses, strict=True):
            ms = now_ms - _ms_between(mark, now)
            lines.append(train_line(step=step, tokens=tokens, loss=loss_sum / step_tokens, train_ms=ms))
        lines[-1].update(self._live(lines[-1]["tokens"], now_ms))
        self.log.write(lines)
        for line in lines:
            if not math.isfinite(line["loss"]):
                raise DivergedError(line["step"], line["loss"], self._hint(line["step"]))

    def _hint(self, step: int) -> str | None:
        """What else than divergence makes the loss of the step that ended at `step` NaN."""
        loss = self.run.recipe.plan(step - 1).loss
        if loss is None or loss.sampled is None:
            return None
        return (
            f"or raise schedule.stages' loss.sampled (now {loss.sampled}), which is NaN where a micro-batch has more "
            "tokens of the vocabulary for labels"
        )

    def save(self) -> bool:
        """Write a checkpoint, off the clock; whether that worked, on every process.

        A full disk is reported, and training goes on with the last good one.
        """
        state = self.run.state
        self.stop_clock()
        self.flush()
        self._check_weights()
        joules, reason = self.energy()
        state.train_ms = self.clock.train_ms
        captured = state.capture(keep=self.run.world.is_main)
        self.saved_step, self.saved_at = state.step, time.monotonic()
        written = captured is not None and self._write_checkpoint(captured, joules, reason)
        return bool(from_first(written))

    def _check_weights(self) -> None:
        """Raise DivergedError if a weight is not finite: the loss shows it a step later than the update."""
        finite = torch.stack([p.detach().isfinite().all() for p in self.run.state.model.parameters()])
        if not bool(finite.all()):
            raise DivergedError(self.run.state.step, math.nan)

    def _write_checkpoint(self, captured: dict[str, Any], joules: float | None, reason: str | None) -> bool:
        state = self.run.state
        content = {
            **captured,
            "recipe_hash": self.run.recipe.hash,
            "energy": {"energy_j": joules, "reason": reason},
            "wait_s": self.outcome.wait_s,
        }
        try:
            path = checkpoint.save(self.run_dir.checkpoints_path, content, state.step)
            self.log.event("checkpoint", step=state.step, file=path.name, message=f"saved {path.name}")
            return True
        except OSError as error:
            self.log.event(
                "checkpoint_failed", step=state.step, message=f"no checkpoint: {error}; the last good one stays"
            )
            return False

    def validate(self) -> None:
        """Score the validation targets, off the clock."""
        state = self.run.state
        self.stop_clock()
        self.flush()
        start = time.perf_counter()
        self.outcome.val = self._score()
        self.log.val(
            step=state.step,
            tokens=state.tokens,
            loss=self.outcome.val.loss,
            train_ms=self.clock.train_ms,
            val_tokens=self.outcome.val.tokens,
            val_ms=1000 * (time.perf_counter() - start),
            **self._energy_fields(self.clock.train_ms),
        )
        if not math.isfinite(self.outcome.val.loss):
            raise DivergedError(state.step, self.outcome.val.loss)

    def _try_blends(self) -> None:
        """Score the other blends of the average that the recipe asks for; then the weights are the recipe's again."""
        average, engine, step = self.run.recipe.schedule.average, self.run.state.engine, self.run.state.step
        if average is None or not average.blends or step < self.run.recipe.train.num_steps:
            return
        if not engine.can_blend:
            self.log.once("no other blends: the weights of the last step are gone with the process that made them")
            return
        for blend in average.blends:
            engine.blend(blend)
            loss = self._score().loss
            self.log.event("blend", step=step, blend=blend, loss=loss, message=f"blend {blend:g}: val loss {loss:.5f}")
        engine.blend(average.blend)

    def _compare_weights(self) -> None:
        """Say in the log whether all processes end with the same weights, bit for bit."""
        size, model = self.run.world.size, self.run.state.model
        if size == 1:
            return
        differing = differing_weights(model)
        told = f"all {model.num_parameters():,} parameters are the same bits on {size} processes"
        if differing:
            told = f"{len(differing)} parameters differ between the {size} processes: {', '.join(differing[:8])}"
        self.log.event("agreement", step=self.run.state.step, differing=differing, message=told)

    def _score(self) -> Validation:
        """The validation of the present weights. It reads no FP8 copies, so they need not be renewed for it."""
        run, state, evaluation = self.run, self.run.state, self.run.recipe.eval
        device = run.world.device
        self.memory.read()
        batches = validation_batches(
            run.data.val,
            tokens=evaluation.tokens,
            seq_len=evaluation.seq_len,
            stride=evaluation.stride,
            batch_tokens=validation_batch_tokens(run.recipe, run.parts),
            rank=run.world.rank,
            world_size=run.world.size,
            vocab_size=run.recipe.model.vocab_size,
            history=run.recipe.model.history,
            document_start=run.recipe.model.document_start,
            mean_document=run.recipe.data.mean_document,
            spare_documents=run.recipe.data.spare_documents,
            device=device,
        )
        plan = run.recipe.eval_plan(state.step)
        scored = evaluate(run.loss_sum, model_inputs(batches, plan, self.stage.enter(plan)), device)
        self.memory.resume()  # what it took does not count
        return scored

    def _checkpoint_due(self, last: int) -> bool:
        """By steps, by time, and before the last validation; every process gives the same answer."""
        step, train = self.run.state.step, self.run.recipe.train
        if step == self.saved_step:
            return False
        if step == last:
            return train.checkpoint_last
        if train.checkpoint_every and step % train.checkpoint_every == 0:
            return True
        if step % train.log_every:
            return False
        minutes = (time.monotonic() - self.saved_at) / 60
        return bool(from_first(minutes >= train.checkpoint_minutes > 0))

    def _validation_due(self, last: int) -> bool:
        step, evaluation = self.run.state.step, self.run.recipe.eval
        if step == last:
            return True
        return evaluation.at_start if step == 0 else bool(evaluation.every) and step % evaluation.every == 0

    def _stopped(self, stop: StopRequest, last: int) -> bool:
        """Whether any process was asked to stop; several processes agree on it at log lines only."""
        step = self.run.state.step
        if step == last:
            return False
        if self.run.world.size == 1:
            return stop.signum is not None
        if step % self.run.recipe.train.log_every:
            return False
        signum = torch.tensor(stop.signum or 0, device=self.run.world.device)
        stop.signum = int(distributed.max_(signum)) or None
        return stop.signum is not None

    def energy(self) -> tuple[float | None, str | None]:
        """Joules of all processes so far, or None and why. Every process must call it.

        While the clock runs this reads the counter, which costs time; else the sum is known.
        """
        own = self.meter.read()
        totals = sum_over_processes(torch.tensor([own or 0.0, float(own is None)], dtype=torch.float64)).tolist()
        if totals[1]:
            return None, self.meter.reason or "another process could not measure its energy"
        return totals[0], None

    def stop_clock(self) -> None:
        """Close the timed segment, if one is open."""
        if self.clock.running:
            self.clock.stop()

    def _mark(self, wait: bool = False) -> Any:
        """A moment on the device's time line: an event on CUDA, else a host time in ms."""
        if self.run.world.device.type != "cuda":
            return 1000 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if wait:
            event.synchronize()
        return event

    def _energy_due(self) -> bool:
        """Whether a log line gets the joules: they are free while the clock stands; every process agrees."""
        return not self.clock.running or bool(from_first(time.monotonic() - self._energy_at >= ENERGY_EVERY_S))

    def _energy_fields(self, train_ms: float) -> dict[str, float]:
        """`energy_j` so far and mean `watts` since the last reading, for a line; nothing where it is not measured."""
        joules, _ = self.energy()
        self._energy_at = time.monotonic()
        if joules is None:
            return {}
        (seen_ms, seen_j), self._energy_seen = self._energy_seen, (train_ms, joules)
        watts = {"watts": 1000 * (joules - seen_j) / (train_ms - seen_ms)} if train_ms > seen_ms else {}
        return {"energy_j": joules, **watts}

    def _live(self, tokens: int, train_ms: float) -> dict[str, Any]:
        """Figures for the progress line, and the energy so far now and then."""
        rate = 1000 * tokens / train_ms if train_ms else 0.0
        per_s = rate * self.flops_per_token
        mfu = None if not self.peak.flops else per_s / (self.peak.flops * self.run.world.size)
        energy = self._energy_fields(train_ms) if self._energy_due() else {}
        return {"tokens_per_s": rate, "mfu": mfu, "memory_bytes": self.memory.read(), **energy}


def _ms_between(start: Any, stop: Any) -> float:
    return float(start.elapsed_time(stop)) if isinstance(start, torch.cuda.Event) else stop - start
