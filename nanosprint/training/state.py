"""All that a run is, at a step: what a checkpoint holds and what warm-up must put back."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanosprint.model.gpt import GPT
from nanosprint.optim.build import Optimizers


@dataclass
class TrainState:
    """Model, optimizers and counters. `step` steps are done; `reader` is the data reader's state after them."""

    model: GPT
    optimizers: Optimizers
    step: int = 0
    tokens: int = 0
    train_ms: float = 0.0
    reader: dict[str, Any] | None = field(default=None)

    def capture(self) -> dict[str, Any]:
        """The state as tensors and plain values. Tensors are shared, not copied."""
        return {
            "model": self.model.state_dict(),
            "gradients": self.gradients(),
            "optimizers": self.optimizers.state_dict(),
            "rng": torch.get_rng_state(),
            "counters": {"step": self.step, "tokens": self.tokens, "train_ms": self.train_ms},
            "reader": self.reader,
        }

    def gradients(self) -> dict[str, Tensor]:
        """Gradients that wait for their group's turn, by parameter. Shared, not copied."""
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}

    def drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def restore(self, saved: dict[str, Any]) -> None:
        """Put back what `capture` returned, in place, so that compiled code keeps its references."""
        self.model.load_state_dict(saved["model"])
        for name, parameter in self.model.named_parameters():
            gradient = saved["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self.optimizers.load_state_dict(saved["optimizers"])
        torch.set_rng_state(saved["rng"])
        counters = saved["counters"]
        self.step, self.tokens, self.train_ms = counters["step"], counters["tokens"], counters["train_ms"]
        self.reader = saved["reader"]


def copied(value: Any) -> Any:
    """A deep copy of containers and tensors, so that training on does not change a captured state."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(v) for v in value)
    return value
