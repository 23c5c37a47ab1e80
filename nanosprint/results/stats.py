"""What a handful of runs can and cannot show. Standard library only.

Seeds scatter the loss of one recipe (by 0.0014 nats in the speedrun's record #89), so one run shows little. Everything
here rests on Student's t distribution, which allows for the spread being estimated from those few runs, too:

    summarize      mean, spread, and an interval that holds the true mean in 95 of 100 series
    test_below     is the true mean below a target? the benchmark's rule
    difference     are two recipes different, and by how much? Welch's test, or paired by seed
    smallest_effect, runs_needed    what n runs could have shown, and how many runs an effect takes
    holm           several comparisons at once: some would come out by chance alone

The last digit of a p-value is not evidence: seeds are draws, losses only about normal.
Sources: Student 1908; Welch 1947; Holm 1979; Lentz 1976 for the continued fraction.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from nanosprint.errors import UserError

Design = Literal["independent", "paired", "below"]
MOST_RUNS = 10**9  # more are never needed in earnest: such an effect is zero
_TINY = 1e-300


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation (n - 1) of `n` values, and the interval `low` .. `high` for the true mean."""

    n: int
    mean: float
    sd: float
    low: float
    high: float


@dataclass(frozen=True)
class OneSided:
    """Test of "the true mean is not below the target": a small `p` speaks against it.

    Both are None where all values are equal: without any spread, nothing is known about chance.
    """

    t: float | None
    p: float | None


@dataclass(frozen=True)
class Difference:
    """Mean of the first minus mean of the second, its interval, and the two-sided `p` of "there is none".

    Where neither side varies, the interval is the estimate itself and `p` is None: nothing is known about chance.
    """

    estimate: float
    low: float
    high: float
    p: float | None


def summarize(values: Sequence[float], confidence: float = 0.95) -> Summary:
    """Describe values and estimate their true mean. Raises ValueError for fewer than two, and for NaN."""
    n, mean, sd = _moments(values)
    half = t_quantile(_upper(confidence), n - 1) * sd / math.sqrt(n)
    return Summary(n, mean, sd, mean - half, mean + half)


def test_below(values: Sequence[float], target: float) -> OneSided:
    """One-sided one-sample t-test that the true mean is below `target`."""
    n, mean, sd = _moments(values)
    if not math.isfinite(target):
        raise UserError(f"target={target} is not a number that a mean can be compared with")
    if sd == 0:
        return OneSided(None, None)
    t = (mean - target) / (sd / math.sqrt(n))
    return OneSided(t, t_cdf(t, n - 1))


test_below.__test__ = False  # type: ignore[attr-defined]  # to pytest, which would collect it by its name


def difference(a: Sequence[float], b: Sequence[float], paired: bool = False, confidence: float = 0.95) -> Difference:
    """How far the mean of `a` lies above that of `b`: by Welch's t-test, whatever the two spreads.

    `paired`: a[i] and b[i] share a seed, and only their differences count; see `pair_by_seed`.
    """
    if paired:
        if len(a) != len(b):
            raise UserError(f"{len(a)} and {len(b)} values cannot be paired: give one of each for every seed")
        n, estimate, sd = _moments([x - y for x, y in zip(a, b, strict=True)])
        error, df = sd / math.sqrt(n), float(n - 1)
    else:
        (n_a, mean_a, sd_a), (n_b, mean_b, sd_b) = _moments(a), _moments(b)
        estimate, part_a, part_b = mean_a - mean_b, sd_a**2 / n_a, sd_b**2 / n_b
        error = math.sqrt(part_a + part_b)
        # Welch and Satterthwaite; shares of the whole, so that tiny spreads do not vanish when squared
        df = 1 / ((part_a / error**2) ** 2 / (n_a - 1) + (part_b / error**2) ** 2 / (n_b - 1)) if error else math.inf
    if error == 0:
        return Difference(estimate, estimate, estimate, None)
    half = t_quantile(_upper(confidence), df) * error
    return Difference(estimate, estimate - half, estimate + half, 2 * t_cdf(-abs(estimate / error), df))


