"""Statistics: against scipy, against simulation, and what cannot be computed is refused."""

import math

import numpy as np
import pytest
import scipy.stats as sps

from nanosprint.results import stats

RNG = np.random.default_rng(5)
LOSSES = [3.2791, 3.2779, 3.2802, 3.2766, 3.2788]
OTHERS = [3.2803, 3.2799, 3.2811, 3.2782, 3.2795]


@pytest.mark.parametrize("df", [1, 2, 3.7, 12, 99, 1e4, 1e7])
def test_t_distribution(df):
    for t in (-40.0, -6.5, -2.0, -0.3, -1e-9, 0.0, 0.4, 3.1, 12.0):
        assert stats.t_cdf(t, df) == pytest.approx(sps.t.cdf(t, df), rel=2e-8, abs=1e-250)
    for p in (0.5, 0.6, 0.975, 0.995, 0.99999):
        assert stats.t_quantile(p, df) == pytest.approx(sps.t.ppf(p, df), rel=1e-7, abs=1e-12)


def test_t_distribution_is_normal_in_the_limit():
    assert stats.t_cdf(-1.5, math.inf) == pytest.approx(sps.norm.cdf(-1.5), rel=1e-14)


@pytest.mark.parametrize("n", [2, 3, 10, 200])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_summary(n, confidence):
    values = RNG.normal(3.28, 0.0014, n).tolist()
    found = stats.summarize(values, confidence)
    low, high = sps.t.interval(confidence, n - 1, np.mean(values), sps.sem(values))
    assert (found.n, found.mean, found.sd) == (n, pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-10), pytest.approx(high, rel=1e-10))


@pytest.mark.parametrize("target", [3.27, 3.2785, 3.28, 3.3])
def test_one_sided(target):
    found, expected = stats.test_below(LOSSES, target), sps.ttest_1samp(LOSSES, target, alternative="less")
    assert found.t == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)


def test_published_record():
    """Record #89 of the speedrun: 13 runs, mean 3.27837, sd 0.00142, p = 6.7e-4."""
    z = np.array(sps.norm.ppf((np.arange(13) + 0.5) / 13))
    losses = 3.27837 + 0.00142 * (z - z.mean()) / z.std(ddof=1)
    assert stats.test_below(losses.tolist(), 3.28).p == pytest.approx(6.7e-4, rel=0.03)  # of rounded figures


@pytest.mark.parametrize(("a", "b"), [(LOSSES, OTHERS), (LOSSES, OTHERS[:2]), (LOSSES[:2], [1.0, 2.0, 40.0])])
def test_welch(a, b):
    found, expected = stats.difference(a, b), sps.ttest_ind(a, b, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert found.estimate == pytest.approx(np.mean(a) - np.mean(b))
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(interval.low, rel=1e-8), pytest.approx(interval.high, rel=1e-8))


def test_paired():
    found, expected = stats.difference(LOSSES, OTHERS, paired=True, confidence=0.9), sps.ttest_rel(LOSSES, OTHERS)
    interval = expected.confidence_interval(0.9)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(interval.low, rel=1e-8), pytest.approx(interval.high, rel=1e-8))


def test_pairs_are_shared_seeds_in_their_order():
    assert stats.pair_by_seed([(3, 0.3), (1, 0.1), (9, 0.9)], [(1, 1.0), (2, 2.0), (3, 3.0)]) == (
        (0.1, 0.3),
        (1.0, 3.0),
    )
    with pytest.raises(ValueError, match="seed 7 occurs twice"):
        stats.pair_by_seed([(7, 1.0), (7, 1.0)], [(7, 1.0)])


def test_without_spread_there_is_no_p():
    assert stats.test_below([3.0, 3.0], 3.28) == stats.OneSided(None, None)
    assert stats.difference([3.0, 3.0], [4.0, 4.0]) == stats.Difference(-1.0, -1.0, -1.0, None)
    assert stats.difference([3.0, 5.0], [2.0, 4.0], paired=True) == stats.Difference(1.0, 1.0, 1.0, None)
    assert stats.summarize([3.0, 3.0, 3.0]) == stats.Summary(3, 3.0, 0.0, 3.0, 3.0)
    found = stats.difference([3.0, 3.0], [4.0, 5.0])  # only the other side varies: as against a known number
    assert found.p == pytest.approx(sps.ttest_1samp([4.0, 5.0], 3.0).pvalue)


