"""What mixes tokens in a layer, by the type of its spec: attention today, anything with this interface tomorrow."""

from typing import Protocol

import torch
from torch import Tensor, nn

from nanosprint.config.model import AttnSpec, ModelConfig
from nanosprint.model.attention import SelfAttention
from nanosprint.model.context import Context
from nanosprint.model.mixing import Columns, NetLayouts
from nanosprint.model.rotary import Rotary
from nanosprint.ops.attention import Attention


class Cache(Protocol):
    """What a mixer remembers of a row while one token after the other is read; `length` tokens so far."""

    length: int


class Mixer(Protocol):
    """n (B, S, D), the normed stream -> (B, S, D), over whole packed rows or, with a cache, what follows it.

    A mixer may read `sources` and `columns`; it adds nothing to them that a sum could name. It is a `mixing.Maker`.
    """

    def __call__(
        self,
        n_BSD: Tensor,
        context: Context,
        sources: dict[str, Tensor],
        columns: dict[str, Columns],
        cache: Cache | None = None,
    ) -> Tensor: ...

    def new_cache(self, batch_size: int, capacity: int, dtype: torch.dtype) -> Cache:
        """An empty cache for up to `capacity` tokens in each of `batch_size` rows."""
        ...


MIXERS: dict[type, type[nn.Module]] = {AttnSpec: SelfAttention}  # each a Mixer


def build_mixer(
    config: ModelConfig,
    spec: AttnSpec,
    rotary: Rotary | None,
    attend: Attention,
    stream_dtype: torch.dtype,
    layouts: NetLayouts,
) -> nn.Module:
    """The module of a layer's mixer."""
    return MIXERS[type(spec)](config, spec, rotary, attend, stream_dtype, layouts)
