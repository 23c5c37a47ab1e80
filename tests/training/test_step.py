"""One step: what is differentiated, and when the engine is told that the last backward pass comes."""

import pytest
import torch

from nanosprint.config.recipe import TrainConfig
from nanosprint.config.schedule import StepPlan
from nanosprint.training.step import backward_of, train_step

PLAN = StepPlan(step=0, lr_factor=1.0, momentum=None, batch_tokens=6, seq_len=1, windows=None)


class Recorder:
    """Stands for a run's state: its engine, and its model with one weight."""

    def __init__(self):
        self.engine = self.model = self
        self.weight = torch.ones((), requires_grad=True)
        self.calls = []

    def loss_sum(self, x):
        self.calls.append(f"loss {x:g}")
        return self.weight * x

    def begin(self, plan):
        self.calls.append("begin")
        self.before = 0.0 if self.weight.grad is None else self.weight.grad.item()

    def step(self, plan, grad_clip):
        self.calls.append("step")
        self.got = (plan, grad_clip, self.weight.grad.item())

    def refresh(self, steps):
        self.calls.append(f"refresh {steps}")


@pytest.mark.parametrize(("objective", "divisor"), [("mean", 6), ("lane_mean", 4)])
def test_a_step(objective, divisor):
    it = Recorder()
    train = TrainConfig(batch_tokens=6, lanes=4, objective=objective, grad_clip=0.5)
    total = train_step(backward_of(it.loss_sum), it, iter([(3.0,), (5.0,), (7.0,)]), PLAN, train)
    assert total.item() == 15
    assert it.got[:2] == (PLAN, 0.5)
    assert it.got[2] == pytest.approx(15 / divisor)
    assert it.calls == ["loss 3", "loss 5", "begin", "loss 7", "step", "refresh 1"]
    assert it.before == pytest.approx(8 / divisor)  # the last backward pass came after `begin`


def test_a_step_without_micro_batches():
    it = Recorder()
    with pytest.raises(AssertionError, match="at least one micro-batch"):
        train_step(backward_of(it.loss_sum), it, [], PLAN, TrainConfig(batch_tokens=6))
