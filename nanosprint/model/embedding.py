"""From token ids to the first residual stream."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.model.norm import rms_norm
from nanosprint.model.roles import Role


class Embedding(nn.Module):
    """Tokens (B, S) -> (B, S, D): the token table, plus learned positions where the recipe has them."""

    ROLES = {"weight": Role("embed.token"), "positions": Role("embed.position")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.seq_len, config.dim)) if learned else None

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        for table in (self.weight, self.positions):
            if table is not None:
                table.normal_(0.0, self.config.init.embed_std, generator=generator)

    def forward(self, tokens_BS: Tensor, dtype: torch.dtype, start: int = 0) -> Tensor:
        """`start` is the position of the first token of each row."""
        x = F.embedding(tokens_BS, self.weight).to(dtype)
        if self.positions is not None:
            x = x + self.positions[start : start + tokens_BS.size(1)].to(dtype)
        return rms_norm(x) if self.config.embed_norm else x
