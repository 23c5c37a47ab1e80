"""The optimizers of a run behind one interface: gradients come in during the backward pass, new weights come out.

    engine.begin(plan)            before the backward pass of a step's last micro-batch
    loss.backward()               reductions start as soon as their gradients are complete, in the groups' order
    engine.step(plan, grad_clip)  the rest of them · updates, each sent out as soon as it is done · wait for all;
                                  then, near the run's end, the average of the weights

Reductions follow the order of the recipe's groups. Updates follow `update_order`: by default what is replicated first,
then Adam, then SOAP, Muon last, so that the large messages of embeddings travel while Muon computes.

Where backward passes call no hooks, as recorded ones do not, `overlap` is false: then all reductions start in `step`,
in the order in which updates want them, so that the first updates hide the reductions of the others. The sums are the
same. It must be the same on all processes, since it decides the order of messages.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from nanosprint.config.groups import AdamConfig, MuonConfig, ParamGroup
from nanosprint.config.recipe import Precision
from nanosprint.config.schedule import StepPlan, TailAverage
from nanosprint.optim.average import Average
from nanosprint.optim.build import HasRole, build_parts
from nanosprint.optim.parts import BankPart, Part, is_small, stacks_together, update_stacks, update_together
from nanosprint.optim.sharding import LaunchOrder, place, sum_over_processes
from nanosprint.optim.tying import Tie

EMBED, HEAD = "embed.token", "head"  # the roles of what `tied` ties


class Engine:
    """Updates parameters as the groups say, on one process or together with the others of the process group.

    parameters: by name, on their device; they become views of banks. roles: the role of each. update_order: roles of
    groups to update first, in this order. tied: the layout of a head whose copy the embedding is until the plan's
    split, None for models without such a tie; the two are found by their roles. average: what to average where plans
    say so. `overlap`: whether reductions start during the backward pass. Raises ValueError for a role without a group,
    and for a tie of what does not fit together.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        roles: Mapping[str, HasRole],
        groups: tuple[ParamGroup, ...],
        precision: Precision,
        *,
        update_order: tuple[str, ...] = (),
        tied: Literal["out_in", "in_out"] | None = None,
        average: TailAverage | None = None,
    ) -> None:
        ends = {role: _named(roles, role) for role in (EMBED, HEAD)} if tied else {}
        self.parts = build_parts(parameters, roles, groups, precision, alone=ends.values())
        self._tie: Tie | None = None
        if tied:
            embed, head = (self._part_of(ends[role]) for role in (EMBED, HEAD))
            self._tie = Tie(embed, head, transposed=tied == "in_out")
        self._average = None if average is None else Average(self.parts, average)
        self._updates = sorted(self.parts, key=partial(_turn, update_order))
        self.overlap = True
        self._launches = LaunchOrder()
        self._begun: StepPlan | None = None
        if place()[1] > 1:
            for parameter in parameters.values():
                parameter.register_post_accumulate_grad_hook(self._launches.arrived)

    def begin(self, plan: StepPlan) -> None:
        """The next backward pass is this step's last: from now on gradients that are complete may be sent."""
        if self.overlap:
            self._arm(self.parts, plan)
            self._begun = plan

    def _arm(self, parts: list[Part], plan: StepPlan) -> None:
        """Make reductions ready to start, in the order of `parts`."""
        launches = [self._launch(part) for part in parts if self._takes_part(part, plan)]
        # One process has nothing to send, and so nothing to wait for.
        self._launches.arm(launches if place()[1] > 1 else [((), launch) for _, launch in launches])

    @property
    def moving(self) -> list[Part]:
        """The parts that are reduced and updated, each when it is due: all but an embedding that is still tied."""
        return [part for part in self.parts if not self._follows(part)]

    def _takes_part(self, part: Part, plan: StepPlan) -> bool:
        """Whether it is reduced and updated at this step."""
        return part.due(plan) and not self._follows(part)

    def _follows(self, part: Part) -> bool:
        """Whether it only ever copies another: an embedding while it is tied to the head."""
        return self._tie is not None and self._tie.holds and part is self._tie.embed

    def _launch(self, part: Part) -> tuple[list[Tensor], Callable[[], None]]:
        """The gradients that a part's reduction waits for, and what launches it."""
        tie, own = self._tie, list(part.parameters.values())
        if tie is None or not tie.holds or part is not tie.head:
            return own, part.reduce

        def merge_and_reduce() -> None:
            tie.merge()
            part.reduce()

        return [*own, *tie.embed.parameters.values()], merge_and_reduce

    @torch.no_grad()
    def step(self, plan: StepPlan, grad_clip: float | None = None) -> None:
        """Update every parameter whose turn it is and clear its gradient; the others go on accumulating.

        grad_clip: the gradients' largest global norm, of all those whose turn it is.
        """
        if self._begun is not plan:  # no overlap, or nobody said that this was the last backward pass
            self._arm(self.parts if self.overlap else self._updates, plan)
        self._launches.finish()
        self._begun = None
        due = [part for part in self._updates if self._takes_part(part, plan)]
        if grad_clip is not None and due:
            _clip(due, grad_clip)
        for parts, update in _turns(due, plan):
            for part in parts:
                part.wait_reduced()
            update(parts, plan)
            for part in parts:
                part.gather()
        if self._tie is not None and self._tie.holds and self._tie.head in due:
            self._tie.head.wait_gathered()  # the others' messages travel on while the embedding follows
            self._tie.follow()
            self._tie.part(plan)
        for part in due:
            part.wait_gathered()
        for part in self.parts:
            part.accumulating = not part.due(plan)
        if plan.average is not None and self._average is not None:
            self._average.follow(plan.average)
            if plan.average.blend is not None:
                self._follow_head()

    @property
    def can_blend(self) -> bool:
        """Whether `blend` can be called: after the last step, in the process that took it, where more were wanted."""
        return self._average is not None and self._average.can_blend_again

    @torch.no_grad()
    def blend(self, share: float) -> None:
        """Make the final weights anew, with another `share` of their average. Every process must call it."""
        assert self._average is not None
        assert self._average.can_blend_again, "the last step's weights are gone"
        self._average.blend(share)
        self._follow_head()

    def _follow_head(self) -> None:
        """A tied embedding stays the head's copy, whoever has changed that."""
        if self._tie is not None and self._tie.holds:
            self._tie.follow()

    @property
    def tied(self) -> bool:
        """Whether the embedding is still a copy of the head."""
        return self._tie is not None and self._tie.holds

    def _set_tied(self, tied: bool) -> None:
        if self._tie is not None:
            self._tie.holds = tied

    def snapshot(self) -> dict[str, Any]:
        """This process's share of the state, shared, not copied."""
        gradients = {name: g for part in self.parts for name, g in part.gradients().items()}
        accumulating = [part.accumulating for part in self.parts]
        return {
            "states": [part.state() for part in self.parts],
            "gradients": gradients,
            "accumulating": accumulating,
            "tied": self.tied,
        }

    def put_back(self, snapshot: dict[str, Any]) -> None:
        """Make the state what it was at `snapshot`, in place."""
        columns = (self.parts, snapshot["states"], snapshot["accumulating"])
        for part, states, accumulating in zip(*columns, strict=True):
            part.load_state(states)
            part.load_gradients(snapshot["gradients"])
            part.accumulating = accumulating
        self._set_tied(snapshot["tied"])
        if self._average is not None:
            self._average.forget()

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
        return {"states": states, "gradients": gradients, "tied": self.tied}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `capture` returned, in place, at any number of processes.

        The first process takes the waiting gradients, which are a sum, and the others none.
        """
        gradients = saved["gradients"] if place()[0] == 0 else {}
        for part in self.parts:
            part.load_whole_state(saved["states"])
            part.load_gradients(gradients)
            part.accumulating = any(name in saved["gradients"] for name in part.parameters)
        self._set_tied(saved["tied"])

    def _part_of(self, name: str) -> BankPart:
        part = next(part for part in self.parts if name in part.parameters)
        if not isinstance(part, BankPart):
            raise ValueError(f"model.head_copy ties {name}, whose rule is for tables: give it Adam")
        return part


def _named(roles: Mapping[str, HasRole], role: str) -> str:
    """The one parameter that has the role. Raises ValueError if there is none or more than one."""
    names = [name for name, its in roles.items() if its.name == role]
    if len(names) != 1:
        raise ValueError(f"model.head_copy needs exactly one parameter of role {role!r}, but there are {len(names)}")
    return names[0]


def _turns(due: list[Part], plan: StepPlan) -> list[tuple[list[Part], Callable[[list[Part], StepPlan], None]]]:
    """What is updated one after the other, and how: a part each time, but all small ones at once, and all that
    orthogonalise together, in the first one's place."""
    small, stacks = [part for part in due if is_small(part, plan)], stacks_together(due, plan)
    together = {**dict.fromkeys(small, (small, update_together)), **dict.fromkeys(stacks, (stacks, update_stacks))}
    later = [*small[1:], *stacks[1:]]
    return [together.get(part, ([part], _update_one)) for part in due if part not in later]


def _update_one(parts: list[Part], plan: StepPlan) -> None:
    parts[0].update(plan)


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
