"""A recipe is the mathematics of a run, an `Execution` how it is carried out.

Two runs with the same recipe hash train the same model on the same tokens in the same order; what differs (GPUs,
micro-batches, attention backend, compilation) changes nothing but rounding, and is recorded beside it.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from nanosprint.config.edit import from_dict, to_dict
from nanosprint.config.groups import ParamGroup
from nanosprint.config.model import ModelConfig
from nanosprint.config.schedule import STEPS, Schedule, StepPlan, steps_field

UNHASHED: dict[str, Any] = {"hashed": False}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens, and in which order.

    "sequential" cuts the token stream into consecutive blocks. "shuffled" deals the blocks of `model.seq_len` tokens
    of the whole training set in a random order that the run's seed decides, anew in every epoch. "documents" fills each
    lane with documents from their first token on, cut at the plan's `max_document`; what is cut off is never read.
    """

    name: str  # a folder under data/, unless --data names another place
    tokenizer: Literal["gpt2", "chars", "bytes"] = "gpt2"
    order: Literal["sequential", "shuffled", "documents"] = "sequential"
    mean_document: int = 128  # documents are at least this long on average: makes room for their ends
    epochs: float = 1.0  # passes over the training tokens that are allowed; more data than that is an error


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and batch of a run. A step is divided into `lanes` equal parts, which attention never crosses."""

    num_steps: int = steps_field()
    batch_tokens: int
    lanes: int = 8
    objective: Literal["mean", "lane_mean"] = "mean"  # of all tokens' losses; or their sum divided by the lanes
    grad_clip: float | None = None  # global norm
    log_every: int = field(default=10, metadata=UNHASHED)
    checkpoint_every: int = field(default=0, metadata=UNHASHED)  # steps; 0: by time only
    checkpoint_minutes: float = field(default=10.0, metadata=UNHASHED)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation: exactly the first `tokens` targets of the validation split, each scored once.

    `stride` < `seq_len` slides the window: every target but the first few is scored with at least
    `seq_len - stride` tokens of context.
    """

    tokens: int | None = None  # None: every target of the split
    seq_len: int
    stride: int | None = None  # None: seq_len, no overlap
    every: int = field(default=0, metadata=UNHASHED)  # steps; 0: only at the end
    at_start: bool = field(default=False, metadata=UNHASHED)
    batch_tokens: int = field(default=65_536, metadata=UNHASHED)  # per process and call


@dataclass(frozen=True, kw_only=True)
class Fp8HeadSpec:
    """Static scales of the head's product in FP8: what a code of 1 stands for. Training only.

    `gradient` is for the summed loss; that of the mean is smaller by the tokens of a step. (Speedrun record #19.)
    """

    x: float = 1 / 2
    weight: float = 1 / 512
    gradient: float = 1 / 448


