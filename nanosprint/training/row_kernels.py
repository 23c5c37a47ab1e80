"""How the compiler writes kernels that sum over the rows of a stream: each row in registers, read once.

Inductor has two forms for a reduction. The persistent one holds a whole row; the looped one walks over it with one
accumulator of the block's size for each sum, and again for whatever needs a sum's result, over what it read before. For
768 columns it takes the persistent form, unless the sums that it has merged disagree about how they like to be read, or
some element is read by an index of its own, a gate's column for instance: then it loops. In the backward pass of a
model with gates that is most row kernels: those of the record, of up to nine sums, took up to twice the time of their
bytes.
"""

from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

_LONGEST_ROW = 1024  # what Inductor itself holds in registers where it knows how rows are read
_FEWEST_ROWS = 1024  # fewer leave most of a GPU idle, and a loop over blocks of several rows reads columns better


class RowChoices(InductorChoices):
    """Inductor's choices, except for that of the form of row reductions."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a reduction holds its rows in registers."""
        undecided = features.get_reduction_hint() == ReductionHint.DEFAULT and not cooperative_reduction
        sizes = V.graph.sizevars
        if (
            undecided
            and sizes.statically_known_leq(features.reduction_numel, _LONGEST_ROW)
            and sizes.statically_known_geq(features.numel, _FEWEST_ROWS)
        ):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    @classmethod
    def uuid(cls) -> str:
        """What tells apart code that was compiled with other choices, in the caches of torch 2.13."""
        return f"{cls.__qualname__} {_LONGEST_ROW} {_FEWEST_ROWS}"


def hold_rows_in_registers() -> None:
    """Let what this process compiles from now on follow `RowChoices`."""
    torch._inductor.config.inductor_choices_class = RowChoices
    V.set_choices_handler(RowChoices())  # its own may have been made by now
