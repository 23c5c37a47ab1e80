"""A running average of the weights over the last part of a run, into which they are blended at its end.

    A <- kept A + (1 - kept) W      after some of the last steps' updates; at the first of them A <- W
    W <- (1 - blend) W + blend A    after the last update

Weights jitter around where the loss would be lowest, the more the higher the rate, and an average lies nearer to it. It
also lags behind, which is why only a part of it is taken. `TailAverage` says when and how much, and where it is from.

The average belongs to the optimizers' state, like the lower halves of bf16 weights: each process has that of what it
updates, checkpoints hold it by parameter, at any number of processes, and where a warm-up has made one it is dropped.
It is of the exact numbers, in fp32 at least. A part that has not been updated yet has none, and stays as it is.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanosprint.config.schedule import AverageStep, TailAverage
from nanosprint.optim.mantissa import exact, overwrite
from nanosprint.optim.parts import Part, State

AVERAGE = "average"  # the key in the optimizers' state


class Average:
    """The averages of those `parts` whose groups `config` does not exclude."""

    def __init__(self, parts: Sequence[Part], config: TailAverage) -> None:
        self._parts = [part for part in parts if not config.excludes(part.group.role)]
        self._keeps = bool(config.blends)
        self._last: dict[Tensor, Tensor] = {}  # the exact weights of the last step, where more blends will be asked for
        self.can_blend_again = False  # whether they are still known; the same on every process

    @torch.no_grad()
    def follow(self, now: AverageStep) -> None:
        """Move the averages toward the weights, or begin them; at the last step blend. Every process must call it."""
        for tensor, state in self._owned():
            weights = exact(tensor, state)
            if now.kept and AVERAGE in state:
                state[AVERAGE].lerp_(weights, 1 - now.kept)
            else:
                state[AVERAGE] = weights
        if now.blend is not None:
            self.forget()
            self.blend(now.blend)
            self.can_blend_again = self._keeps

    @torch.no_grad()
    def blend(self, share: float) -> None:
        """Give the weights `share` of the average, of which the last step's get the rest. Every process must call it.

        A second call starts from the last step's weights, too; it needs `can_blend_again`.
        """
        for tensor, state in self._owned():
            if AVERAGE in state:
                last = self._last[tensor] if tensor in self._last else exact(tensor, state)
                if self._keeps:
                    self._last[tensor] = last
                overwrite(tensor, state, last.lerp(state[AVERAGE], share))
        for part in self._parts:
            part.gather()
        for part in self._parts:
            part.wait_gathered()

    def forget(self) -> None:
        """Let go of the last step's weights."""
        self._last, self.can_blend_again = {}, False

    def _owned(self) -> Iterator[tuple[Tensor, State]]:
        """What this process updates, and has updated before, with its state, which may be written to."""
        for part in self._parts:
            if part.optimizer is None:
                continue
            for group in part.optimizer.param_groups:
                for tensor in group["params"]:
                    state = part.optimizer.state.get(tensor)
                    if state:
                        yield tensor, state