@dataclass(frozen=True, kw_only=True)
class Fp8MLPSpec:
    """Which forward products of the MLP are in FP8 in training, and how far delayed scales look ahead.

    (Speedrun records #84 and #89.)
    """

    down: bool = True
    activation_headroom: float = 1.80
    weight_headroom: float = 1.12
    bootstrap_steps: int = 16  # in which the down projection's scale is that of its present weights


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats. "bf16" compute keeps parameters, their gradients and the loss in fp32."""

    fp8_head: Fp8HeadSpec | None = None
    fp8_mlp: Fp8MLPSpec | None = None
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    orthogonalize: Literal["bf16", "fp32", "fp64"] = "bf16"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete run, as a value. `validate` refuses what cannot work."""

    name: str
    source: str  # where its numbers come from
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    schedule: Schedule
    groups: tuple[ParamGroup, ...]
    precision: Precision
    eval: EvalConfig
    update_order: tuple[str, ...] = field(default=(), metadata=UNHASHED)  # roles of groups to update before the others

    def plan(self, step: int) -> StepPlan:
        """What happens at `step`, 0 .. num_steps - 1."""
        num_steps, momentum, windows = self.train.num_steps, self.schedule.momentum, self.schedule.windows
        return StepPlan(
            step=step,
            lr_factor=self.schedule.lr.factor(step, num_steps),
            momentum=None if momentum is None else momentum.value(step, num_steps),
            batch_tokens=self.train.batch_tokens,
            seq_len=self.model.seq_len,
            windows=None if windows is None else windows.windows(step, num_steps),
        )

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return sum(self.plan(step).batch_tokens for step in range(self.train.num_steps))

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that identify the mathematics; the name and the source do not count."""
        as_read_back = from_dict(Recipe, to_dict(self))  # where a float was given as 1, it is 1.0 now
        mathematics = to_dict(as_read_back, hashed_only=True)
        del mathematics["name"], mathematics["source"]
        return hashlib.sha256(json.dumps(mathematics, sort_keys=True).encode()).hexdigest()[:12]

    def with_num_steps(self, num_steps: int) -> "Recipe":
        """The same recipe stretched or shrunk to `num_steps`: every count of steps changes in proportion."""
        if num_steps < 1:
            raise ValueError(f"train.num_steps={num_steps} must be at least 1")
        return _scale_steps(self, num_steps, self.train.num_steps)

    def validate(self) -> "Recipe":
        """Return self; raise ValueError naming the first value that cannot work and the remedy."""
        self.model.validate()
        if self.train.num_steps < 1:
            raise ValueError(f"train.num_steps={self.train.num_steps} must be at least 1")
        self.schedule.validate(self.train.num_steps)
        self._validate_numbers()
        self._validate_batch()
        self._validate_eval()
        self._validate_windows()
        if self.train.grad_clip is not None and any(g.every > 1 for g in self.groups):
            raise ValueError(
                f"train.grad_clip={self.train.grad_clip} cannot be had with groups that wait for their turn, since a "
                "norm over some of the gradients means nothing: set every=1, or train.grad_clip=none"
            )
        if self.train.grad_clip is not None and self.model.ngrams is not None:
            raise ValueError(
                f"train.grad_clip={self.train.grad_clip} cannot be had with model.ngrams, whose gradients are sparse: "
                "set one of them to none"
            )
        unknown = [role for role in self.update_order if role not in {g.role for g in self.groups}]
        if unknown:
            known = ", ".join(g.role for g in self.groups)
            raise ValueError(f"update_order names {unknown[0]!r}, but there are groups for {known}")
        if not self.groups:
            raise ValueError("groups is empty: no parameter would ever be updated")
        if self.data.epochs <= 0:
            raise ValueError(f"data.epochs={self.data.epochs} must be positive")
        return self

    def _validate_batch(self) -> None:
        batch, lanes, seq_len = self.train.batch_tokens, self.train.lanes, self.model.seq_len
        if lanes < 1:
            raise ValueError(f"train.lanes={lanes} must be at least 1")
        unit = lanes * seq_len
        if batch < unit or batch % unit:
            nearest = max(unit, round(batch / unit) * unit)
            raise ValueError(
                f"train.batch_tokens={batch} is not a multiple of train.lanes x model.seq_len = {lanes} x {seq_len}: "
                f"the nearest that fits is {nearest}"
            )

    def _validate_numbers(self) -> None:
        """Numbers whose nonsense would show itself late, or never."""
        train, lr, windows = self.train, self.schedule.lr, self.schedule.windows
        checks = [
            ("train.log_every", train.log_every, train.log_every >= 1, "at least 1"),
            ("train.checkpoint_every", train.checkpoint_every, train.checkpoint_every >= 0, "0 (by time only) or more"),
            ("train.grad_clip", train.grad_clip, train.grad_clip is None or train.grad_clip > 0, "positive, or none"),
            ("schedule.lr.floor", lr.floor, 0 <= lr.floor <= 1, "between 0 and 1"),
            ("eval.every", self.eval.every, self.eval.every >= 0, "0 (only at the end) or more"),
            ("eval.batch_tokens", self.eval.batch_tokens, self.eval.batch_tokens >= 1, "at least 1"),
            ("data.mean_document", self.data.mean_document, self.data.mean_document >= 1, "at least 1"),
            ("schedule.windows.block", windows and windows.block, windows is None or windows.block >= 1, "at least 1"),
        ]
        for i, group in enumerate(self.groups):
            checks += [
                (f"groups.{i}.lr", group.lr, 0 <= group.lr < float("inf"), "0 or more, and finite"),
                (f"groups.{i}.every", group.every, group.every >= 1, "at least 1"),
            ]
        for key, value, fits, expected in checks:
            if not fits:
                raise ValueError(f"{key}={value}: it must be {expected}")

    def _validate_windows(self) -> None:
        for i, layer in enumerate(self.model.layers):
            if layer.mixer is not None and layer.mixer.window != "full" and self.schedule.windows is None:
                raise ValueError(
                    f"model.layers.{i}.mixer.window={layer.mixer.window}, but no schedule.windows says how far: "
                    'set it, for example to {"start": 1024, "end": 1024}'
                )

    def _validate_eval(self) -> None:
        seq_len, stride = self.eval.seq_len, self.eval.stride
        if self.model.positions == "learned" and seq_len > self.model.seq_len:
            raise ValueError(
                f"eval.seq_len={seq_len} exceeds model.seq_len={self.model.seq_len}, "
                "which is as far as learned positions reach"
            )
        if self.eval.batch_tokens < seq_len:
            raise ValueError(
                f"eval.batch_tokens={self.eval.batch_tokens} is less than one row of eval.seq_len={seq_len}: raise it"
            )
        if seq_len < 1 or (stride is not None and not 1 <= stride <= seq_len):
            raise ValueError(f"eval.stride={stride} must lie between 1 and eval.seq_len={seq_len}")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a recipe is carried out. Recorded with a run, never hashed, changes nothing beyond rounding.

    "auto" is resolved once, at the start of the run, and the choice is stored, so that a resumed run repeats it.
    """

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    gpus: int = 1  # processes, on CPU too
    lanes_per_microbatch: int | Literal["auto"] = "auto"
    compute: Literal["auto", "bf16", "fp32", "fp64"] = "auto"  # never below the recipe's precision
    attention: Literal["auto", "sdpa", "batched", "cudnn", "flash", "flex", "fa2", "fa3", "fa4", "reference"] = "auto"
    compile: Literal["auto", "off", "default", "max-autotune"] = "auto"
    fp8: Literal["auto", "off"] = "auto"  # "off" does in bf16 what the recipe has in FP8
    threads: int = 0  # CPU threads per process; 0 leaves torch's choice
    allocator: Literal["auto", "default", "expandable"] = "auto"


def _scale_steps(config: Any, num_steps: int, old: int) -> Any:
    """Every field in `config`, however deep, that counts steps, times num_steps / old."""
    changes: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if f.metadata.get("unit") == STEPS["unit"]:
            changes[f.name] = value * num_steps // old  # rounded down, so that parts still fit into the whole
        elif is_dataclass(value):
            changes[f.name] = _scale_steps(value, num_steps, old)
    return replace(config, **changes)
