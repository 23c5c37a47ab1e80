"""One optimizer step: forward and backward over the micro-batches, one exchange of gradients, one update."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanosprint.config.schedule import StepPlan
from nanosprint.optim.build import Optimizers
from nanosprint.training import distributed
from nanosprint.training.batch import ModelInput

LossSum = Callable[..., Tensor]  # `GPT.loss_sum`, compiled or not


def train_step(
    loss_sum: LossSum,
    optimizers: Optimizers,
    micro_batches: Iterable[ModelInput],
    plan: StepPlan,
    grad_clip: float | None,
) -> Tensor:
    """Update the model once and return this process's summed loss in nats, still on its device.

    The gradient is that of the mean loss over all the step's tokens, however many processes and micro-batches they
    are spread over.
    """
    total = None
    for arguments in micro_batches:
        loss = loss_sum(*arguments)
        (loss / plan.batch_tokens).backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "a step has at least one micro-batch"
    # The others go on accumulating, each process its own part, until it is their turn.
    parameters = optimizers.due(plan)
    distributed.sum_gradients(parameters)
    if grad_clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
    optimizers.step(plan)
    return total
