"""What the engine handles one by one: a bank or a table, with its rule, its messages and its state.

A step takes a part through `reduce` (launched, perhaps during the backward pass), `wait_reduced`, `update` (what this
process owns), `gather` (launched) and `wait_gathered`. State goes out and in twofold: `state` and `load_state` are this
process's share, for putting back what a warm-up changed; `whole_state` and `load_whole_state` go by parameter name with
whole tensors, so that a checkpoint fits any number of processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanosprint.config.groups import ParamGroup
from nanosprint.config.schedule import StepPlan
from nanosprint.ops.polar import orthogonalizer, share_launches
from nanosprint.optim.adam import AdamW, step_together
from nanosprint.optim.bank import Bank
from nanosprint.optim.lookahead import step_ahead
from nanosprint.optim.muon import Muon, step_stacks
from nanosprint.optim.sharding import (
    from_first,
    gather_bank,
    gather_sparse,
    gather_units,
    place,
    reduce_bank,
    reduce_rows,
    sum_over_processes,
)

State = dict[str, Tensor]


class Part(ABC):
    """Parameters of one group that are reduced, updated and gathered together.

    `optimizer` is the rule for what this process owns, None where that is nothing.
    """

    def __init__(
        self, group: ParamGroup, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.group, self.parameters, self.optimizer = group, dict(parameters), optimizer
        self.accumulating = False  # whether gradients of earlier steps wait for their turn

    def due(self, plan: StepPlan) -> bool:
        """Whether it is updated at this step, with the sum of the gradients since the last time."""
        return self.group.due(plan.step)

    @property
    @abstractmethod
    def sharded(self) -> bool:
        """Whether processes update different parts of it."""

    @abstractmethod
    def reduce(self) -> None:
        """Launch the sum of the gradients over all processes."""

    @abstractmethod
    def wait_reduced(self) -> None:
        """What follows sees the sum."""

    @abstractmethod
    def own_gradients(self) -> list[Tensor]:
        """Of the summed gradients, those that this process updates with."""

    @abstractmethod
    def update(self, plan: StepPlan) -> None:
        """Apply the rule to what this process owns and clear the gradients."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all gradients."""

    @abstractmethod
    def gather(self) -> None:
        """Launch the exchange of what the processes updated."""

    @abstractmethod
    def wait_gathered(self) -> None:
        """What follows sees the new parameters."""

    @abstractmethod
    def state(self) -> list[State]:
        """The rule's state of what this process owns: shared, not copied."""

    @abstractmethod
    def load_state(self, states: list[State]) -> None:
        """Put back what `state` returned, in place where there is a place."""

    @abstractmethod
    def whole_state(self, device: torch.device | None) -> dict[str, State] | None:
        """By parameter, on `device`; None where that is None. Every process must call it."""

    @abstractmethod
    def load_whole_state(self, saved: Mapping[str, State]) -> None:
        """Take this process's share of what `whole_state` returned, at whatever number of processes."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """What this process has accumulated, by parameter: shared, not copied."""

    @abstractmethod
    def whole_gradients(self) -> dict[str, Tensor]:
        """What all processes together have accumulated, by parameter. Every process must call it."""

    @abstractmethod
    def load_gradients(self, saved: Mapping[str, Tensor]) -> None:
        """Take accumulated gradients over, those of this part's parameters; others become zero."""


