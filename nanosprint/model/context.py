"""What layers need to know of a batch besides its tokens."""

from typing import NamedTuple

from torch import Tensor

from nanosprint.ops.attention import Documents, Limit


class LossTensors(NamedTuple):
    """Weights of the training loss. tokens: (n,) fp32, of the targets 1 .. n tokens on. prefix: () fp32, if any."""

    tokens: Tensor
    prefix: Tensor | None


class Context(NamedTuple):
    """documents: where they end. short, long: windows in tokens. tables: a value table's rows (B, S, D) each.

    attn_scale: the softmax scale, instead of the model's. loss: None is the plain cross entropy of the next token.
    """

    documents: Documents | None = None
    short: Limit | None = None
    long: Limit | None = None
    tables: tuple[Tensor, ...] | None = None
    attn_scale: float | None = None
    loss: LossTensors | None = None

    def window(self, name: str) -> Limit | None:
        """The window that a layer's spec names, in tokens; None sees everything before."""
        return {"full": None, "short": self.short, "long": self.long}[name]


NO_CONTEXT = Context()
