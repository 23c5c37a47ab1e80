"""An embedding and a head that are equal until they part: two tensors, one parameter (speedrun records #51 and #53).

While they are tied, the head's gradient takes in the embedding's, the head alone is reduced and updated, and the
embedding becomes a copy of it. When the plan says so they part: after that step's update the embedding inherits the
head's optimizer state and both go on as parameters of their own.

Why two tensors: the head may be stored (D, V), as its gradient leaves the matrix product, while look-ups want the
rows of (V, D). Then everything that passes between them is transposed.
"""

import torch
from torch import Tensor

from nanosprint.config.schedule import StepPlan
from nanosprint.optim.parts import BankPart


class Tie:
    """The tie of an embedding (V, D) to a head, (V, D) or transposed (D, V). `holds` until the split.

    Both are the only parameters of their banks, with the same rule, storage and turn. At the start the embedding is
    made a copy of the head. Raises ValueError where they do not fit together.
    """

    def __init__(self, embed: BankPart, head: BankPart, *, transposed: bool) -> None:
        self.embed, self.head, self.transposed = embed, head, transposed
        self.holds = True
        (self._embed_name, self._embed), (self._head_name, self._head) = (
            next(iter(part.parameters.items())) for part in (embed, head)
        )
        self._check()
        self.follow()

    def _check(self) -> None:
        shown = {p.group.role: (p.group.rule, p.group.every, p.group.storage) for p in (self.embed, self.head)}
        if len(set(shown.values())) > 1:
            raise ValueError(
                f"model.head_copy ties the embedding to the head, but their groups differ in rule, every or storage: "
                f"{shown}; make them equal"
            )
        if self._turned(self._head).shape != self._embed.shape:
            raise ValueError(
                f"model.head_copy cannot tie an embedding of shape {tuple(self._embed.shape)} to a head of shape "
                f"{tuple(self._head.shape)}: check model.head_layout"
            )

    def _turned(self, tensor: Tensor) -> Tensor:
        """Between the layouts of head and embedding, either way."""
        return tensor.mT if self.transposed else tensor

    @torch.no_grad()
    def merge(self) -> None:
        """Move the embedding's gradient to the head. Before the head's reduction, when both are complete."""
        self.head.bank.grads[self._head_name] += self._turned(self.embed.bank.grads[self._embed_name])
        self.embed.clear()

    @torch.no_grad()
    def follow(self) -> None:
        """Make the embedding a copy of the head. After the head's gather."""
        self._embed.data.copy_(self._turned(self._head.data))

    def part(self, plan: StepPlan) -> None:
        """After an update: end the tie if the plan says so. Every process must call it.

        The plan may say so at a step that is not the head's turn; then a later call ends it, so that no gradient is
        lost or counted twice.
        """
        if not plan.split:
            return
        whole = self.head.whole_state(self._head.device)
        assert whole is not None
        state = {k: self._turned(v) if v.shape == self._head.shape else v for k, v in whole[self._head_name].items()}
        self.embed.load_whole_state({self._embed_name: state})
        self.holds = False
