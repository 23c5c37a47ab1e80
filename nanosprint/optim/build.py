"""From roles and a recipe's groups to banks with rules: every parameter is covered exactly once."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from nanosprint.config.groups import AdamConfig, MuonConfig, ParamGroup, RowAdagradConfig, SoapConfig, match_group
from nanosprint.config.recipe import Precision
from nanosprint.optim.adam import AdamW
from nanosprint.optim.bank import Bank
from nanosprint.optim.muon import Muon, matrix_shape
from nanosprint.optim.parts import BankPart, Part, TablePart, shard_index
from nanosprint.optim.row_adagrad import RowAdagrad
from nanosprint.optim.sharding import place
from nanosprint.optim.soap import SOAP, matrix_sides

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
REPLICATE_BELOW = 4096  # numbers in a bank: a second message costs more than updating so few everywhere


class HasRole(Protocol):
    """What a parameter is for, and how many matrices it stores one above the other."""

    @property
    def name(self) -> str: ...

    @property
    def blocks(self) -> int: ...


def build_parts(
    parameters: Mapping[str, Tensor],
    roles: Mapping[str, HasRole],
    groups: tuple[ParamGroup, ...],
    precision: Precision,
    alone: Collection[str] = (),
    size: int | None = None,
) -> list[Part]:
    """The parts of a run, in the order of the groups; parameters become views of banks.

    A bank holds the parameters of a group that count in units of one shape: for Muon the matrices of their blocks, for
    SOAP whole parameters, for Adam all of them, one number after the other, or row by row where rows are sent. Those
    named in `alone` get their own. size: the number of processes, by default as many as there are. Raises ValueError
    for a role without a group.
    """
    members: dict[tuple[ParamGroup, tuple[int, ...], str | None], dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        group = match_group(roles[name].name, groups)
        single = name in alone or isinstance(group.rule, RowAdagradConfig)
        key = (group, _unit(group, parameter, roles[name].blocks), name if single else None)
        members.setdefault(key, {})[name] = parameter
    size = place()[1] if size is None else size
    parts = [_part(group, unit, held, precision, size) for (group, unit, _), held in members.items()]
    return sorted(parts, key=lambda part: groups.index(part.group))


def _unit(group: ParamGroup, parameter: Tensor, blocks: int) -> tuple[int, ...]:
    """The shape of what the group's rule takes as one."""
    if isinstance(group.rule, MuonConfig):
        return matrix_shape(parameter.shape, blocks)
    if isinstance(group.rule, SoapConfig):
        return matrix_sides(parameter) if parameter.ndim > 1 else (parameter.numel(),)
    return tuple(parameter.shape[1:]) if group.comm == "shard_sparse" else ()


def _part(group: ParamGroup, unit: tuple[int, ...], held: dict[str, Tensor], precision: Precision, size: int) -> Part:
    if isinstance(group.rule, RowAdagradConfig):
        ((name, table),) = held.items()
        return TablePart(group, name, table, _optimizer(group, [table], precision))
    small = sum(p.numel() for p in held.values()) < REPLICATE_BELOW
    bank = Bank(held, unit, _storage(group, held), shards=1 if small or group.comm == "replicate" else size)
    own, grad = (bank.owned(flat, shard_index(bank)) for flat in (bank.data, bank.grad))
    if not len(own):
        return BankPart(group, bank, None)
    one_by_one = isinstance(group.rule, SoapConfig)
    tensors = list(own.unbind(0)) if one_by_one else [own]
    for tensor, gradient in zip(tensors, grad.unbind(0) if one_by_one else [grad], strict=True):
        tensor.grad = gradient
    return BankPart(group, bank, _optimizer(group, tensors, precision))


def _storage(group: ParamGroup, held: dict[str, Tensor]) -> torch.dtype:
    """What the group stores its parameters in: its own wish, but nothing below fp64 in an fp64 run."""
    wide = next(iter(held.values())).dtype
    return wide if group.storage == "fp32" or wide == torch.float64 else torch.bfloat16


def _optimizer(group: ParamGroup, tensors: list[Tensor], precision: Precision) -> torch.optim.Optimizer:
    options = {
        "params": tensors,
        "weight_decay": group.weight_decay,
        **_rule_options(group, precision, tensors[0].dtype),
    }
    if isinstance(group.rule, AdamConfig | MuonConfig):
        options |= {"lr": group.lr, "lr_scale": group.lr_scale, "decay": group.rule.decay}
    else:  # these know no second rate
        options |= {"lr": group.lr * group.lr_scale}
    if group.storage == "bf16+16" and not isinstance(group.rule, MuonConfig):
        raise ValueError(f"storage='bf16+16' of role {group.role!r} needs MuonConfig: take 'bf16' or 'fp32'")
    if group.comm == "shard_sparse" and not isinstance(group.rule, AdamConfig):
        raise ValueError(f"comm='shard_sparse' of role {group.role!r} needs AdamConfig, which takes rows: take 'shard'")
    optimizer: torch.optim.Optimizer = _RULES[type(group.rule)]([{**options, "base_lr": options["lr"]}])
    return optimizer


def _rule_options(group: ParamGroup, precision: Precision, stored: torch.dtype) -> dict[str, Any]:
    rule = group.rule
    if isinstance(rule, AdamConfig):
        return {"betas": rule.betas, "eps": rule.eps, "eps_form": rule.eps_form}
    if isinstance(rule, SoapConfig):
        return {"betas": rule.betas, "eps": rule.eps, "refresh_every": rule.refresh_every}
    if isinstance(rule, RowAdagradConfig):
        return {"power": rule.power}
    return {
        "momentum": rule.momentum,
        "scale": rule.scale,
        "orthogonalizer": rule.orthogonalizer,
        "equalize": rule.equalize,
        "mixture": rule.mixture,
        "basis": rule.basis,
        "radius": rule.radius,
        "orthogonalize_dtype": DTYPES[precision.orthogonalize],
        "stacked": True,
        "variance_beta": rule.variance_beta,
        "mantissa": group.storage == "bf16+16" and stored == torch.bfloat16,
    }


_RULES: dict[type, Any] = {AdamConfig: AdamW, MuonConfig: Muon, SoapConfig: SOAP, RowAdagradConfig: RowAdagrad}
