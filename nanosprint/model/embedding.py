"""From token ids to the first residual stream.

    x0 = norm(E[token] (+ positions))

The norm lets the stream start at size 1 whatever the table's scale (speedrun record #8); learned positions are GPT-2's
(Radford et al. 2019), rotary ones are `rotary.py`'s.
"""

import torch
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.model.linear import init_linear
from nanosprint.model.mixing import NetLayouts
from nanosprint.model.norm import rms_norm
from nanosprint.model.roles import Role
from nanosprint.model.techniques.ngram import NgramEmbedding
from nanosprint.model.techniques.smear import Smear
from nanosprint.ops.embedding import Rows, lookup


class Embedding(nn.Module):
    """Tokens (B, history + S) -> (B, S, D): the token table, smeared, plus n-gram tables and positions, normed; each
    as the recipe has it.

    The history, tokens in front of the row, is for techniques that look back; see `ModelConfig.history`.
    """

    ROLES = {"weight": Role("embed.token"), "positions": Role("embed.position")}
    in_place = False  # see `GPT.add_rows_in_place`

    def __init__(self, config: ModelConfig, layouts: NetLayouts) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.seq_len, config.dim)) if learned else None
        self.smear = Smear(config.smear, layouts) if config.smear else None
        self.ngrams = NgramEmbedding(config.ngrams, config.vocab_size, config.dim) if config.ngrams else None

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        if self.config.tied_head:  # it is the head, too, and starts as one
            init_linear(self.weight, self.config.init, generator)
        elif not self.config.head_copy:  # a copy is made when there is a head
            self.weight.normal_(0.0, self.config.init.embed_std, generator=generator)
        if self.positions is not None:
            self.positions.normal_(0.0, self.config.init.embed_std, generator=generator)

    def forward(self, tokens: Tensor, rows: Rows, dtype: torch.dtype, start: int = 0) -> Tensor:
        """The stream in `dtype`. `rows` are the tokens behind the history; the first stands at position `start`."""
        x = lookup(self.weight, rows, dtype, in_place=self.in_place)
        if self.smear is not None:
            x = self.smear(x)
        if self.ngrams is not None:
            x = x + self.ngrams(tokens).to(dtype)
        if self.positions is not None:
            x = x + self.positions[start : start + x.size(1)].to(dtype)
        return rms_norm(x) if self.config.embed_norm else x
