"""What layers need to know of a batch besides its tokens."""

from typing import NamedTuple

from torch import Tensor

from nanosprint.ops.attention import Documents, Limit


class Context(NamedTuple):
    """documents: where they end. short, long: windows in tokens. tables: a value table's rows (B, S, D) each."""

    documents: Documents | None = None
    short: Limit | None = None
    long: Limit | None = None
    tables: tuple[Tensor, ...] | None = None

    def window(self, name: str) -> Limit | None:
        """The window that a layer's spec names, in tokens; None sees everything before."""
        return {"full": None, "short": self.short, "long": self.long}[name]


NO_CONTEXT = Context()
