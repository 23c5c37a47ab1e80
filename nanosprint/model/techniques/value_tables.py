"""Value tables: token tables whose rows are added to the values of chosen attention layers.

    v_t <- lambda_1 v_t + lambda_2 T[token_t]

A layer's values then carry what a token is, undisturbed by the layers below, for a look-up and no arithmetic. Speedrun
records #14 to #17; the idea follows value residual learning (Zhou et al. 2024, arXiv:2410.17897).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.model.roles import Role


class ValueTables(nn.Module):
    """Tokens (B, S) -> one (B, S, D) tensor for each table."""

    ROLES = {"weight": Role("embed.value")}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # One look-up serves all tables: the rows of a token stand side by side.
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.value_tables * config.dim))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, self.config.init.embed_std, generator=generator)

    def forward(self, tokens_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return F.embedding(tokens_BS, self.weight).to(dtype).chunk(self.config.value_tables, dim=-1)
