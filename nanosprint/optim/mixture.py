"""Several running means of the gradient, old and young, mixed into one direction whose mean age falls over a run.

    M_k <- b_k M_k + (1 - b_k) G,   b_k = a_k / (1 + a_k)     ages a_k in equal ratios, from the shortest to the longest
    U   =  sum_k w_k M_k,           w_k ~ a_k^p, sum_k w_k = 1, and p such that sum_k w_k a_k is the age asked for

One mean forgets exponentially; a mixture of powers of the age forgets like a power law: it keeps gradients of long ago
while it follows the latest, and one number, the mean age, makes it longer or shorter at any step without a memory to
be built up anew. Means begin at zero and are not corrected for it, so that a run starts with the young ones, as with a
momentum that is warmed up. The sources do not say how they weigh the means; the power law is our choice.

Cost: 4 `count` bytes of state a weight instead of 4, and two passes over them: about 12 `count` bytes of traffic a
weight, in four launches a bank.

Source: see `MomentumMixture`.
"""

import functools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from nanosprint.config.groups import MomentumMixture
from nanosprint.kernels.host import sent
from nanosprint.ops.tracing import not_traced


def mix_all_(
    averages: Sequence[Tensor], grads: Sequence[Tensor], mixture: MomentumMixture, age: float | None, stacked: bool
) -> list[Tensor]:
    """`mix_` for each parameter; those that are no stacks have the axis of means in front. age None: the first one."""
    age = mixture.start if age is None else age
    if stacked:
        return [mix_(m, g, mixture, age) for m, g in zip(averages, grads, strict=True)]
    return [mix_(m[None], g[None], mixture, age)[0] for m, g in zip(averages, grads, strict=True)]


@not_traced  # weights are found on the host and sent to the device
def mix_(momenta: Tensor, grads: Tensor, mixture: MomentumMixture, age: float) -> Tensor:
    """Move the means toward the gradients and return their mixture of this mean age (in updates).

    momenta: (k, count, *shape), fp32 or wider, updated in place. grads: (k, *shape), not modified. Returns
    (k, *shape) in momenta's dtype.
    """
    ages = ages_of(mixture)
    around, send = (len(ages), *(1 for _ in grads.shape[1:])), partial(sent, dtype=momenta.dtype, device=momenta.device)
    momenta.lerp_(grads.to(momenta.dtype).unsqueeze(1), send([1 / (1 + a) for a in ages]).view(around))
    weights = send(weights_of(tuple(ages), age)).expand(len(momenta), 1, -1)
    return torch.bmm(weights, momenta.flatten(2)).view(grads.shape)


def ages_of(mixture: MomentumMixture) -> list[float]:
    """The ages of the means, youngest first."""
    ratio = mixture.longest / mixture.shortest
    return [mixture.shortest * ratio ** (k / (mixture.count - 1)) for k in range(mixture.count)]


@functools.lru_cache(maxsize=16)  # the banks of a step ask for the same
def weights_of(ages: tuple[float, ...], age: float) -> list[float]:
    """Weights that sum to 1, proportional to a power of the ages, with which their mean is `age`, by bisection.

    Raises ValueError for an age that is not between the first and the last.
    """
    if not ages[0] < age < ages[-1]:
        raise ValueError(f"age={age} must be between the shortest and the longest mean's, {ages[0]} and {ages[-1]}")
    low, high = -64.0, 64.0
    for _ in range(80):
        power = (low + high) / 2
        weights = _powers(ages, power)
        if sum(w * a for w, a in zip(weights, ages, strict=True)) < age:
            low = power
        else:
            high = power
    return weights


def _powers(ages: tuple[float, ...], power: float) -> list[float]:
    """Powers of the ages, scaled so that they sum to 1."""
    largest = ages[-1] if power > 0 else ages[0]  # so that no power overflows
    powers = [(a / largest) ** power for a in ages]
    return [p / sum(powers) for p in powers]
