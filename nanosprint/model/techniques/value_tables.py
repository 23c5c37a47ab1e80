"""Value tables: token tables whose rows are sources that the values of chosen attention layers name.

    v_t <- lambda_1 v_t + lambda_2 T[token_t]

A layer's values then carry what a token is, undisturbed by the layers below, for a look-up and no arithmetic. Speedrun
records #14 to #17, gated since #55; the idea follows value residual learning (Zhou et al. 2024, arXiv:2410.17897).
"""

import torch
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.model.roles import Role
from nanosprint.ops.embedding import Rows, lookup_chunks


class ValueTables(nn.Module):
    """Rows of tokens (B, S) -> the sources "table0", "table1", ..., (B, S, D) each."""

    ROLES = {"weight": Role("embed.value")}
    in_place = False  # see `GPT.add_rows_in_place`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # One look-up serves all tables: the rows of a token stand side by side.
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.value_tables * config.dim))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        init = self.config.init
        std = init.embed_std if init.value_table_std is None else init.value_table_std
        self.weight.normal_(0.0, std, generator=generator)

    def forward(self, rows: Rows, dtype: torch.dtype) -> dict[str, Tensor]:
        tables = lookup_chunks(self.weight, rows, self.config.value_tables, dtype, in_place=self.in_place)
        return {f"table{i}": values for i, values in enumerate(tables)}
