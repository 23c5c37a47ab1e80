"""What the optimizers share: the thin `torch.optim.Optimizer` shell around pure update rules.

A rule is a function of tensors (parameters, gradients, state) that updates in place and knows nothing of groups or
gradients that are None. A shell collects those tensors from its param groups and calls the rule. So a rule can be
tested against its textbook form, compiled, or used without any optimizer object.

The shell differs from plain `torch.optim.Optimizer` in three habits. State is fp32 at least, also for bf16
parameters, and stays so through `load_state_dict` (torch would cast it to the parameter's dtype). Loading copies, so
that a state dict is never changed by later steps. Options are checked wherever they enter: misspelt ones and torch's
that do not exist here are refused; foreign keys such as a scheduler's "initial_lr" are carried along.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

Decay = Literal["plain", "cautious"]

# Options of torch's optimizers: silently carrying one along would look as if it had an effect.
_FOREIGN = {
    "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "nesterov", "momentum", "betas", "eps",
    "dampening", "ns_coefficients", "ns_steps", "adjust_lr_fn",
}  # fmt: skip


# Without its wrapper, which imports the compiler: longer than torch takes, also where nothing is compiled.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class Shell(torch.optim.Optimizer):
    """Base of all optimizers here. Subclasses give `_check_group`, `_init_state` and `_update`."""

    takes_sparse = False  # whether gradients may be sparse

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's value, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options. Raises ValueError, and adds nothing, if an option cannot work."""
        _add_param_group(self, param_group)
        group = self.param_groups[-1]
        try:
            self._check_names(group)
            _check_common(group)
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, bit for bit and as a copy, on the parameters' devices."""
        super().load_state_dict(state_dict)
        indices = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        params = chain.from_iterable(g["params"] for g in self.param_groups)
        for index, param in zip(indices, params, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    device = torch.device("cpu") if key == "step" else param.device
                    self.state[param][key] = value.detach().to(device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; groups saved by an older version take the defaults for options it did not have."""
        super().__setstate__(state)
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)

    def _check_names(self, group: dict[str, Any]) -> None:
        for key in group.keys() - self.defaults.keys() - {"params", "param_names"}:
            near = difflib.get_close_matches(key, self.defaults.keys(), n=1, cutoff=0.75)
            if near or key in _FOREIGN:
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(self.defaults))}"
                raise ValueError(f"{type(self).__name__} has no option {key!r}: {hint}")

    def _active(self, group: dict[str, Any]) -> list[Tensor]:
        """The group's parameters that have a gradient, their state made on first use."""
        active = []
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse and not self.takes_sparse:
                raise ValueError(
                    f"{type(self).__name__} got a sparse gradient for a parameter of shape {tuple(param.shape)}: "
                    "build its nn.Embedding with sparse=False"
                )
            state = self.state[param]
            if not state:
                self._init_state(param, group, state)
            active.append(param)
        return active

    def _check_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _init_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _update(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


def _check_common(group: dict[str, Any]) -> None:
    """Learning rate, decay and parameter types, which every rule has."""
    for option in ("lr", "weight_decay", "lr_scale"):
        if not group.get(option, 0) >= 0:  # NaN fails too
            raise ValueError(f"{option}={group[option]} must not be negative")
    if group.get("decay", "plain") not in get_args(Decay):
        raise ValueError(f"decay={group['decay']!r} is unknown: choose one of {', '.join(get_args(Decay))}")
    for param in group["params"]:
        if not param.is_floating_point():
            raise ValueError(f"a parameter of shape {tuple(param.shape)} is {param.dtype}: use a real float type")


def check_unit(name: str, value: float) -> None:
    """Raise ValueError unless 0 <= value < 1, the range of an averaging factor."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} must be at least 0 and below 1")


def state_dtype(param: Tensor) -> torch.dtype:
    """fp32 for fp32 and narrower parameters, fp64 for fp64: averages of small steps do not fit into bf16."""
    return torch.promote_types(param.dtype, torch.float32)


def number(value: Any) -> Any:
    """A plain float where that costs nothing: floats, and 0-D CPU tensors unless a compiler is tracing.

    Schedules may put tensors into param groups so that compiled steps need no recompilation; on a GPU, reading one
    would wait for the device, so those stay tensors.
    """
    if isinstance(value, Tensor) and value.device.type == "cpu" and not torch.compiler.is_compiling():
        return value.item()
    return value


def as_dtype(tensors: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in `dtype`; those that already have it are passed on, not copied."""
    return [t if t.dtype == dtype else t.to(dtype) for t in tensors]


def subtract_(params: list[Tensor], updates: list[Tensor], step_size: Any) -> None:
    """params -= step_size * updates, in place; step_size a number or a 0-D tensor. The lists share a dtype."""
    if isinstance(step_size, Tensor):
        torch._foreach_sub_(params, cast(Any, torch._foreach_mul(updates, step_size)))
    else:
        torch._foreach_add_(params, updates, alpha=-step_size)


def shrink_(params: list[Tensor], updates: list[Tensor], amount: Any, *, strict: bool) -> None:
    """Cautious weight decay: params -= amount * params, but only where `updates`, subtracted later, shrink them too.

    That is where update * weight > 0 or, if not strict, >= 0. amount: a number or a 0-D tensor. In place; the lists
    share a dtype. Source: Chen et al. 2025, arXiv:2510.12402.
    """
    for param, update in zip(params, updates, strict=True):
        product = update * param
        param.sub_(param * (product > 0 if strict else product >= 0) * amount)
