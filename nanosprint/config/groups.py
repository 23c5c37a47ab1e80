"""Which parameters are updated by which rule.

Modules declare a role for each of their parameters ("matrix", "embed", "head", "gate.smear", ...). A `ParamGroup`
matches a role or a prefix of it; the longest match wins, so "gate" covers "gate.smear" until a recipe says more.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """AdamW (Kingma & Ba 2014, arXiv:1412.6980; Loshchilov & Hutter 2017, arXiv:1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    eps_form: Literal["corrected", "uncorrected"] = "corrected"  # what eps is added to: see `optim.adam`
    decay: Literal["plain", "cautious"] = "plain"  # cautious: lr^2 * decay, only where the step shrinks the weight


@dataclass(frozen=True, kw_only=True)
class LookAhead:
    """Gradients are taken where the weights' drift is about to carry them (EMA-Nesterov).

    The drift is a running mean, with `decay`, of what a step moves the weights by. From the step at `start` to that at
    `end`, shares of the run, weights stand ahead by `strength` times the rate's factor times their drift, and so does
    whatever is validated or saved in between. Source: modded-nanogpt pull requests 308 and 309 (track 3: 0.3, 0.99, 10
    to 70 % of 2,890 steps, all parameters); a shorter run wants less decay.
    """

    strength: float = 0.3
    decay: float = 0.99
    start: float = 0.1
    end: float = 0.7

    def covers(self, step: int, num_steps: int) -> bool:
        """Whether the gradient of `step` is taken ahead."""
        return self.start * num_steps <= step < min(self.end, 1) * num_steps

    def validate(self, key: str) -> None:
        """Raise ValueError naming the first setting below `key` that cannot work."""
        _require(
            key,
            ("strength", self.strength, 0 < self.strength < float("inf"), "positive, and finite"),
            ("decay", self.decay, 0 <= self.decay < 1, "at least 0 and below 1"),
            ("start", self.start, 0 <= self.start < self.end, f"between 0 and end={self.end}"),
            ("end", self.end, self.end <= 1, "at most 1"),
        )


@dataclass(frozen=True, kw_only=True)
class RadiusControl:
    """What a step may do to the norms of a matrix and of its outputs' weights. See `optim.radius` for the formulas.

    Of the part of an update along the matrix itself, `outward` is kept where it lets the matrix grow. Each output's
    update is then raised to at least `floor` times the length of the output's weights (both times the rate), and with
    `pin` the matrix ends at the norm that it has to first order, without the growth of any step's second. Decay comes
    last. `outputs`: where the weights of one output lie, "columns" in a matrix stored (in, out).

    Source: modded-nanogpt, track 3, records 45 and 46 (pull request 328): 0.3825 and one half. It decays by 0.025 of
    the rate, cautiously; that is `weight_decay` of about 1 here, where the rate counts twice.
    """

    floor: float = 0.3825
    outward: float = 0.5
    pin: bool = True
    outputs: Literal["rows", "columns"] = "rows"

    def validate(self, key: str) -> None:
        """Raise ValueError naming the first setting below `key` that cannot work."""
        _require(
            key,
            ("floor", self.floor, 0 <= self.floor < float("inf"), "0 (for none) or more, and finite"),
            ("outward", self.outward, 0 <= self.outward <= 1, "between 0 and 1 (for all of it)"),
        )


@dataclass(frozen=True, kw_only=True)
class GradientBasis:
    """SOAP's coordinates in front of Muon's orthogonalisation. See `optim.basis` for the formulas.

    `sides` of a matrix as stored that are rotated: "columns" is the side of the model's width in every matrix of the
    record; a side of n costs 8 n^2 bytes for each matrix and of the order of n^3 products. `beta` is the memory of the
    Gram averages and of the squares; bases are renewed on every `refresh_every`-th update.

    Source: SOAP-Muon, modded-nanogpt, track 3, record 44 (pull request 321): both sides, 0.9, on every update.
    """

    sides: Literal["columns", "rows", "both"] = "columns"
    beta: float = 0.9
    refresh_every: int = 10

    def validate(self, key: str) -> None:
        """Raise ValueError naming the first setting below `key` that cannot work."""
        _require(
            key,
            ("beta", self.beta, 0 <= self.beta < 1, "at least 0 and below 1"),
            ("refresh_every", self.refresh_every, self.refresh_every >= 1, "at least 1"),
        )


@dataclass(frozen=True, kw_only=True)
class MomentumMixture:
    """Several running means of the gradient in place of one, whose mean age falls over the run.

    `count` means have ages (what beta / (1 - beta) is, in updates) spaced evenly in their logarithm from `shortest` to
    `longest`; their weights are such that the mean age goes in a line from `start` at the first step to `end` at the
    last. See `optim.mixture`. The schedule's momentum, `momentum` and Nesterov's step have no say then.

    Source: modded-nanogpt pull requests 357 and 359 (track 3: 6 to 8 means, mean age from 58 to 26 or from 50 to 22 in
    3,100 to 3,250 steps). The defaults are these, shrunk to about 1,100 steps; ages do not follow `train.num_steps`.
    """

    count: int = 8
    shortest: float = 1.0
    longest: float = 100.0
    start: float = 20.0
    end: float = 9.0

    def age(self, step: int, num_steps: int) -> float:
        """The mean age at `step`, 0 .. num_steps - 1."""
        return self.start + (self.end - self.start) * step / max(1, num_steps - 1)

    def validate(self, key: str) -> None:
        """Raise ValueError naming the first setting below `key` that cannot work."""
        inside = f"above shortest={self.shortest} and below longest={self.longest}"
        _require(
            key,
            ("count", self.count, 2 <= self.count <= 64, "between 2 and 64; leave the mixture out for one"),
            ("shortest", self.shortest, 0 < self.shortest < self.longest, f"above 0 and below longest={self.longest}"),
            ("longest", self.longest, self.longest < float("inf"), "finite"),
            ("start", self.start, self.shortest < self.start < self.longest, inside),
            ("end", self.end, self.shortest < self.end < self.longest, inside),
        )


def _require(key: str, *checks: tuple[str, object, bool, str]) -> None:
    """Raise ValueError for the first of (name, value, whether it fits, what would) that does not fit."""
    for name, value, fits, expected in checks:
        if not fits:
            raise ValueError(f"{key}.{name}={value}: it must be {expected}")


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon (Jordan et al. 2024): orthogonalised Nesterov momentum. The schedule gives the momentum.

    `variance_beta` evens out the update's rows or columns (NorMuon, Li et al. 2025, arXiv:2510.05491). `equalize` gives
    the rows of a matrix, as stored, the same length before it is orthogonalised (MuonEq-R). The others are off where
    they are None: their classes say what they do, and what each costs stands in its module of `optim`.
    """

    momentum: float = 0.95
    scale: Literal["rms", "spectral"] = "spectral"
    orthogonalizer: Literal["ns5", "polar_express"] = "ns5"
    equalize: Literal["none", "rows"] = "none"
    lookahead: LookAhead | None = None
    mixture: MomentumMixture | None = None
    basis: GradientBasis | None = None
    radius: RadiusControl | None = None
    variance_beta: float | None = None
    decay: Literal["plain", "cautious"] = "plain"


@dataclass(frozen=True, kw_only=True)
class SoapConfig:
    """SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in the eigenbasis of Shampoo's averages."""

    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    refresh_every: int = 10


@dataclass(frozen=True, kw_only=True)
class RowAdagradConfig:
    """Adagrad with one sum for each row of a table, moving only the rows that were looked up."""

    power: float = 0.5  # of the sum of squares that the step is divided by


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters by role, their rule, and the rate that the schedule's factor multiplies."""

    role: str
    rule: AdamConfig | MuonConfig | SoapConfig | RowAdagradConfig
    lr: float
    weight_decay: float = 0.0
    lr_scale: float = 1.0  # multiplies lr, but not the rate that enters cautious decay a second time
    storage: Literal["fp32", "bf16", "bf16+16"] = "fp32"  # "bf16+16": the optimizer keeps the lower half of fp32
    # "shard_sparse": of the gradient only rows that are not zero travel, which suits tables
    comm: Literal["replicate", "shard", "shard_sparse"] = field(default="shard", metadata={"hashed": False})
    every: int = field(default=1, metadata={"help": "update on every n-th step, with the sum of the gradients since"})
    # "last": of the steps since its last update only the last has a gradient, which counts as often as there are steps.
    # The mean is the same, the noise larger, and the product of the others is saved. Known to the head alone.
    gradient: Literal["sum", "last"] = "sum"
    # The share of the scheduled steps in which the rate falls; None: the schedule's. Track 3 of the speedrun gained by
    # matrices that fall earlier than the rest (modded-nanogpt pull request 292).
    cooldown: float | None = None

    def due(self, step: int) -> bool:
        """Whether it is updated at `step`, counted from 0."""
        return (step + 1) % self.every == 0


def match_group(role: str, groups: tuple[ParamGroup, ...]) -> ParamGroup:
    """The group for `role`: the one with the longest role that equals it or is a dotted prefix of it.

    Raises ValueError where no group fits.
    """
    fits = [g for g in groups if role == g.role or role.startswith(g.role + ".")]
    if not fits:
        known = ", ".join(g.role for g in groups)
        raise ValueError(f"no group for parameters of role {role!r}: the recipe has groups for {known}")
    return max(fits, key=lambda g: len(g.role))
