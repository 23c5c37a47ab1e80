"""What happens at each step: a pure function from the step number to a `StepPlan`.

Nothing here changes with time or remembers a previous call, so that a resumed run, a test and a plot ask the same
question and get the same answer. Every field that counts steps is marked so that `Recipe.with_num_steps` can stretch
or shrink the whole schedule in proportion.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

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

    def factor(self, step: int, num_steps: int) -> float:
        """The factor at `step` in 0 .. num_steps - 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "cosine":
            progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
        left = num_steps - step
        if left >= self.cooldown_steps:
            return 1.0
        return self.floor + (1 - self.floor) * left / self.cooldown_steps


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
    """What is predicted: `tokens[k]` weighs the target k tokens further on, `prefix` its longest prefix."""

    tokens: tuple[float, ...] = (1.0,)
    prefix: float = 0.0


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


@dataclass(frozen=True, kw_only=True)
class StageSchedule:
    """Stages one after the other, their borders rounded, then `extension` for the last `extension_steps`.

    The rate's factor is that of the stage until the cool-down, the last `cooldown` of the scheduled steps, moves it
    linearly from there to `floor`, where it stays in the extension. `eval_windows` serve the validation after the last
    step. `split_stage` counts from 0: at the first odd step of that stage embedding and head part.
    """

    stages: tuple[Stage, ...]
    extension: Stage
    extension_steps: int = steps_field()
    cooldown: float = 0.6
    floor: float = 0.15
    eval_windows: Windows | None = None
    split_stage: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All that a step needs to know besides its data."""

    step: int
    lr_factor: float
    momentum: float | None  # None: every Muon group uses its own
    batch_tokens: int
    seq_len: int
    windows: Windows | None  # None: the recipe has none
    max_document: int | None = None  # None: documents are not cut
    loss: LossWeights = LossWeights()
    yarn: tuple[int, ...] = ()  # the long windows so far, in tokens, for rotary's extension; equal neighbours merged
    split: bool = False  # whether embedding and head part after this step's update, or have


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The curves of a run; its length is `train.num_steps`."""

    lr: LRSchedule = LRSchedule()
    momentum: MomentumSchedule | None = None
    windows: WindowSchedule | None = None
    stages: StageSchedule | None = None  # then it decides batch, windows and the rate's factor, and `lr` has no say

    def validate(self, num_steps: int) -> None:
        for name, curve in (("lr", self.lr), ("momentum", self.momentum)):
            if curve is not None and curve.warmup_steps + curve.cooldown_steps > num_steps:
                raise ValueError(
                    f"schedule.{name}: {curve.warmup_steps} warm-up and {curve.cooldown_steps} cool-down steps do not "
                    f"fit into train.num_steps={num_steps}: lower one of them"
                )