class BankPart(Part):
    """A bank and its rule. `optimizer` holds this process's units and is None where it has none."""

    def __init__(self, group: ParamGroup, bank: Bank, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(group, {slot.name: slot.parameter for slot in bank.slots}, optimizer)
        self.bank = bank
        self.index = shard_index(bank)
        self._reducing: Any = None
        self._gathering: Any = None

    @property
    def sharded(self) -> bool:
        return self.bank.shards > 1

    def reduce(self) -> None:
        self._reducing = (reduce_rows if self.group.comm == "shard_sparse" else reduce_bank)(self.bank)

    def wait_reduced(self) -> None:
        _wait(self._reducing)
        self._reducing = None

    def own_gradients(self) -> list[Tensor]:
        own = self.bank.owned(self.bank.grad, self.index)
        return [own] if own.numel() else []

    def update(self, plan: StepPlan) -> None:
        if self.optimizer is not None:
            set_rates(self.optimizer, plan, self.group.role)
            step_ahead(self.optimizer, dict(plan.ahead).get(self.group.role))
        self.clear()

    def clear(self) -> None:
        self.bank.grad.zero_()
        self.accumulating = False

    def gather(self) -> None:
        self._gathering = gather_bank(self.bank)

    def wait_gathered(self) -> None:
        _wait(self._gathering)
        self._gathering = None

    def state(self) -> list[State]:
        return _states(self.optimizer)

    def load_state(self, states: list[State]) -> None:
        _load_states(self.optimizer, states)

    def whole_state(self, device: torch.device | None) -> dict[str, State] | None:
        own = self._by_unit()
        keys: dict[str, Any] = {k: v if v.ndim == 0 else (v.shape[1:], v.dtype) for k, v in own.items()}
        saved: dict[str, State] = {slot.name: {} for slot in self.bank.slots}
        for key, what in from_first(keys).items():  # the first process always owns something
            if isinstance(what, Tensor):  # a counter, the same everywhere
                parts = dict.fromkeys(saved, what.clone())
            else:
                parts = self.bank.split(gather_units(self.bank, own.get(key), *what))
            if device is not None:
                for name, part in parts.items():
                    saved[name][key] = part if part.ndim == 0 else part.to(device)
        return None if device is None else saved

    def load_whole_state(self, saved: Mapping[str, State]) -> None:
        units = self.bank.units_of(self.index)
        mine: State = {}
        for key, value in saved[self.bank.slots[0].name].items():
            if value.ndim:
                whole = self.bank.join({name: saved[name][key] for name in self.parameters})
                value = whole[units.start : units.stop]
            mine[key] = value
        if self._is_stack:
            self.load_state([mine])
        else:
            self.load_state([{k: v[i] if v.ndim else v for k, v in mine.items()} for i in range(len(units))])

    @property
    def _is_stack(self) -> bool:
        """Whether the rule has this process's units as one tensor, not one by one."""
        return self.optimizer is None or _tensors(self.optimizer)[0].ndim == 1 + len(self.bank.unit)

    def _by_unit(self) -> State:
        """The rule's state with an axis of units in front, counters aside."""
        states = self.state()
        if self._is_stack or not states:
            return states[0] if states else {}
        return {k: torch.stack([s[k] for s in states]) if v.ndim else v for k, v in states[0].items()}

    def gradients(self) -> dict[str, Tensor]:
        return self.bank.grads if self.accumulating else {}

    def whole_gradients(self) -> dict[str, Tensor]:
        if not self.accumulating:
            return {}
        return self.bank.views(sum_over_processes(self.bank.grad.clone()))

    def load_gradients(self, saved: Mapping[str, Tensor]) -> None:
        self.clear()
        for name, gradient in self.bank.grads.items():
            if name in saved:
                gradient.copy_(saved[name])
                self.accumulating = True


TOGETHER = 2**18  # numbers in a bank at most: such an update takes the GPU a few microseconds, and the host many more


def is_small(part: Part, plan: StepPlan) -> bool:
    """Whether the part may be updated together with others: a small bank that every process has, with Adam alone."""
    return (
        isinstance(part, BankPart)
        and isinstance(part.optimizer, AdamW)
        and not part.sharded
        and part.bank.data.numel() <= TOGETHER
        and part.group.role not in dict(plan.ahead)
    )


def update_together(parts: Sequence[Part], plan: StepPlan) -> None:
    """`update` of parts that are small, in few launches."""
    grads: dict[torch.dtype, list[Tensor]] = {}
    optimizers = []
    for part in parts:
        assert isinstance(part, BankPart)
        assert isinstance(part.optimizer, AdamW)
        set_rates(part.optimizer, plan, part.group.role)
        optimizers.append(part.optimizer)
        grads.setdefault(part.bank.grad.dtype, []).append(part.bank.grad)
    step_together(optimizers)
    for alike in grads.values():
        torch._foreach_zero_(alike)
    for part in parts:
        part.accumulating = False


def stacks_together(parts: Sequence[Part], plan: StepPlan) -> list[Part]:
    """Those of the parts that orthogonalise in common launches, if there are several: whole banks with Muon alone.

    None with several processes: messages of one bank travel while another is computed.
    """
    if place()[1] > 1:
        return []
    found = [part for part in parts if isinstance(part.optimizer, Muon) and part.group.role not in dict(plan.ahead)]
    groups = [group for optimizer in _muons(found) for group in optimizer.param_groups]
    if len(found) < 2 or len({(group["orthogonalizer"], group["orthogonalize_dtype"]) for group in groups}) > 1:
        return []
    tensors = [tensor for group in groups for tensor in group["params"]]
    function, dtype = orthogonalizer(groups[0]["orthogonalizer"]), groups[0]["orthogonalize_dtype"]
    alone = any(group["split"] != 1 or group["cuda_graph"] for group in groups)
    if alone or not share_launches(function, [t.shape for t in tensors], dtype, tensors[0].device):
        return []
    return found


def _muons(parts: Sequence[Part]) -> list[Muon]:
    return [part.optimizer for part in parts if isinstance(part.optimizer, Muon)]


def update_stacks(parts: Sequence[Part], plan: StepPlan) -> None:
    """`update` of what `stacks_together` found."""
    optimizers = _muons(parts)
    for part, optimizer in zip(parts, optimizers, strict=True):
        set_rates(optimizer, plan, part.group.role)
    step_stacks(optimizers)
    for part in parts:
        part.clear()


class TablePart(Part):
    """A look-up table with sparse gradients. Every process makes the same update, with the look-ups of all."""

    def __init__(self, group: ParamGroup, name: str, table: Tensor, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(group, {name: table}, optimizer)
        self.name, self.table, self._rule = name, table, optimizer

    @property
    def sharded(self) -> bool:
        return False

    def reduce(self) -> None:
        if place()[1] > 1:
            self.table.grad = gather_sparse(self.table.grad, self.table)

    def wait_reduced(self) -> None:
        """Nothing: `reduce` has waited, since it must know the number of look-ups."""

    def own_gradients(self) -> list[Tensor]:
        raise ValueError(f"train.grad_clip cannot be had with the sparse gradients of {self.name}: set it to none")

    def update(self, plan: StepPlan) -> None:
        set_rates(self._rule, plan, self.group.role)
        self._rule.step()
        self.clear()

    def clear(self) -> None:
        self.table.grad = None
        self.accumulating = False

    def gather(self) -> None:
        """Nothing: every process has updated all of it."""

    def wait_gathered(self) -> None:
        """Nothing was sent."""

    def state(self) -> list[State]:
        return _states(self.optimizer)

    def load_state(self, states: list[State]) -> None:
        _load_states(self.optimizer, states)

    def whole_state(self, device: torch.device | None) -> dict[str, State] | None:
        return None if device is None else {self.name: {k: v.to(device) for k, v in self.state()[0].items()}}

    def load_whole_state(self, saved: Mapping[str, State]) -> None:
        self.load_state([dict(saved[self.name])])

    def gradients(self) -> dict[str, Tensor]:
        return {self.name: self.table.grad} if self.accumulating and self.table.grad is not None else {}

    def whole_gradients(self) -> dict[str, Tensor]:
        return {self.name: gather_sparse(self.table.grad, self.table)} if self.accumulating else {}

    def load_gradients(self, saved: Mapping[str, Tensor]) -> None:
        self.clear()
        if self.name in saved:
            self.table.grad = saved[self.name].to(self.table.device)
            self.accumulating = True


def shard_index(bank: Bank) -> int:
    """Which shard of the bank is this process's."""
    return place()[0] if bank.shards > 1 else 0


def set_rates(optimizer: torch.optim.Optimizer, plan: StepPlan, role: str) -> None:
    """Write the step's rate for `role`, and its momentum and mean age where there are such, into the groups."""
    factor, age = plan.factor_of(role), dict(plan.ages).get(role)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
        if plan.momentum is not None and "momentum" in group:
            group["momentum"] = plan.momentum
        if age is not None:
            group["age"] = age


def _wait(handle: Any) -> None:
    """Wait for a message; on a GPU its stream does, not the host."""
    if handle is not None:
        handle.wait()


def _tensors(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]


def _states(optimizer: torch.optim.Optimizer | None) -> list[State]:
    # A look-up would make an empty entry, and rules take an entry for a state.
    return [dict(optimizer.state.get(p, {})) for p in _tensors(optimizer)] if optimizer is not None else []


def _load_states(optimizer: torch.optim.Optimizer | None, states: list[State]) -> None:
    """Copy the values into the tensors that are there; make those that are not, drop those that should not be."""
    for parameter, saved in zip(_tensors(optimizer), states, strict=optimizer is not None):
        assert optimizer is not None
        state = optimizer.state[parameter]
        for key in state.keys() - saved.keys():
            del state[key]
        for key, value in saved.items():
            if key in state and state[key].shape == value.shape:
                state[key].copy_(value)
            else:
                device = parameter.device if value.ndim else torch.device("cpu")
                state[key] = value.detach().to(device, copy=True)
