"""Hashes of token sequences, spread over any number of rows.

A 64-bit number takes up one token after the other, is scrambled, and its highest bits choose a row: multiplication
carries upwards, so that these depend on every bit below. Scrambled once more it chooses from another table as if by
chance: sequences that share a row there differ here. Integers wrap at 64 bits, on every device alike.

Sources: Svenstrup et al. 2017, arXiv:1709.03933 (hashed embeddings); Knuth's multiplicative hash; Lemire 2018,
arXiv:1805.10941 (a product in the place of a remainder).
"""

from torch import Tensor

_MULTIPLIER = 0x2545F4914F6CDD1D  # odd: that of xorshift64* (Vigna 2014, arXiv:1402.6246)
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / the golden ratio, as a signed number
_BITS = 31


def take_up(hashed: Tensor, tokens: Tensor) -> Tensor:
    """The hash of sequences that go on with `tokens`; both int64, 0 is the hash of the empty sequence."""
    return hashed * _MULTIPLIER + tokens + 1


def scramble(hashed: Tensor) -> Tensor:
    """Another number for each, int64, whose highest bits depend on all bits."""
    return (hashed ^ (hashed >> 29)) * _GOLDEN


def spread(scrambled: Tensor, rows: int) -> Tensor:
    """A row below `rows`, at most 2^31 of them, for each scrambled hash: its highest bits as a fraction of `rows`."""
    return (((scrambled >> (64 - _BITS)) & (2**_BITS - 1)) * rows) >> _BITS
