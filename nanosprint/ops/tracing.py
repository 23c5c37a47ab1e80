"""What the compiler is told about functions, without importing it: that takes longer than torch itself.

`torch.compiler.disable` and `torch.compiler.assume_constant_result` import `torch._dynamo` where they are written, so
every process would wait for it, also those that compile nothing.
"""

from collections.abc import Callable
from typing import TypeVar

from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable)

# `torch.compiler.disable` by the name under which torch uses it itself: the import waits for the first call.
not_traced = _disable_dynamo


def constant_in_graphs(function: F) -> F:
    """`torch.compiler.assume_constant_result`: graphs hold what `function` returned when they were traced."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
