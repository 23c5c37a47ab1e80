"""Hashed pairs of tokens: a learned vector for every token and the one before it, as a source of its own.

    b_t = B[h_t] * S[j_t],   h_t = ((36313 x_t) xor (27191 x_{t-1})) mod M,   j_t = (x_t xor x_{t-1}) mod signs

with M = rows - 1. Pairs that share a row are told apart by their rows of random signs, S, which are nearly orthogonal
and never change. (Hashing: Svenstrup et al. 2017, arXiv:1709.03933; signs: Weinberger et al. 2009, arXiv:0902.2206,
Chen et al. 2015, arXiv:1504.04788; speedrun records #62, #83 and #85.)

The published hash has a quirk, kept so that runs compare: row M is put in the place of the first token, as its own
result and as its successor's neighbour, where the product then wraps around in 32 bits. The pair does not reach before
the row, and ends of documents within it are not seen.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import BigramSpec
from nanosprint.model.roles import Role
from nanosprint.ops.embedding import lookup, rows_of

_OWN, _BEFORE = 36313, 27191


def wrap32(x: Tensor) -> Tensor:
    """int64 numbers as 32-bit arithmetic would have left them, sign included."""
    return ((x + 2**31) & (2**32 - 1)) - 2**31


def bigram_rows(tokens_BS: Tensor, rows: int) -> Tensor:
    """Row of the table for each token and its predecessor in the row of tokens, (B, S) int64."""
    first = torch.full_like(tokens_BS[:, :1], rows - 1, dtype=torch.int64)
    ids = torch.cat([first, tokens_BS[:, 1:].long()], dim=1)
    pairs = wrap32(_OWN * ids[:, 1:]) ^ wrap32(_BEFORE * ids[:, :-1])
    return torch.cat([first, pairs % (rows - 1)], dim=1)


def sign_rows(tokens_BS: Tensor, signs: int) -> Tensor:
    """Row of the table of signs for each token, (B, S) int64; 0 for a row's first."""
    ids = tokens_BS.long()
    return F.pad((ids[:, 1:] ^ ids[:, :-1]) % signs, (1, 0))


class BigramTable(nn.Module):
    """Tokens (B, S) -> (B, S, D), zero at first."""

    ROLES = {"weight": Role("embed.bigram")}
    signs: Tensor | None

    def __init__(self, spec: BigramSpec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.zeros(spec.rows, dim))
        # Saved with the weights, which mean nothing under other signs.
        self.register_buffer("signs", torch.ones(spec.signs, dim, dtype=torch.int8) if spec.signs else None)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        self.weight.zero_()
        if self.signs is not None:
            self.signs.copy_(2 * torch.randint(2, self.signs.shape, generator=generator, dtype=torch.int8) - 1)

    def forward(self, tokens_BS: Tensor, dtype: torch.dtype) -> Tensor:
        x = lookup(self.weight, rows_of(bigram_rows(tokens_BS, self.spec.rows)), dtype)
        if self.signs is None:
            return x
        return x * F.embedding(sign_rows(tokens_BS, self.spec.signs), self.signs).to(dtype)
