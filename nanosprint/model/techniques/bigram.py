"""Hashed pairs of tokens, and longer n-grams: a learned vector for each token and those before it, as a source.

    b_t = B[h_t] * S[j_t],   h_t = ((36313 x_t) xor (27191 x_{t-1})) mod M,   j_t = (x_t xor x_{t-1}) mod signs

with M = rows - 1. Pairs that share a row are told apart by their rows of random signs, S, which are nearly orthogonal
and never change. (Hashing: Svenstrup et al. 2017, arXiv:1709.03933; signs: Weinberger et al. 2009, arXiv:0902.2206,
Chen et al. 2015, arXiv:1504.04788; speedrun records #62, #83 and #85.)

The published hash has a quirk, kept so that runs compare: row M is put in the place of the first token, as its own
result and as its successor's neighbour, where the product then wraps around in 32 bits. The pair does not reach before
the row, and ends of documents within it are not seen.

With orders beyond 2, which are not published, each such n adds a term of the same form for the last n tokens:

    b_t = sum over n of B[h_n] * S[j_n]

h_n, from a hash without quirks, points to rows of B that are n's own, and j_n is scrambled once more. A row's first
n - 1 tokens, which have not n - 1 before them, share the last of those rows and the first row of signs. All orders are
one look-up in one table, whose gradient is one sum of sorted segments and whose update and exchange are one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import BigramSpec
from nanosprint.model.roles import Role
from nanosprint.model.techniques.hashing import scramble, spread, take_up
from nanosprint.ops.embedding import lookup, rows_of
from nanosprint.ops.signed_rows import signed_lookup

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


def ngram_places(tokens_BS: Tensor, order: int, rows: int, signs: int) -> tuple[Tensor, Tensor | None]:
    """Row of one order's part of the table, and of the signs if there are any, for each token's last `order` tokens.

    Both (B, S) int64. Tokens with fewer before them in their row have row `rows - 1` and sign 0.
    """
    S = tokens_BS.size(1)
    padded = F.pad(tokens_BS.long(), (order - 1, 0))
    hashed = torch.zeros_like(padded[:, :S])
    for back in range(order):
        start = order - 1 - back
        hashed = take_up(hashed, padded[:, start : start + S])
    early = torch.arange(S, device=tokens_BS.device) < order - 1
    mixed = scramble(hashed)
    row = spread(mixed, rows - 1).masked_fill(early, rows - 1)
    return row, spread(scramble(mixed), signs).masked_fill(early, 0) if signs else None


class BigramTable(nn.Module):
    """Tokens (B, S) -> (B, S, D), zero at first."""

    ROLES = {"weight": Role("embed.bigram")}
    in_place = False  # see `GPT.add_rows_in_place`
    signs: Tensor | None

    def __init__(self, spec: BigramSpec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.zeros(spec.size, dim))
        # Saved with the weights, which mean nothing under other signs.
        self.register_buffer("signs", torch.ones(spec.signs, dim, dtype=torch.int8) if spec.signs else None)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        self.weight.zero_()
        if self.signs is not None:
            self.signs.copy_(2 * torch.randint(2, self.signs.shape, generator=generator, dtype=torch.int8) - 1)

    def places(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the table and of the signs: (B, S), or (orders, B, S) where there are several; int64."""
        spec = self.spec
        rows = [bigram_rows(tokens_BS, spec.rows)]
        signs = [sign_rows(tokens_BS, spec.signs) if spec.signs else None]
        for i, order in enumerate(spec.orders[1:]):
            row, sign = ngram_places(tokens_BS, order, spec.longer_rows, spec.signs)
            rows.append(row + spec.rows + i * spec.longer_rows)
            signs.append(sign)
        if len(rows) == 1:
            return rows[0], signs[0]
        return torch.stack(rows), torch.stack([s for s in signs if s is not None]) if spec.signs else None

    def forward(self, tokens_BS: Tensor, dtype: torch.dtype) -> Tensor:
        rows, signs = self.places(tokens_BS)
        if self.signs is None or signs is None:
            x = lookup(self.weight, rows_of(rows), dtype, in_place=self.in_place)
        else:
            x = signed_lookup(self.weight, rows_of(rows), self.signs, signs, dtype, in_place=self.in_place)
        return x if rows.ndim == 2 else x.sum(0)  # orders stand first: a compiler adds few of them within one kernel
