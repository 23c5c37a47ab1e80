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

_MULTIPLIER = 0x2545F4914F6CDD1D  # odd: that of xorshift64* (Vigna 2014, arXiv:1402.6246)
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / the golden ratio, as a signed number (Knuth's multiplicative hash)


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
        """Row of each order's table for every token behind the history: (B, S, orders) int64.

        Integers wrap at 64 bits, on every device alike.
        """
        ids = tokens.long()
        length = ids.size(1) - max(self.spec.orders) + 1
        out: list[Tensor] = []
        base = 0
        exact = hashed = torch.zeros_like(ids[:, :length])
        for back in range(max(self.spec.orders)):
            start = ids.size(1) - length - back
            token = ids[:, start : start + length]
            exact = exact * self.vocab_size + token
            hashed = hashed * _MULTIPLIER + token + 1
            if back + 1 in self.spec.orders:
                size = self.sizes[len(out)]
                row = exact if self.vocab_size ** (back + 1) <= self.spec.rows else self._mix(hashed)
                out.append(row + base)
                base += size
        return torch.stack(out, dim=-1)

    def _mix(self, hashed: Tensor) -> Tensor:
        """The highest bits of a hash, spread over the rows."""
        bits = self.spec.rows.bit_length() - 1
        return ((hashed ^ (hashed >> 29)) * _GOLDEN >> (64 - bits)) & (self.spec.rows - 1)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.rows(tokens)
        B, S, K = rows.shape
        return F.embedding_bag(rows.view(B * S, K), self.table, mode="sum", sparse=True).view(B, S, -1)
