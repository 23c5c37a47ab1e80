"""From roles and a recipe's groups to optimizers: every parameter is covered exactly once."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from nanosprint.config.groups import AdamConfig, MuonConfig, ParamGroup, RowAdagradConfig, SoapConfig, match_group
from nanosprint.config.recipe import Precision
from nanosprint.config.schedule import StepPlan
from nanosprint.optim.adam import AdamW
from nanosprint.optim.muon import Muon
from nanosprint.optim.row_adagrad import RowAdagrad
from nanosprint.optim.soap import SOAP

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class HasRole(Protocol):
    """What a parameter is for, and how many matrices it stores one above the other."""

    @property
    def name(self) -> str: ...

    @property
    def blocks(self) -> int: ...


class Optimizers:
    """The optimizers of a run behind one interface; the step's plan gives rates and momentum.

    parameters: by name; roles: the role of each of them. Raises ValueError for a role without a group.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        roles: Mapping[str, HasRole],
        groups: tuple[ParamGroup, ...],
        precision: Precision,
    ) -> None:
        members: dict[tuple[ParamGroup, int], list[Tensor]] = {}
        for name, parameter in parameters.items():
            group = match_group(roles[name].name, groups)
            members.setdefault((group, roles[name].blocks), []).append(parameter)
        by_kind: dict[tuple[type, int], list[dict[str, Any]]] = {}
        for (group, blocks), tensors in members.items():
            options = _group_options(group, blocks, precision)
            by_kind.setdefault((type(group.rule), group.every), []).append({"params": tensors, **options})
        self.optimizers: list[tuple[torch.optim.Optimizer, int]] = [
            (_RULES[rule](param_groups), every) for (rule, every), param_groups in by_kind.items()
        ]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return (optimizer for optimizer, _ in self.optimizers)

    def due(self, plan: StepPlan) -> list[Tensor]:
        """The parameters whose turn it is at this step, in a fixed order."""
        turn = [optimizer for optimizer, every in self.optimizers if (plan.step + 1) % every == 0]
        return [p for optimizer in turn for group in optimizer.param_groups for p in group["params"]]

    def step(self, plan: StepPlan) -> None:
        """Update every parameter whose turn it is and clear its gradient; the others go on accumulating."""
        for optimizer, every in self.optimizers:
            if (plan.step + 1) % every:
                continue
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * plan.lr_factor
                if plan.momentum is not None and "momentum" in group:
                    group["momentum"] = plan.momentum
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self, states, strict=True):
            optimizer.load_state_dict(state)


def _group_options(group: ParamGroup, blocks: int, precision: Precision) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": group.lr, "base_lr": group.lr, "weight_decay": group.weight_decay}
    if isinstance(group.rule, AdamConfig | MuonConfig):
        options |= {"lr_scale": group.lr_scale, "decay": group.rule.decay}
    else:  # these know no second rate
        options |= {"lr": group.lr * group.lr_scale, "base_lr": group.lr * group.lr_scale}
    if group.storage == "bf16+16" and not isinstance(group.rule, MuonConfig):
        raise ValueError(f"storage='bf16+16' of role {group.role!r} needs MuonConfig: take 'bf16' or 'fp32'")
    if isinstance(group.rule, AdamConfig):
        return {**options, "betas": group.rule.betas, "eps": group.rule.eps, "eps_form": group.rule.eps_form}
    if isinstance(group.rule, SoapConfig):
        rule = group.rule
        return {**options, "betas": rule.betas, "eps": rule.eps, "refresh_every": rule.refresh_every}
    if isinstance(group.rule, RowAdagradConfig):
        return {**options, "power": group.rule.power}
    return {
        **options,
        "momentum": group.rule.momentum,
        "scale": group.rule.scale,
        "orthogonalizer": group.rule.orthogonalizer,
        "split": blocks,
        "orthogonalize_dtype": DTYPES[precision.orthogonalize],
        "variance_beta": group.rule.variance_beta,
        "mantissa": group.storage == "bf16+16",
    }


_RULES: dict[type, Any] = {AdamConfig: AdamW, MuonConfig: Muon, SoapConfig: SOAP, RowAdagradConfig: RowAdagrad}