def pair_by_seed(
    a: Iterable[tuple[int, float]], b: Iterable[tuple[int, float]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values of the seeds that both have, in the order of seeds, from (seed, value) of either side.

    Raises ValueError for a seed that one side has twice: it would be unclear which of them belongs to the other side.
    """
    by_seed_a, by_seed_b = _by_seed(a), _by_seed(b)
    shared = sorted(by_seed_a.keys() & by_seed_b.keys())
    return tuple(by_seed_a[seed] for seed in shared), tuple(by_seed_b[seed] for seed in shared)


def smallest_effect(
    sd: float, n: int, power: float = 0.8, alpha: float = 0.05, design: Design = "independent"
) -> float:
    """The true effect that `n` runs of spread `sd` would find with probability `power` at level `alpha`.

    "independent": between two recipes with n runs each, two-sided. "paired": the same with n shared seeds, `sd` that of
    the differences. "below": of one recipe's mean below a target, one-sided. By the noncentral t distribution.
    """
    _check_power(power, alpha)
    if not 0 <= sd < math.inf:
        raise UserError(f"sd={sd} is not a spread: it must be 0 or more")
    if n < 2:
        raise UserError(f"n={n}: a spread takes at least 2 runs")
    if sd == 0:
        return 0.0
    return sd * _root(lambda effect: _power(effect, n, alpha, design) - power)


def runs_needed(
    sd: float, effect: float, power: float = 0.8, alpha: float = 0.05, design: Design = "independent"
) -> int:
    """The fewest runs (of each recipe) that find a true `effect` with probability `power`; see `smallest_effect`.

    Raises ValueError for an effect of zero, which no number of runs can find.
    """
    _check_power(power, alpha)
    if not 0 <= sd < math.inf:
        raise UserError(f"sd={sd} is not a spread: it must be 0 or more")
    if effect == 0 or not math.isfinite(effect):
        raise UserError(f"effect={effect} cannot be looked for: give how far the means may be apart")
    size = math.inf if sd == 0 else abs(effect) / sd
    enough, few = 2, 1
    while size < math.inf and _power(size, enough, alpha, design) < power:
        few, enough = enough, 2 * enough
        if enough > MOST_RUNS:
            raise UserError(f"effect={effect} at sd={sd} would take more than {MOST_RUNS:,} runs to show")
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if _power(size, middle, alpha, design) >= power else (middle, enough)
    return enough


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """p-values adjusted for their number, in the order given: those below alpha hold together at that level."""
    for p in p_values:
        if not 0 <= p <= 1:
            raise UserError(f"p={p} is not a probability")
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return tuple(adjusted)


# --- Student's t distribution ---------------------------------------------------------------------------------------


def t_cdf(t: float, df: float) -> float:
    """Probability of a value of at most `t` with `df` degrees of freedom, exact in the lower tail, too."""
    tail = 0.5 * _incomplete_beta(t * t, df)
    return tail if t <= 0 else 1 - tail


def t_quantile(p: float, df: float) -> float:
    """The value that lies above a share `p` of the distribution; 0.5 <= p < 1."""
    if not 0.5 <= p < 1:
        raise ValueError(f"p={p} must be at least 0.5 and below 1")
    return _root(lambda t: (1 - p) - t_cdf(-t, df))


def _incomplete_beta(t_squared: float, df: float) -> float:
    """The regularised incomplete beta function at x = df / (df + t^2) with a = df / 2 and b = 1/2: both tails of t."""
    if math.isinf(df):
        return math.erfc(math.sqrt(t_squared / 2))
    a, b = df / 2, 0.5
    x, y = df / (df + t_squared), t_squared / (df + t_squared)  # both, since 1 - x would lose digits
    if y == 0:
        return 1.0
    if x == 0:
        return 0.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    # The fraction converges fast on this side of the bend, and the other side follows by symmetry.
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _continued_fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _continued_fraction(b, a, y) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """That of the incomplete beta function (DLMF 8.17.22), by Lentz's method: from the front until nothing changes."""
    value, c, d = 1.0, 1.0, 0.0
    for i in range(1, 10_000):
        m = i // 2
        if i % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _nonzero(1 + numerator * d)
        c = _nonzero(1 + numerator / c)
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            return 1 / value
    raise AssertionError(f"no convergence at a={a}, b={b}, x={x}")


def _nonzero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY


def _power(size: float, n: int, alpha: float, design: Design) -> float:
    """Probability to find an effect of `size` standard deviations: the noncentral t distribution beyond the threshold.

    T = (Z + shift) / S, where S^2 is chi-squared over its degrees of freedom; integrated over S by Simpson's rule,
    which is good to 1e-6 here.
    """
    df = 2 * n - 2 if design == "independent" else n - 1
    shift = size * math.sqrt(n / 2 if design == "independent" else n)
    threshold = t_quantile(1 - alpha if design == "below" else 1 - alpha / 2, df)
    half_width = 12 / math.sqrt(2 * df)
    low, intervals = max(0.0, 1 - half_width), 600
    step = (1 + half_width - low) / intervals
    found = total = 0.0
    for i in range(intervals + 1):
        s = low + i * step
        log_density = (df - 1) * math.log(s) - df * (s - 1) * (s + 1) / 2 if s else (-math.inf if df > 1 else 0.5)
        weight = math.exp(log_density) * (1 if i in (0, intervals) else 4 if i % 2 else 2)
        total += weight
        beyond = _normal_cdf(shift - threshold * s)
        found += weight * (beyond if design == "below" else beyond + _normal_cdf(-shift - threshold * s))
    return found / total


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _root(rising: Callable[[float], float]) -> float:
    """Where a function that rises from below zero at 0 crosses zero, to the last digits, by bisection."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high) and high - low > 1e-14 * high:
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return middle


def _moments(values: Sequence[float]) -> tuple[int, float, float]:
    """Number, mean and standard deviation."""
    for i, value in enumerate(values):
        if not math.isfinite(value):
            raise UserError(f"value {i} is {value}: only finite numbers have a mean")
    if len(values) < 2:
        raise UserError(f"n={len(values)}: a spread takes at least 2 runs")
    return len(values), statistics.fmean(values), statistics.stdev(values)


def _by_seed(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    by_seed: dict[int, float] = {}
    for seed, value in values:
        if seed in by_seed:
            raise UserError(f"seed {seed} occurs twice: runs are paired by their seeds, which must differ")
        by_seed[seed] = value
    return by_seed


def _upper(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence} must lie between 0 and 1")
    return (1 + confidence) / 2


def _check_power(power: float, alpha: float) -> None:
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha={alpha} must lie between 0 and 0.5")
    if not alpha < power < 1:
        raise UserError(f"power={power} must lie between alpha={alpha} and 1")
