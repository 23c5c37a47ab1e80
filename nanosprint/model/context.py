"""What layers need to know of a batch besides its tokens."""

from typing import NamedTuple

from torch import Tensor

from nanosprint.ops.attention import Documents


class LossTensors(NamedTuple):
    """Weights of what is predicted; see `LossWeights`. tokens: (n,), prefix: 0-D or None, fp32 or wider."""

    tokens: Tensor
    prefix: Tensor | None = None


class Context(NamedTuple):
    """documents: where they end. short, long: windows in tokens. attn_scale: in place of the recipe's scale of scores.

    loss: weights of the training objective; None is plain cross-entropy of the next token.
    """

    documents: Documents | None = None
    short: int | None = None
    long: int | None = None
    attn_scale: float | None = None
    loss: LossTensors | None = None

    def window(self, name: str) -> int | None:
        """The window that a layer's spec names, in tokens; None sees everything before."""
        return {"full": None, "short": self.short, "long": self.long}[name]


NO_CONTEXT = Context()
