"""The optimizers of a run behind one interface: gradients come in during the backward pass, new weights come out.

    engine.begin(plan)            before the backward pass of a step's last micro-batch
    loss.backward()               reductions start as soon as their gradients are complete, in the groups' order
    engine.step(plan, grad_clip)  the rest of them · updates, each sent out as soon as it is done · wait for all

Reductions follow the order of the recipe's groups. Updates follow `update_order`: by default what is replicated first,
then Adam, then SOAP, Muon last, so that the large messages of embeddings travel while Muon computes.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanosprint.config.groups import AdamConfig, MuonConfig, ParamGroup
from nanosprint.config.recipe import Precision
from nanosprint.config.schedule import StepPlan
from nanosprint.optim.build import HasRole, build_parts
from nanosprint.optim.parts import Part
from nanosprint.optim.sharding import LaunchOrder, place, sum_over_processes


class Engine:
    """Updates parameters as the groups say, on one process or together with the others of the process group.

    parameters: by name, on their device; they become views of banks. roles: the role of each. update_order: roles of
    groups to update first, in this order. Raises ValueError for a role without a group.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        roles: Mapping[str, HasRole],
        groups: tuple[ParamGroup, ...],
        precision: Precision,
        *,
        update_order: tuple[str, ...] = (),
    ) -> None:
        self.parts = build_parts(parameters, roles, groups, precision)
        self._updates = sorted(self.parts, key=partial(_turn, update_order))
        self._launches = LaunchOrder()
        self._begun: StepPlan | None = None
        if place()[1] > 1:
            for parameter in parameters.values():
                parameter.register_post_accumulate_grad_hook(self._launches.arrived)

    def begin(self, plan: StepPlan) -> None:
        """The next backward pass is this step's last: from now on gradients that are complete may be sent."""
        self._launches.arm((part.parameters.values(), part.reduce) for part in self.parts if part.due(plan))
        self._begun = plan

    @torch.no_grad()
    def step(self, plan: StepPlan, grad_clip: float | None = None) -> None:
        """Update every parameter whose turn it is and clear its gradient; the others go on accumulating.

        grad_clip: the gradients' largest global norm, of all those whose turn it is.
        """
        if self._begun is not plan:  # nobody said that this was the last backward pass: no overlap
            self.begin(plan)
        self._launches.finish()
        self._begun = None
        due = [part for part in self._updates if part.due(plan)]
        if grad_clip is not None and due:
            _clip(due, grad_clip)
        for part in due:
            part.wait_reduced()
            part.update(plan)
            part.gather()
        for part in due:
            part.wait_gathered()
        for part in self.parts:
            part.accumulating = part not in due

    def snapshot(self) -> dict[str, Any]:
        """This process's share of the state, shared, not copied."""
        gradients = {name: g for part in self.parts for name, g in part.gradients().items()}
        accumulating = [part.accumulating for part in self.parts]
        return {"states": [p.state() for p in self.parts], "gradients": gradients, "accumulating": accumulating}

    def put_back(self, snapshot: dict[str, Any]) -> None:
        """Make the state what it was at `snapshot`, in place."""
        columns = (self.parts, snapshot["states"], snapshot["accumulating"])
        for part, states, accumulating in zip(*columns, strict=True):
            part.load_state(states)
            part.load_gradients(snapshot["gradients"])
            part.accumulating = accumulating

    def capture(self, device: torch.device | None) -> dict[str, Any]:
        """The whole state by parameter name, on `device`; empty where that is None. Every process must call it.

        "gradients" are those that wait for their group's turn, summed over all processes.
        """
        states: dict[str, Any] = {}
        gradients: dict[str, Tensor] = {}
        for part in self.parts:
            states.update(part.whole_state(device) or {})
            for name, gradient in part.whole_gradients().items():
                if device is not None:
                    gradients[name] = gradient.to(device)
        return {"states": states, "gradients": gradients}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `capture` returned, in place, at any number of processes.

        The first process takes the waiting gradients, which are a sum, and the others none.
        """
        gradients = saved["gradients"] if place()[0] == 0 else {}
        for part in self.parts:
            part.load_whole_state(saved["states"])
            part.load_gradients(gradients)
            part.accumulating = any(name in saved["gradients"] for name in part.parameters)


def _turn(update_order: tuple[str, ...], part: Part) -> tuple[int, int]:
    """Sort key of updates."""
    if part.group.role in update_order:
        return 0, update_order.index(part.group.role)
    if not part.sharded and place()[1] > 1:
        return 1, 0
    return 1, 1 if isinstance(part.group.rule, AdamConfig) else 3 if isinstance(part.group.rule, MuonConfig) else 2


def _clip(parts: list[Part], largest: float) -> None:
    """Scale the gradients so that their global norm is at most `largest`, each number counting once."""
    example = next(iter(parts[0].parameters.values()))
    wide = torch.promote_types(example.dtype, torch.float32)
    square = torch.zeros((), dtype=wide, device=example.device)
    gradients = []
    for part in parts:
        part.wait_reduced()
        own = part.own_gradients()
        gradients += own
        if part.sharded or place()[0] == 0:
            for gradient in own:
                square += torch.linalg.vector_norm(gradient, dtype=wide).square()
    factor = (largest / (sum_over_processes(square).sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
