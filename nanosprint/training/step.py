"""One optimizer step: forward and backward over the micro-batches, and the update, which overlaps the last of them."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from nanosprint.config.recipe import TrainConfig
from nanosprint.config.schedule import StepPlan
from nanosprint.training.batch import ModelInput
from nanosprint.training.state import TrainState

LossSum = Callable[..., Tensor]  # `GPT.loss_sum`, compiled or not


def train_step(
    loss_sum: LossSum,
    state: TrainState,
    micro_batches: Iterable[ModelInput],
    plan: StepPlan,
    train: TrainConfig,
) -> Tensor:
    """Update the model once and return this process's summed loss in nats, still on its device.

    The gradient is that of the loss over all the step's tokens, their mean or their sum over the number of lanes, as
    `train.objective` says, however many processes and micro-batches they are spread over.
    """
    divisor = train.lanes if train.objective == "lane_mean" else plan.batch_tokens
    total = None
    for arguments, last in _marked(micro_batches):
        loss = loss_sum(*arguments)
        if last:
            state.engine.begin(plan)
        (loss / divisor).backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "a step has at least one micro-batch"
    state.engine.step(plan, train.grad_clip)
    state.model.refresh(plan.step + 1)
    return total


def _marked(micro_batches: Iterable[ModelInput]) -> Iterator[tuple[ModelInput, bool]]:
    """Each with whether it is the last, which takes a look at the one behind it."""
    batches = iter(micro_batches)
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch, following is None
        batch = following
