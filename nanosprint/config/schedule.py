"""What happens at each step: a pure function from the step number to a `StepPlan`.

Nothing here changes with time or remembers a previous call, so that a resumed run, a test and a plot ask the same
question and get the same answer. Every field that counts steps is marked so that `Recipe.with_num_steps` can stretch
or shrink the whole schedule in proportion.
"""

import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

STEPS: dict[str, Any] = {"unit": "steps"}


def steps_field(default: int = 0) -> Any:
    """A dataclass field that counts optimizer steps and scales with the length of the run."""
    return field(default=default, metadata=STEPS)


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The factor on every learning rate: linear warm-up, then a cosine or a flat part with a linear cool-down.

    "cosine" falls from 1 at the end of the warm-up to `floor` just after the last step. "trapezoid" (also called
    warmup-stable-decay; Hägele et al. 2024, arXiv:2405.18392) stays at 1 and falls linearly to `floor` over the last
    `cooldown_steps`.
    """

    shape: Literal["cosine", "trapezoid"] = "trapezoid"
    warmup_steps: int = steps_field()
    cooldown_steps: int = steps_field()
    floor: float = 0.0

    def factor(self, step: int, num_steps: int, cooldown: float | None = None) -> float:
        """The factor at `step` in 0 .. num_steps - 1; a trapezoid's `cooldown` in shares of the run, if not its own."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "cosine":
            progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
        left, falling = num_steps - step, self.cooldown_steps if cooldown is None else round(cooldown * num_steps)
        if left >= falling:
            return 1.0
        return self.floor + (1 - self.floor) * left / falling


