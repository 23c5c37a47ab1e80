"""What layers need to know of a batch besides its tokens."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from nanosprint.ops.attention import Documents, Limit, Scale, as_data, scale_as_data

_LONG_DOCUMENT = 2048  # tokens; most batches of tens of thousands of tokens hold one longer than half of that


class LossTensors(NamedTuple):
    """Weights of what is predicted; see `LossWeights`. tokens: (n,), prefix: 0-D or None, fp32 or wider.

    sampled: tokens of the vocabulary in the softmax, a constant of compiled graphs; None is all.
    """

    tokens: Tensor
    prefix: Tensor | None = None
    sampled: int | None = None


class Context(NamedTuple):
    """documents: where they end. short, long: windows in tokens. attn_scale: in place of the recipe's scale of scores.

    loss: weights of the training objective; None is plain cross-entropy of the next token. head_counts: how often the
    gradient of the head's weight counts; 0: none is made. None: once.
    """

    documents: Documents | None = None
    short: Limit | None = None
    long: Limit | None = None
    attn_scale: Scale | None = None
    loss: LossTensors | None = None
    head_counts: Limit | None = None

    def window(self, name: str) -> Limit | None:
        """The window that a layer's spec names, in tokens; None sees everything before."""
        return {"full": None, "short": self.short, "long": self.long}[name]

    def with_data(self) -> "Context":
        """The same with limits and scale as data, so that a compiled graph serves all values."""
        scale = self.attn_scale
        return self._limited(as_data)._replace(attn_scale=None if scale is None else scale_as_data(float(scale)))

    def with_ints(self) -> "Context":
        """The same with numbers, each a graph of its own, and a round one for the longest document."""
        scale = self.attn_scale
        own = self._limited(int)._replace(attn_scale=None if scale is None else float(scale))
        if own.documents is None:
            return own
        longest = max(_LONG_DOCUMENT, 1 << (int(own.documents.max_seq_len) - 1).bit_length())
        return own._replace(documents=own.documents._replace(max_seq_len=longest))

    def _limited(self, convert: Callable[[int], Limit]) -> "Context":
        documents = self.documents
        if documents is not None:
            documents = documents._replace(max_seq_len=convert(int(documents.max_seq_len)))
        numbers = (self.short, self.long, self.head_counts)
        short, long, head_counts = (None if number is None else convert(int(number)) for number in numbers)
        return self._replace(documents=documents, short=short, long=long, head_counts=head_counts)


NO_CONTEXT = Context()
