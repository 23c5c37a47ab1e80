"""Which reductions hold their rows in registers; what Inductor itself decides is left to it."""

from types import SimpleNamespace

import pytest
import sympy
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from nanosprint.training.row_kernels import RowChoices, hold_rows_in_registers


def persistent(choices, hint, rows, length, cooperative=False):
    numbers = {"numel": sympy.Integer(rows), "reduction_numel": sympy.Integer(length)}
    features = SimpleNamespace(get_reduction_hint=lambda: hint, **numbers)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        return bool(choices.should_use_persistent_reduction(features, cooperative))


@pytest.mark.parametrize("length", [65, 768, 1024])
def test_rows_of_mixed_reductions_are_held(length):
    assert persistent(RowChoices, ReductionHint.DEFAULT, 98_304, length)
    assert not persistent(InductorChoices, ReductionHint.DEFAULT, 98_304, length)  # else all this is for nothing


@pytest.mark.parametrize(
    ("hint", "rows", "length", "cooperative"),
    [
        (ReductionHint.DEFAULT, 98_304, 1025, False),
        (ReductionHint.DEFAULT, 512, 768, False),
        (ReductionHint.DEFAULT, 98_304, 768, True),
        (ReductionHint.OUTER, 98_304, 768, False),
    ],
)
def test_others_are_inductors_affair(hint, rows, length, cooperative):
    assert persistent(RowChoices, hint, rows, length, cooperative) is persistent(
        InductorChoices, hint, rows, length, cooperative
    )
    assert not persistent(RowChoices, hint, rows, length, cooperative)


def test_choices_are_in_force_and_have_a_name_that_caches_can_use():
    before = torch._inductor.config.inductor_choices_class
    try:
        hold_rows_in_registers()
        assert isinstance(V.choices, RowChoices)
        assert str(torch._inductor.config.inductor_choices_class) == (
            "<class 'nanosprint.training.row_kernels.RowChoices'>"
        )
    finally:
        torch._inductor.config.inductor_choices_class = before
        V.set_choices_handler(InductorChoices())