@dataclass(frozen=True, kw_only=True)
class MomentumSchedule:
    """Muon's momentum: linear from `start` to `end` over the first steps, and back over the last ones."""

    start: float = 0.85
    end: float = 0.95
    warmup_steps: int = steps_field()
    cooldown_steps: int = steps_field()

    def value(self, step: int, num_steps: int) -> float:
        if step < self.warmup_steps:
            return self.start + (self.end - self.start) * step / self.warmup_steps
        left = num_steps - step
        if left < self.cooldown_steps:
            return self.start + (self.end - self.start) * left / self.cooldown_steps
        return self.end


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How many tokens to the left attention sees in layers with a short and with a long window."""

    short: int
    long: int


@dataclass(frozen=True, kw_only=True)
class WindowSchedule:
    """Windows that grow with training, on a straight line from `start` to `end` tokens in whole blocks.

    The short window is `short_fraction` of the long one, at least a block. (Speedrun records #13 and #20.)
    """

    start: int
    end: int
    block: int = 64
    rounding: Literal["down", "up"] = "down"
    short_fraction: float = 1.0

    def windows(self, step: int, num_steps: int) -> Windows:
        exact = self.start + (self.end - self.start) * step / num_steps
        blocks = math.floor(exact / self.block) if self.rounding == "down" else math.ceil(exact / self.block)
        long = max(1, blocks)
        short = max(1, math.floor(long * self.short_fraction))
        return Windows(short=short * self.block, long=long * self.block)


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What is predicted: `tokens[k]` weighs the target k tokens further on, `prefix` its longest prefix.

    `sampled`: how many tokens of the vocabulary the softmax of a micro-batch has: all that are its targets and a random
    rest, see `model/sampled.py`; None is all. A micro-batch with more targets than that has a loss of NaN, which ends
    the run as diverged.
    """

    tokens: tuple[float, ...] = (1.0,)
    prefix: float = 0.0
    sampled: int | None = None

    def toward(self, other: "LossWeights", part: float) -> "LossWeights":
        """The weights `part` of the way from here to `other`, which has as many."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        return LossWeights(
            tokens=tuple(a + (b - a) * part for a, b in pairs),
            prefix=self.prefix + (other.prefix - self.prefix) * part,
            sampled=self.sampled,
        )

    def validate(self, key: str) -> None:
        """Raise ValueError naming what below `key` cannot work."""
        if self.sampled is not None and (self.sampled < 1 or self.sampled % 16):
            raise ValueError(f"{key}.sampled={self.sampled}: it must be none, or a positive multiple of 16")
        if not self.tokens or self.tokens[0] <= 0:
            raise ValueError(f"{key}.tokens={list(self.tokens)}: the first weighs the next token and must be positive")
        for name, weight in ((f"{key}.tokens", min(self.tokens)), (f"{key}.prefix", self.prefix)):
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name}: weight {weight} must be 0 or more, and finite")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run with batch, windows and losses of its own; it lasts `share` of the scheduled steps.

    Weights run linearly from `loss` to `loss_end` (None: stay), whose values just after the stage's last step they
    would reach. Windows are in tokens; `max_document` cuts documents when they are packed.
    """

    share: int = 1
    batch_tokens: int
    max_document: int
    windows: Windows
    lr: float = 1.0
    loss: LossWeights = LossWeights()
    loss_end: LossWeights | None = None


class Span(NamedTuple):
    """A stage and its steps, start .. end - 1."""

    start: int
    end: int
    stage: Stage


@dataclass(frozen=True, kw_only=True)
class StageSchedule:
    """Stages one after the other, their borders rounded, then `extension` for the last `extension_steps`.

    The rate's factor is that of the stage until the cool-down, the last `cooldown` of the scheduled steps, moves it
    linearly from there to `floor`, where it stays in the extension. `eval_windows` serve the validation after the last
    step. `split_stage` counts from 0: at the first odd step of that stage embedding and head part. A run shorter than
    its stages are many leaves some of them out.
    """

    stages: tuple[Stage, ...]
    extension: Stage
    extension_steps: int = steps_field()
    cooldown: float = 0.6
    floor: float = 0.15
    eval_windows: Windows | None = None
    split_stage: int | None = None

    def spans(self, num_steps: int) -> tuple[Span, ...]:
        """Every stage of a run of `num_steps` steps, the extension last; some may have no step."""
        scheduled, total = num_steps - self.extension_steps, sum(stage.share for stage in self.stages)
        borders, passed = [0], 0
        for stage in self.stages:
            passed += stage.share
            borders.append(round(scheduled * passed / total))
        return tuple(map(Span, borders, [*borders[1:], num_steps], [*self.stages, self.extension]))

    def span(self, step: int, num_steps: int) -> Span:
        """The stage that `step` belongs to. Raises ValueError for a step beyond the run."""
        for span in self.spans(num_steps):
            if step < span.end:
                return span
        raise ValueError(f"step={step}: the run has {num_steps} steps, counted from 0")

    def lr_factor(self, step: int, num_steps: int, cooldown: float | None = None) -> float:
        """The factor on every learning rate: `cooldown` starts from the multiplier of the stage that is on.

        A group may bring a `cooldown` of its own.
        """
        scheduled = num_steps - self.extension_steps
        if step >= scheduled:
            return self.floor
        start = int(scheduled * (1 - (self.cooldown if cooldown is None else cooldown)))
        part = max(0, step - start) / max(1, scheduled - start)
        return self.span(step, num_steps).stage.lr * (1 - part) + self.floor * part

    def loss(self, step: int, num_steps: int) -> LossWeights | None:
        """The weights at `step`; None where no stage predicts anything but the next token."""
        if all(stage.loss == LossWeights() == (stage.loss_end or stage.loss) for stage in self._all()):
            return None
        start, end, stage = self.span(step, num_steps)
        return stage.loss.toward(stage.loss_end or stage.loss, (step - start) / (end - start))

    def long_windows(self, step: int, num_steps: int) -> tuple[int, ...]:
        """The long windows up to `step`, in tokens; equal neighbours count once."""
        begun = (s.stage.windows.long for s in self.spans(num_steps) if s.start <= step and s.start < s.end)
        return tuple(long for long, _ in groupby(begun))

    def is_split(self, step: int, num_steps: int) -> bool:
        """Whether embedding and head have parted after the update of `step`."""
        if self.split_stage is None:
            return False
        return step >= self.spans(num_steps)[self.split_stage].start // 2 * 2 + 1

    def validate(self, num_steps: int) -> None:
        """Raise ValueError naming the first setting that cannot work in a run of `num_steps`, and what would."""
        key = "schedule.stages"
        if not self.stages:
            raise ValueError(f"{key}.stages is empty: a run needs at least one stage")
        for i, stage in enumerate(self.stages):
            _validate_stage(stage, f"{key}.stages.{i}")
        _validate_stage(self.extension, f"{key}.extension")
        checks = [
            ("extension_steps", self.extension_steps, 0 <= self.extension_steps < num_steps, f"0 to {num_steps - 1}"),
            ("cooldown", self.cooldown, 0 <= self.cooldown <= 1, "between 0 and 1"),
            ("floor", self.floor, 0 <= self.floor < math.inf, "0 or more, and finite"),
            (
                "split_stage",
                self.split_stage,
                self.split_stage is None or 0 <= self.split_stage < len(self.stages),
                f"none, or a stage's number, 0 to {len(self.stages) - 1}",
            ),
        ]
        for name, value, fits, expected in checks:
            if not fits:
                raise ValueError(f"{key}.{name}={value}: it must be {expected}")
        if self.eval_windows is not None:
            _validate_windows(self.eval_windows, f"{key}.eval_windows")

    def _all(self) -> tuple[Stage, ...]:
        return (*self.stages, self.extension)


def _validate_stage(stage: Stage, key: str) -> None:
    for name, least in (("share", 1), ("batch_tokens", 1), ("max_document", 1)):
        if getattr(stage, name) < least:
            raise ValueError(f"{key}.{name}={getattr(stage, name)} must be at least {least}")
    if not 0 < stage.lr < math.inf:
        raise ValueError(f"{key}.lr={stage.lr} must be positive and finite")
    _validate_windows(stage.windows, f"{key}.windows")
    stage.loss.validate(f"{key}.loss")
    if stage.loss_end is not None:
        stage.loss_end.validate(f"{key}.loss_end")
        if len(stage.loss_end.tokens) != len(stage.loss.tokens):
            raise ValueError(
                f"{key}.loss_end.tokens has {len(stage.loss_end.tokens)} weights and {key}.loss.tokens "
                f"{len(stage.loss.tokens)}: give as many, 0 for what ends"
            )
        if stage.loss_end.sampled not in (None, stage.loss.sampled):
            raise ValueError(
                f"{key}.loss_end.sampled={stage.loss_end.sampled}, but {key}.loss.sampled={stage.loss.sampled} holds "
                "for the whole stage: leave it out"
            )


def _validate_windows(windows: Windows, key: str) -> None:
    if not 1 <= windows.short <= windows.long:
        raise ValueError(f"{key}: short={windows.short} must lie between 1 and long={windows.long}")


class Ahead(NamedTuple):
    """How far ahead of themselves, in drifts, the weights of a group stand. See `LookAhead`."""

    here: float  # in this step's forward pass
    next: float  # in that of the group's next turn; 0 where this is its last
    kept: float  # of the drift; the rest comes from this step


class AverageStep(NamedTuple):
    """What becomes of the average of the weights after a step's update."""

    kept: float  # of the average; the rest comes from the weights. 0: it begins with them
    blend: float | None = None  # the average's part in the final weights; None before the last step


@dataclass(frozen=True, kw_only=True)
class TailAverage:
    """A running average of the weights over the last `share` of the run, blended into them after the last step.

    It moves on every `stride`-th step, counted back from the last, and forgets within `horizon`, a share of the run
    like `share`; it has one move at least. `blend` is its part in the result. `exclude`: roles of groups, or prefixes
    of them, that stay as they are. `blends` are validated, too, after the run and off its clock.

    Source: modded-nanogpt pull requests 325 and 328 (track 3: all but the embedding, 0.6 of an average with a horizon
    of 150 steps in the last 290), 364 (track 1: 0.25 to 0.30, about the last 12 %; a stride of 4 to 16 is as good).
    """

    share: float = 0.12
    horizon: float = 0.12
    stride: int = 4
    blend: float = 0.3
    blends: tuple[float, ...] = field(default=(), metadata={"hashed": False})
    exclude: tuple[str, ...] = ("embed",)

    def step(self, step: int, num_steps: int) -> AverageStep | None:
        """What happens after the update of `step`; None where nothing does."""
        moves = max(1, round(self.share * num_steps / self.stride))
        first, left = max(1, num_steps - moves * self.stride), num_steps - (step + 1)
        blend = None if left else self.blend
        if step + 1 == first:
            return AverageStep(0.0, blend)
        if step + 1 < first or left % self.stride:
            return None
        return AverageStep(math.exp(-self.stride / (self.horizon * num_steps)), blend)

    def excludes(self, role: str) -> bool:
        """Whether parameters of a group with this role are left alone."""
        return any(role == name or role.startswith(name + ".") for name in self.exclude)

    def validate(self, roles: tuple[str, ...]) -> None:
        """Raise ValueError naming the first setting that cannot work with groups of these `roles`."""
        shares = [("blend", self.blend), *((f"blends.{i}", blend) for i, blend in enumerate(self.blends))]
        checks = [
            ("share", self.share, 0 < self.share <= 1, "above 0 and at most 1"),
            ("horizon", self.horizon, 0 < self.horizon < math.inf, "above 0, and finite"),
            ("stride", self.stride, self.stride >= 1, "at least 1"),
            *((name, blend, 0 <= blend <= 1, "between 0 and 1") for name, blend in shares),
        ]
        for name, value, fits, expected in checks:
            if not fits:
                raise ValueError(f"schedule.average.{name}={value}: it must be {expected}")
        for i, name in enumerate(self.exclude):
            if not any(role == name or role.startswith(name + ".") for role in roles):
                raise ValueError(
                    f"schedule.average.exclude.{i}={name} is the role of no group: there are {', '.join(roles)}"
                )
        if all(map(self.excludes, roles)):
            raise ValueError(f"schedule.average.exclude={list(self.exclude)} leaves nothing to average: shorten it")


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All that a step needs to know besides its data."""

    step: int
    lr_factor: float
    momentum: float | None  # None: every Muon group uses its own
    batch_tokens: int
    seq_len: int
    windows: Windows | None  # None: the recipe has none
    max_document: int | None = None  # no document is longer, since packing cut them; None: they are not cut
    loss: LossWeights | None = None  # None: the next token's cross entropy, as in all validation
    yarn: tuple[int, ...] = ()  # the long windows so far, in tokens, for rotary's extension; equal neighbours merged
    split: bool = False  # whether embedding and head part after this step's update, or have
    own_factors: tuple[tuple[str, float], ...] = ()  # role and factor of groups with a cool-down of their own
    average: AverageStep | None = None  # None: the average of the weights stays as it is
    ahead: tuple[tuple[str, Ahead], ...] = ()  # by role, of groups that look ahead at this step
    ages: tuple[tuple[str, float], ...] = ()  # by role, the mean age of groups with a mixture of momenta
    head_counts: int | None = None  # how often the gradient of the head's weight counts; 0: none is made. None: once

    def factor_of(self, role: str) -> float:
        """What the rate of the group of this role is multiplied by."""
        return dict(self.own_factors).get(role, self.lr_factor)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The curves of a run; its length is `train.num_steps`."""

    lr: LRSchedule = LRSchedule()
    momentum: MomentumSchedule | None = None
    windows: WindowSchedule | None = None
    stages: StageSchedule | None = None  # then it decides batch, windows and the rate's factor, and `lr` has no say
    average: TailAverage | None = None

    def lr_factor(self, step: int, num_steps: int, cooldown: float | None = None) -> float:
        """The rate's factor, with another `cooldown` than the curve's own if one is given: a share of the steps."""
        if self.stages is not None:
            return self.stages.lr_factor(step, num_steps, cooldown)
        return self.lr.factor(step, num_steps, cooldown)

    def validate_cooldown(self, key: str, cooldown: float, num_steps: int) -> None:
        """Raise ValueError if a group's own `cooldown`, at `key`, cannot work."""
        if not 0 <= cooldown <= 1:
            raise ValueError(f"{key}={cooldown}: it must be between 0 and 1, or none for the schedule's")
        if self.stages is not None:
            return
        if self.lr.shape == "cosine":
            raise ValueError(
                f"{key}={cooldown}, but schedule.lr.shape=cosine has no cool-down: take trapezoid, or {key}=none"
            )
        if self.lr.warmup_steps + round(cooldown * num_steps) > num_steps:
            raise ValueError(
                f"{key}={cooldown} of train.num_steps={num_steps} and {self.lr.warmup_steps} warm-up steps do not fit "
                "into the run: lower one of them"
            )

    def validate(self, num_steps: int) -> None:
        if self.stages is not None:
            self.stages.validate(num_steps)
            if self.windows is not None:
                raise ValueError("schedule.windows has no say beside schedule.stages: set one of them to none")
            if self.lr != LRSchedule():
                raise ValueError(
                    "schedule.lr has no say beside schedule.stages, which have rates, a cooldown and a floor of their "
                    "own: set schedule.lr={}"
                )
        for name, curve in (("lr", self.lr), ("momentum", self.momentum)):
            if curve is not None and curve.warmup_steps + curve.cooldown_steps > num_steps:
                raise ValueError(
                    f"schedule.{name}: {curve.warmup_steps} warm-up and {curve.cooldown_steps} cool-down steps do not "
                    f"fit into train.num_steps={num_steps}: lower one of them"
                )
