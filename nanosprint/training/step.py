"""One optimizer step: forward and backward over the micro-batches, and the update, which overlaps the last of them."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from nanosprint.config.recipe import TrainConfig
from nanosprint.config.schedule import StepPlan
from nanosprint.training.batch import ModelInput
from nanosprint.training.state import TrainState

LossSum = Callable[..., Tensor]  # `GPT.loss_sum`, compiled or not
# The loss of an input; its gradients over a number are added to those that the parameters have.
Backward = Callable[[ModelInput, float], Tensor]


def backward_of(loss_sum: LossSum) -> Backward:
    """The backward pass by autograd, whose hooks tell when a parameter's gradient is complete."""

    def backward(arguments: ModelInput, divisor: float) -> Tensor:
        loss = loss_sum(*arguments)
        (loss / divisor).backward()
        return loss.detach()

    return backward


def train_step(
    backward: Backward,
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
        if last:
            state.engine.begin(plan)
        loss = backward(arguments, divisor)
        total = loss if total is None else total + loss
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
