"""Mixtures of momenta, against sums over all past gradients in float64."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from nanosprint.config import MomentumMixture
from nanosprint.ops import polar
from nanosprint.optim import Muon
from nanosprint.optim.mixture import ages_of, mix_, weights_of

F64 = torch.float64
MIXTURE = MomentumMixture(count=5, shortest=0.5, longest=30.0, start=10.0, end=3.0)


def by_sums(gradients, ages, weights):
    """The mixture after the last gradient, from the weight that each gradient has in it."""
    total = torch.zeros_like(gradients[0])
    for back, g in enumerate(reversed(gradients)):
        betas = [a / (1 + a) for a in ages]
        total += sum(w * (1 - b) * b**back for w, b in zip(weights, betas, strict=True)) * g
    return total


def test_ages_are_spaced_in_their_logarithm():
    ages = ages_of(MomentumMixture(count=4, shortest=1.0, longest=64.0))
    assert ages == pytest.approx([1.0, 4.0, 16.0, 64.0])


@pytest.mark.parametrize("age", [0.51, 3.0, 9.0, 29.9])
def test_weights(age):
    """They sum to 1, have the mean age and lie on one line in log-log; an old mixture is one of old means."""
    ages = tuple(ages_of(MIXTURE))
    weights = weights_of(ages, age)
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert sum(w * a for w, a in zip(weights, ages, strict=True)) == pytest.approx(age, rel=1e-10)
    logs = [math.log(w) for w in weights]
    slopes = [b - a for a, b in pairwise(logs)]
    assert slopes == pytest.approx([slopes[0]] * 4, rel=1e-6)
    assert (slopes[0] > 0) == (age > sum(ages) / 5)


def test_an_age_that_no_mixture_has():
    with pytest.raises(ValueError, match=r"age=40\.0 must be between .* 0\.5 and"):
        weights_of(tuple(ages_of(MIXTURE)), 40.0)


def test_the_mean_age_is_that_of_the_gradients():
    """Of a long history the mixture's mean age in updates is what was asked for: feed it an impulse and wait."""
    momenta = torch.zeros(1, 5, 1, dtype=F64)
    mass, aged = 0.0, 0.0
    for back in range(2000):
        gradient = torch.full((1, 1), float(back == 0), dtype=F64)
        share = mix_(momenta, gradient, MIXTURE, 7.0).item()
        mass, aged = mass + share, aged + back * share
    assert mass == pytest.approx(1, abs=1e-9)
    assert aged == pytest.approx(7.0, rel=1e-9)


def test_in_muon_with_an_age_that_falls(monkeypatch):
    """Stacks and single parameters, in place of momentum and Nesterov's step; bf16 gradients of fp32 means."""
    monkeypatch.setitem(polar.ORTHOGONALIZERS, "as_it_is", lambda G, dtype: G.to(dtype))
    options = {"lr": 1.0, "orthogonalizer": "as_it_is", "orthogonalize_dtype": F64, "mixture": MIXTURE}
    stack = nn.Parameter(torch.randn(3, 4, 4, dtype=F64))
    singles = [nn.Parameter(w.clone()) for w in stack.detach()]
    bank, apart = Muon([stack], stacked=True, **options), Muon(singles, **options)
    gradients, W = [], stack.detach().clone()
    for step in range(12):
        age = MIXTURE.age(step, 12)
        gradients.append(torch.randn(3, 4, 4, dtype=F64))
        stack.grad = gradients[-1].clone()
        for p, g in zip(singles, gradients[-1], strict=True):
            p.grad = g.clone()
        for optimizer in (bank, apart):
            optimizer.param_groups[0]["age"] = age
            optimizer.step()
        W -= by_sums(gradients, ages_of(MIXTURE), weights_of(tuple(ages_of(MIXTURE)), age))
        torch.testing.assert_close(stack.detach(), W, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.stack([p.detach() for p in singles]), W, rtol=1e-10, atol=1e-12)
    assert bank.state[stack]["exp_avg"].shape == (3, 5, 4, 4)
    assert apart.state[singles[0]]["exp_avg"].shape == (5, 4, 4)


def test_gradients_in_bf16_and_means_in_fp32():
    momenta = torch.zeros(2, 5, 3)
    gradients = [torch.randn(2, 3).bfloat16() for _ in range(4)]
    for g in gradients:
        mixed = mix_(momenta, g, MIXTURE, 4.0)
    truth = by_sums([g.double() for g in gradients], ages_of(MIXTURE), weights_of(tuple(ages_of(MIXTURE)), 4.0))
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), truth, rtol=1e-5, atol=1e-6)


def test_the_age_of_a_step():
    assert [MIXTURE.age(step, 8) for step in (0, 7)] == [10.0, 3.0]
    assert MIXTURE.age(0, 1) == 10.0
