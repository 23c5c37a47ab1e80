"""A recipe is the mathematics of a run, an `Execution` how it is carried out.

Two runs with the same recipe hash train the same model on the same tokens in the same order; what differs (GPUs,
micro-batches, attention backend, compilation) changes nothing but rounding, and is recorded beside it.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from nanosprint.config.edit import from_dict, to_dict
from nanosprint.config.groups import LookAhead, ParamGroup
from nanosprint.config.model import ModelConfig
from nanosprint.config.schedule import STEPS, Ahead, AverageStep, Schedule, StageSchedule, StepPlan, steps_field

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
    mean_document: int = 128  # documents are at least this long on average: makes room for their ends,
    spare_documents: int = 1  # and for this many more in every row
    epochs: float = 1.0  # passes over the training tokens that are allowed; more data than that is an error


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and batch of a run. A step is divided into `lanes` equal parts, which attention never crosses."""

    num_steps: int = steps_field()
    batch_tokens: int  # where the schedule has stages: of the largest of them
    lanes: int = 8
    objective: Literal["mean", "lane_mean"] = "mean"  # of all tokens' losses; or their sum divided by the lanes
    grad_clip: float | None = None  # global norm
    log_every: int = field(default=10, metadata=UNHASHED)
    checkpoint_every: int = field(default=0, metadata=UNHASHED)  # steps; 0: by time only
    checkpoint_minutes: float = field(default=10.0, metadata=UNHASHED)
    checkpoint_last: bool = field(default=True, metadata=UNHASHED)  # after the last step; gigabytes, to sample from


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

    `gradient` is for the loss summed over tokens, whatever the objective divides it by. (Speedrun record #19.)
    """

    x: float = 1 / 2
    weight: float = 1 / 512
    gradient: float = 1 / 448


@dataclass(frozen=True, kw_only=True)
class Fp8MLPSpec:
    """Which products of the MLP are in FP8 in training, and how far delayed scales look ahead.

    The first forward product is; the second with `down`; with `backward` those that lead to the gradients of hidden
    units and input, too; with `weights`, which needs both of these, those of the weights, and then all are. `input`
    "dynamic" scales the input by its largest value, "static" by the largest that a vector of RMS 1 can have, which
    needs no look at it. (Speedrun records #84 and #89; `backward`: its pull request 344.)
    """

    down: bool = True
    backward: bool = False
    weights: bool = False
    input: Literal["dynamic", "static"] = "dynamic"
    activation_headroom: float = 1.80
    weight_headroom: float = 1.12
    bootstrap_steps: int = 16  # in which the down projection's scale is that of its present weights


@dataclass(frozen=True, kw_only=True)
class Fp8ProjectionSpec:
    """Which products of attention's projections are in FP8 in training; weight gradients never are.

    The input of `qkv` is normed, which bounds it; that of `out` has the scale of the call before, times `headroom`.
    `gradient` is what a code of 1 stands for, for the loss summed over tokens, whatever the objective divides it by.
    """

    qkv: bool = True  # queries, keys and values
    out: bool = True
    backward: bool = True  # input gradients, too
    headroom: float = 2.0
    gradient: float = 2.0**-10  # 56 is clamped, 6e-8 loses bits


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats. "bf16" compute keeps parameters, their gradients and the loss in fp32."""

    fp8_head: Fp8HeadSpec | None = None
    fp8_mlp: Fp8MLPSpec | None = None
    fp8_projections: Fp8ProjectionSpec | None = None
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
        num_steps, schedule = self.train.num_steps, self.schedule
        momentum = None if schedule.momentum is None else schedule.momentum.value(step, num_steps)
        if schedule.stages is not None:
            return self._staged_plan(schedule.stages, step, momentum)
        windows = schedule.windows
        return StepPlan(
            step=step,
            lr_factor=schedule.lr_factor(step, num_steps),
            own_factors=self._own_factors(step),
            average=self._average(step),
            ahead=self._ahead(step),
            ages=self._ages(step),
            head_counts=self._head_counts(step),
            momentum=momentum,
            batch_tokens=self.train.batch_tokens,
            seq_len=self.row_tokens(self.train.batch_tokens),
            windows=None if windows is None else windows.windows(step, num_steps),
        )

    def _staged_plan(self, stages: StageSchedule, step: int, momentum: float | None) -> StepPlan:
        num_steps, stage = self.train.num_steps, stages.span(step, self.train.num_steps).stage
        return StepPlan(
            step=step,
            lr_factor=stages.lr_factor(step, num_steps),
            own_factors=self._own_factors(step),
            average=self._average(step),
            ahead=self._ahead(step),
            ages=self._ages(step),
            head_counts=self._head_counts(step),
            momentum=momentum,
            batch_tokens=stage.batch_tokens,
            seq_len=self.row_tokens(stage.batch_tokens),
            windows=stage.windows,
            max_document=stage.max_document if self.data.order == "documents" else None,
            loss=stages.loss(step, num_steps),
            yarn=stages.long_windows(step, num_steps),
            split=stages.is_split(step, num_steps),
        )

    def _average(self, step: int) -> AverageStep | None:
        average = self.schedule.average
        return None if average is None else average.step(step, self.train.num_steps)

    def _head_counts(self, step: int) -> int | None:
        for group in self.groups:
            if group.gradient == "last":
                return group.every if group.due(step) else 0
        return None

    def _ahead(self, step: int) -> tuple[tuple[str, Ahead], ...]:
        looking = [(group, getattr(group.rule, "lookahead", None)) for group in self.groups]
        return tuple(
            (
                group.role,
                Ahead(
                    here=self._lead(group, look, step),
                    next=self._lead(group, look, step + group.every),
                    kept=look.decay,
                ),
            )
            for group, look in looking
            if look is not None and look.covers(step, self.train.num_steps)
        )

    def _lead(self, group: ParamGroup, look: LookAhead, step: int) -> float:
        """How many drifts the group's weights stand ahead at `step`, which may lie beyond the run."""
        if not look.covers(step, self.train.num_steps):
            return 0.0
        return look.strength * self.schedule.lr_factor(step, self.train.num_steps, group.cooldown)

    def _ages(self, step: int) -> tuple[tuple[str, float], ...]:
        mixtures = [(group.role, getattr(group.rule, "mixture", None)) for group in self.groups]
        return tuple((role, mix.age(step, self.train.num_steps)) for role, mix in mixtures if mix is not None)

    def _own_factors(self, step: int) -> tuple[tuple[str, float], ...]:
        own = [(group.role, group.cooldown) for group in self.groups if group.cooldown is not None]
        return tuple((role, self.schedule.lr_factor(step, self.train.num_steps, share)) for role, share in own)

    def row_tokens(self, batch_tokens: int) -> int:
        """Tokens of a row: a lane, where documents fill it."""
        return batch_tokens // self.train.lanes if self.data.order == "documents" else self.model.seq_len

    def eval_plan(self, step: int) -> StepPlan:
        """How the model is validated when `step` steps are done: as it would train next, or trained last.

        Rows are `eval.seq_len` tokens in which no document is cut, and the loss is the plain one. After the last step
        the stages' `eval_windows` take effect, while rotary's extension stays that of the training windows.
        """
        stages, plan = self.schedule.stages, self.plan(min(step, self.train.num_steps - 1))
        batch_tokens, seq_len = self.eval.batch_tokens, self.eval.seq_len
        plan = replace(plan, batch_tokens=batch_tokens, seq_len=seq_len, loss=None, head_counts=None)
        if stages is not None and step >= self.train.num_steps and stages.eval_windows is not None:
            plan = replace(plan, windows=stages.eval_windows)
        return plan if plan.max_document is None else replace(plan, max_document=self.eval.seq_len)

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens that any step has."""
        return max(self.batches().values())

    @property
    def max_seq_len(self) -> int:
        """The longest row of training and validation, in tokens: as far as positions must reach."""
        return max(self.model.seq_len, self.eval.seq_len, self.row_tokens(self.max_batch_tokens))

    def batches(self) -> dict[str, int]:
        """Tokens of a step in every stage, by their key."""
        stages = self.schedule.stages
        if stages is None:
            return {"train.batch_tokens": self.train.batch_tokens}
        batches = {f"schedule.stages.stages.{i}.batch_tokens": s.batch_tokens for i, s in enumerate(stages.stages)}
        return {**batches, "schedule.stages.extension.batch_tokens": stages.extension.batch_tokens}

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return sum(self.plan(step).batch_tokens for step in range(self.train.num_steps))

    @property
    def validation_steps(self) -> list[int]:
        """How many steps are done each time the run validates."""
        every, num_steps = self.eval.every, self.train.num_steps
        between = range(every, num_steps, every) if every else ()
        return [*([0] if self.eval.at_start else []), *between, num_steps]

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
        self._validate_losses()
        self._validate_eval()
        self._validate_documents()
        self._validate_windows()
        self._validate_contradictions()
        self._validate_precision()
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
        if self.schedule.average is not None:
            self.schedule.average.validate(tuple(group.role for group in self.groups))
        if self.data.epochs <= 0:
            raise ValueError(f"data.epochs={self.data.epochs} must be positive")
        return self

    def _validate_batch(self) -> None:
        lanes, seq_len = self.train.lanes, self.model.seq_len
        if lanes < 1:
            raise ValueError(f"train.lanes={lanes} must be at least 1")
        unit, words, numbers = lanes * seq_len, "train.lanes x model.seq_len", f"{lanes} x {seq_len}"
        if self.data.order == "documents":
            unit, words, numbers = lanes, "train.lanes", f"{lanes}"
        for key, batch in self.batches().items():
            if batch < unit or batch % unit:
                nearest = max(unit, round(batch / unit) * unit)
                raise ValueError(
                    f"{key}={batch} is not a multiple of {words} = {numbers}: the nearest that fits is {nearest}"
                )
        if self.train.batch_tokens != self.max_batch_tokens:
            raise ValueError(
                f"train.batch_tokens={self.train.batch_tokens}, but the largest batch of schedule.stages has "
                f"{self.max_batch_tokens}: set train.batch_tokens={self.max_batch_tokens}, or change the stages"
            )

    def _validate_losses(self) -> None:
        """Raise ValueError where a stage's softmax has more tokens than the vocabulary."""
        stages = self.schedule.stages
        if stages is None:
            return
        named = {**{f"stages.{i}": stage for i, stage in enumerate(stages.stages)}, "extension": stages.extension}
        for name, stage in named.items():
            if stage.loss.sampled is not None and stage.loss.sampled > self.model.vocab_size:
                raise ValueError(
                    f"schedule.stages.{name}.loss.sampled={stage.loss.sampled} exceeds "
                    f"model.vocab_size={self.model.vocab_size}: set it to none for the whole softmax"
                )

    def _validate_documents(self) -> None:
        if self.data.order == "documents" and self.model.document_start is None:
            raise ValueError(
                "data.order=documents needs the token that starts a document: set model.document_start "
                "(50256 for GPT-2's tokens)"
            )
        if self.model.positions == "learned" and self.max_seq_len > self.model.seq_len:
            raise ValueError(
                f"rows of {self.max_seq_len} tokens exceed model.seq_len={self.model.seq_len}, which is as far as "
                "learned positions reach: raise model.seq_len"
            )

    def _validate_numbers(self) -> None:
        """Numbers whose nonsense would show itself late, or never."""
        train, lr, windows = self.train, self.schedule.lr, self.schedule.windows
        checks: list[tuple[str, Any, bool, str]] = [
            ("train.log_every", train.log_every, train.log_every >= 1, "at least 1"),
            ("train.checkpoint_every", train.checkpoint_every, train.checkpoint_every >= 0, "0 (by time only) or more"),
            ("train.grad_clip", train.grad_clip, train.grad_clip is None or train.grad_clip > 0, "positive, or none"),
            ("schedule.lr.floor", lr.floor, 0 <= lr.floor <= 1, "between 0 and 1"),
            ("eval.every", self.eval.every, self.eval.every >= 0, "0 (only at the end) or more"),
            ("eval.batch_tokens", self.eval.batch_tokens, self.eval.batch_tokens >= 1, "at least 1"),
            ("data.mean_document", self.data.mean_document, self.data.mean_document >= 1, "at least 1"),
            ("eval.tokens", self.eval.tokens, self.eval.tokens is None or self.eval.tokens >= 1, "at least 1, or none"),
            ("data.spare_documents", self.data.spare_documents, self.data.spare_documents >= 1, "at least 1"),
            ("schedule.windows.block", windows and windows.block, windows is None or windows.block >= 1, "at least 1"),
        ]
        for i, group in enumerate(self.groups):
            if group.cooldown is not None:
                self.schedule.validate_cooldown(f"groups.{i}.cooldown", group.cooldown, train.num_steps)
            for name in ("lookahead", "mixture", "basis", "radius"):
                option = getattr(group.rule, name, None)
                if option is not None:
                    option.validate(f"groups.{i}.rule.{name}")
            checks += [
                (f"groups.{i}.lr", group.lr, 0 <= group.lr < float("inf"), "0 or more, and finite"),
                (f"groups.{i}.every", group.every, group.every >= 1, "at least 1"),
                (f"groups.{i}.weight_decay", group.weight_decay, group.weight_decay >= 0, "0 or more"),
            ]
            if group.gradient == "last":
                fits = group.role == "head" and group.every > 1
                checks.append((f"groups.{i}.gradient", "last", fits, "sum, but for a group head with every above 1"))
            for name in ("betas", "momentum"):
                value = getattr(group.rule, name, ())
                fits = all(0 <= beta < 1 for beta in (value if isinstance(value, tuple) else (value,)))
                checks.append((f"groups.{i}.rule.{name}", value, fits, "at least 0 and below 1"))
        checks += [*self._model_numbers(), *self._schedule_numbers()]
        for key, value, fits, expected in checks:
            if not fits:
                raise ValueError(f"{key}={value}: it must be {expected}")

    def _model_numbers(self) -> list[tuple[str, Any, bool, str]]:
        """Key, value, whether it fits, and what would: of the model's constants."""
        model, fp8 = self.model, self.precision.fp8_head
        mlp8 = self.precision.fp8_mlp
        checks = [("model.attn_scale", model.attn_scale, model.attn_scale is None or model.attn_scale > 0, "positive")]
        if model.softcap is not None:
            cap, width = model.softcap.cap, model.softcap.width
            checks += [
                ("model.softcap.cap", cap, cap > 0, "positive"),
                ("model.softcap.width", width, width > 0, "positive"),
            ]
        if fp8 is not None:
            checks += [
                (f"precision.fp8_head.{name}", getattr(fp8, name), getattr(fp8, name) > 0, "positive")
                for name in ("x", "weight", "gradient")
            ]
        projections = self.precision.fp8_projections
        if projections is not None:
            key, headroom, gradient = "precision.fp8_projections", projections.headroom, projections.gradient
            checks += [
                (f"{key}.headroom", headroom, headroom >= 1, "at least 1"),
                (f"{key}.gradient", gradient, gradient > 0, "positive"),
            ]
        if mlp8 is not None:
            key, bootstrap = "precision.fp8_mlp", mlp8.bootstrap_steps
            checks += [
                (f"{key}.{name}", getattr(mlp8, name), 1 <= getattr(mlp8, name) < float("inf"), "1 or more, and finite")
                for name in ("activation_headroom", "weight_headroom")
            ]
            checks.append((f"{key}.bootstrap_steps", bootstrap, bootstrap >= 0, "0 or more"))
        return checks

    def _schedule_numbers(self) -> list[tuple[str, Any, bool, str]]:
        """The same of the curves."""
        momentum, windows = self.schedule.momentum, self.schedule.windows
        checks: list[tuple[str, Any, bool, str]] = []
        if momentum is not None:
            checks += [
                (f"schedule.momentum.{name}", value, 0 <= value < 1, "at least 0 and below 1")
                for name, value in (("start", momentum.start), ("end", momentum.end))
            ]
        if windows is not None:
            share = windows.short_fraction
            checks += [
                ("schedule.windows.start", windows.start, windows.start >= 0, "0 or more"),
                ("schedule.windows.end", windows.end, windows.end >= 1, "at least 1"),
                ("schedule.windows.short_fraction", share, 0 < share <= 1, "above 0 and at most 1"),
            ]
        return checks

    def _validate_contradictions(self) -> None:
        """Switches that each work, but not together, or that would be turned without any effect."""
        model, roles = self.model, [group.role for group in self.groups]
        windowed = any(mixer.window != "full" for _, mixer in model.attention)
        twice = sorted({role for role in roles if roles.count(role) > 1})
        if self.schedule.windows is not None and not windowed:
            raise ValueError(
                "schedule.windows is set, but every layer sees everything: set model.layers.N.mixer.window to long or "
                "short where they are meant, or schedule.windows=none"
            )
        if twice:
            raise ValueError(
                f"groups name the role {twice[0]!r} more than once: merge them, or name a longer role in one"
            )
        if model.tied_head and not model.head_copy and "head" in roles:
            raise ValueError(
                "groups have the role 'head', but model.tied_head leaves the head no weight of its own: drop that "
                "group, or set model.tied_head=false"
            )

    def _validate_windows(self) -> None:
        known = self.schedule.windows is not None or self.schedule.stages is not None
        for i, mixer in self.model.attention:
            if mixer.window != "full" and not known:
                raise ValueError(
                    f"model.layers.{i}.mixer.window={mixer.window}, but no schedule.windows says how far: "
                    'set it, for example to {"start": 1024, "end": 1024}'
                )
        if self.model.rotary.yarn and self.schedule.stages is None:
            raise ValueError("model.rotary.yarn follows the windows of schedule.stages: set them, or yarn=false")

    def _validate_precision(self) -> None:
        precision, mlps = self.precision, [layer.mlp for layer in self.model.layers if layer.mlp is not None]
        for name in ("fp8_head", "fp8_mlp", "fp8_projections"):
            if getattr(precision, name) is not None and precision.compute == "fp64":
                raise ValueError(
                    f"precision.{name} with precision.compute=fp64: a product in eight bits is not in 64; "
                    f"set precision.{name}=none"
                )
        sizes = [("model.dim", self.model.dim)]
        if precision.fp8_mlp is not None:
            if self.model.bias or any(mlp.activation != "relu2" for mlp in mlps):
                raise ValueError(
                    "precision.fp8_mlp is for MLPs of activation relu2 without model.bias: set precision.fp8_mlp=none"
                )
            if precision.fp8_mlp.weights and not (precision.fp8_mlp.down and precision.fp8_mlp.backward):
                raise ValueError(
                    "precision.fp8_mlp.weights=true takes codes from all other products: set down=true, backward=true"
                )
            if precision.fp8_mlp.input == "static" and self.model.norm != "rms":
                raise ValueError(
                    f"precision.fp8_mlp.input=static counts on the RMS norm's bound, but model.norm={self.model.norm}: "
                    "set input=dynamic"
                )
            sizes += [("mlp.hidden", mlp.hidden) for mlp in mlps]
        self._validate_projections()
        in_fp8 = any(x is not None for x in (precision.fp8_head, precision.fp8_mlp, precision.fp8_projections))
        for key, size in sizes:
            if in_fp8 and size % 16:
                raise ValueError(f"{key}={size}: products in FP8 want sizes that are multiples of 16")

    def _validate_projections(self) -> None:
        spec = self.precision.fp8_projections
        if spec is None:
            return
        if self.model.norm != "rms" or self.model.bias:
            raise ValueError(
                "precision.fp8_projections is for model.norm=rms, which bounds what they read, without model.bias: "
                "set precision.fp8_projections=none"
            )
        if not spec.qkv and not spec.out:
            raise ValueError(
                "precision.fp8_projections has neither qkv nor out: set one of them, or precision.fp8_projections=none"
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

    "auto" is resolved once, at the start of the run, and the choice is stored, so that a resumed run repeats it; only
    lanes_per_microbatch stays "auto", since it follows the plan.
    """

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    gpus: int = 1  # processes, on CPU too
    lanes_per_microbatch: int | Literal["auto"] = "auto"  # at every step; "auto": as tokens_per_microbatch has room
    tokens_per_microbatch: int | Literal["auto"] = "auto"  # at most; resolved, the tokens of the largest there is
    parts_per_microbatch: int | Literal["auto"] = "auto"  # that its rows are dealt to; more only where memory is short
    compute: Literal["auto", "bf16", "fp32", "fp64"] = "auto"  # never below the recipe's precision
    attention: Literal[
        "auto", "sdpa", "batched", "cudnn", "flash", "flex", "fa2", "fa3", "fa4", "triton", "reference"
    ] = "auto"
    compile: Literal["auto", "off", "default", "max-autotune"] = "auto"
    compilers: int | Literal["auto"] = "auto"  # processes that compile graphs ahead, at once; 0: the run, one by one
    cuda_graphs: Literal["auto", "on", "off"] = "auto"  # "on": a micro-batch is one launch, recorded once a shape
    fp8: Literal["auto", "off"] = "auto"  # "off" does in bf16 what the recipe has in FP8
    threads: int = 0  # CPU threads per process; 0 leaves torch's choice
    allocator: Literal["auto", "default", "expandable"] = "auto"
    activation_budget: float | Literal["auto"] = "auto"  # share kept for the backward pass; the rest is computed again
    timeout_s: float = 600.0  # how long processes wait for one another before they call one lost
    memory_gb: float | None = None  # 10^9 bytes of GPU memory a process may take: to try what a smaller card can do


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
