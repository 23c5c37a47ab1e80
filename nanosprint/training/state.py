"""All that a run is, at a step: what a checkpoint holds and what warm-up must put back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanosprint.config.recipe import Recipe
from nanosprint.model.gpt import GPT
from nanosprint.model.roles import collect_roles
from nanosprint.optim.engine import Engine


@dataclass
class TrainState:
    """Model, its optimizers and counters. `step` steps are done; `reader` is the data reader's state after them."""

    model: GPT
    engine: Engine
    step: int = 0
    tokens: int = 0
    train_ms: float = 0.0
    reader: dict[str, Any] | None = field(default=None)

    def snapshot(self) -> dict[str, Any]:
        """A copy of this process's state, for `put_back`. Asks no other process."""
        return copied({"model": self.model.state_dict(), "engine": self.engine.snapshot(), **self._rest()})

    def put_back(self, snapshot: dict[str, Any]) -> None:
        """Make the state what it was at `snapshot`, in place, so that compiled code keeps its references."""
        self.model.load_state_dict(snapshot["model"])
        self.engine.put_back(snapshot["engine"])
        self._set_rest(snapshot)

    def capture(self, *, keep: bool) -> dict[str, Any] | None:
        """The whole state as tensors on the CPU and plain values, copied; None unless `keep`.

        Tensors go by parameter name, so that it fits any number of processes. Every process must call it.
        """
        device = torch.device("cpu") if keep else None
        engine = self.engine.capture(device)
        return on_cpu({"model": self.model.state_dict(), "engine": engine, **self._rest()}) if keep else None

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `capture` returned, in place, at any number of processes."""
        self.model.load_state_dict(saved["model"])
        self.engine.restore(saved["engine"])
        self._set_rest(saved)

    def _rest(self) -> dict[str, Any]:
        return {
            "rng": torch.get_rng_state(),
            "counters": {"step": self.step, "tokens": self.tokens, "train_ms": self.train_ms},
            "reader": self.reader,
        }

    def _set_rest(self, saved: dict[str, Any]) -> None:
        torch.set_rng_state(saved["rng"])
        counters = saved["counters"]
        self.step, self.tokens, self.train_ms = counters["step"], counters["tokens"], counters["train_ms"]
        self.reader = saved["reader"]


def build_engine(model: GPT, recipe: Recipe) -> Engine:
    """The recipe's optimizers for the model's parameters, which must be on their device already."""
    return Engine(
        dict(model.named_parameters()),
        collect_roles(model),
        recipe.groups,
        recipe.precision,
        update_order=recipe.update_order,
        tied=recipe.model.head_layout if recipe.model.head_copy else None,
        average=recipe.schedule.average,
    )


def copied(value: Any) -> Any:
    """A deep copy of containers and tensors, so that training on does not change it."""
    return _mapped(value, lambda tensor: tensor.detach().clone())


def on_cpu(value: Any) -> Any:
    """A deep copy on the CPU. Views of a bank come out as tensors of their own, without its padding."""
    return _mapped(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(v, change) for v in value)
    return value
