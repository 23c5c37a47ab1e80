"""N-gram tables: a learned vector for the last n tokens, looked up and added to the token embedding.

    x_t = E[token_t] + sum over n of T_n[row_n(token_{t-n+1} .. token_t)]

What a small model spends its first layers on, which tokens came just before, costs one look-up here and no arithmetic.
Combinations that are too many share rows by hash (Svenstrup et al. 2017, arXiv:1709.03933; the speedrun's bigram table
of record #62 is the case n = 2). The tables start at zero and move by sparse gradients (`optim.RowAdagrad`).

The context reaches before the row: `history` tokens stand in front of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import NgramSpec
from nanosprint.model.roles import Role
from nanosprint.model.techniques.hashing import scramble, spread, take_up


class NgramEmbedding(nn.Module):
    """Tokens (B, history + S) -> the sum of their rows (B, S, D), in the table's dtype."""

    ROLES = {"table": Role("table.ngram")}

    def __init__(self, spec: NgramSpec, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.spec, self.vocab_size = spec, vocab_size
        self.sizes = [min(vocab_size**order, spec.rows) for order in spec.orders]
        self.table = nn.Parameter(torch.zeros(sum(self.sizes), dim))

    def init_weights(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.table)

    def rows(self, tokens: Tensor) -> Tensor:
        """Row of each order's table for every token behind the history: (B, S, orders) int64."""
        ids = tokens.long()
        length = ids.size(1) - max(self.spec.orders) + 1
        out: list[Tensor] = []
        base = 0
        exact = hashed = torch.zeros_like(ids[:, :length])
        for back in range(max(self.spec.orders)):
            start = ids.size(1) - length - back
            token = ids[:, start : start + length]
            exact = exact * self.vocab_size + token
            hashed = take_up(hashed, token)
            if back + 1 in self.spec.orders:
                size = self.sizes[len(out)]
                fits = self.vocab_size ** (back + 1) <= self.spec.rows
                row = exact if fits else spread(scramble(hashed), self.spec.rows)
                out.append(row + base)
                base += size
        return torch.stack(out, dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.rows(tokens)
        B, S, K = rows.shape
        return F.embedding_bag(rows.view(B * S, K), self.table, mode="sum", sparse=True).view(B, S, -1)