def exact_power(effect, sd, n, alpha, design):
    df = 2 * n - 2 if design == "independent" else n - 1
    shift = effect / sd * math.sqrt(n / 2 if design == "independent" else n)
    if design == "below":
        return sps.nct.sf(sps.t.ppf(1 - alpha, df), df, shift)
    threshold = sps.t.ppf(1 - alpha / 2, df)
    far = sps.nct.cdf(-threshold, df, shift)  # NaN where it is next to nothing
    return sps.nct.sf(threshold, df, shift) + np.nan_to_num(far)


@pytest.mark.parametrize("design", ["independent", "paired", "below"])
@pytest.mark.parametrize(("n", "power", "alpha"), [(2, 0.8, 0.05), (3, 0.8, 0.01), (5, 0.5, 0.05), (40, 0.95, 0.01)])
def test_smallest_effect(n, power, alpha, design):
    effect = stats.smallest_effect(0.0014, n, power, alpha, design)
    assert exact_power(effect, 0.0014, n, alpha, design) == pytest.approx(power, abs=1e-6)


@pytest.mark.parametrize("design", ["independent", "paired", "below"])
@pytest.mark.parametrize("effect", [0.05, 0.3, 0.9, 2.0, 30.0])
def test_runs_needed_is_the_fewest(effect, design):
    n = stats.runs_needed(1.0, -effect, 0.8, 0.05, design)
    assert exact_power(effect, 1.0, n, 0.05, design) >= 0.8 - 1e-5
    assert n == 2 or exact_power(effect, 1.0, n - 1, 0.05, design) < 0.8 + 1e-5
    assert stats.smallest_effect(1.0, n, 0.8, 0.05, design) <= effect


def test_power_by_simulation():
    n, sd = 6, 0.0014
    effect = stats.smallest_effect(sd, n)
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, sd, (20_000, n)), rng.normal(effect, sd, (20_000, n))
    assert (sps.ttest_ind(a, b, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)


def test_an_effect_that_is_too_small():
    with pytest.raises(ValueError, match=r"effect=1e-09 at sd=1\.0 would take more than"):
        stats.runs_needed(1.0, 1e-9)
    assert stats.runs_needed(0.0, 1e-9) == 2
    assert stats.smallest_effect(0.0, 2) == 0.0


def test_holm():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert stats.holm([0.6, 0.9]) == (1.0, 1.0)
    assert stats.holm([]) == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.summarize([1.0]), "n=1: a spread takes at least 2 runs"),
        (lambda: stats.summarize([]), "n=0"),
        (lambda: stats.summarize([1.0, 2.0, math.nan]), "value 2 is nan"),
        (lambda: stats.summarize([1.0, 2.0], 1.0), "confidence=1.0"),
        (lambda: stats.test_below([1.0, math.inf], 3.28), "value 1 is inf"),
        (lambda: stats.test_below([1.0, 2.0], math.nan), "target=nan"),
        (lambda: stats.difference([1.0, 2.0], [1.0]), "n=1"),
        (lambda: stats.difference([1.0, 2.0], [1.0], paired=True), "2 and 1 values cannot be paired"),
        (lambda: stats.smallest_effect(1.0, 1), "n=1"),
        (lambda: stats.smallest_effect(-1.0, 3), "sd=-1.0"),
        (lambda: stats.smallest_effect(1.0, 3, power=0.01), "power=0.01 must lie between alpha=0.05 and 1"),
        (lambda: stats.runs_needed(1.0, 0.0), "effect=0.0 cannot be looked for"),
        (lambda: stats.runs_needed(1.0, 1.0, alpha=0.0), "alpha=0.0"),
        (lambda: stats.holm([0.1, math.nan]), "p=nan is not a probability"),
    ],
)
def test_what_cannot_be_computed(call, message):
    with pytest.raises(ValueError, match=message):
        call()
