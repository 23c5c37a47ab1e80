"""Where documents end in a batch, for attention that must not look across (speedrun record #12).

A document starts at its start token and at the start of every row. Ends are counted over the rows laid end to end, in
a vector of fixed length, because the shapes of a compiled step must not change with the data.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor


class DocumentEnds(NamedTuple):
    """ends: (D,) int32: 0, the ends in order, then the number of tokens repeated. longest: tokens of the longest."""

    ends: Tensor
    longest: int


def slots(rows: int, seq_len: int, mean_document: int, spare: int = 1) -> int:
    """D for `rows` rows of `seq_len` tokens: `mean_document` tokens a document, and room for `spare` more in each."""
    return rows * (seq_len // mean_document + spare) + 1


def document_ends(tokens: np.ndarray, start: int, out: np.ndarray) -> int:
    """Fill out (D,) int32 with the ends in tokens (B, S); the length of the longest document.

    Raises ValueError where there are more documents than `slots` made room for, naming the setting.
    """
    num_rows, seq_len = tokens.shape
    starts = tokens == start
    starts[:, 0] = True
    ends = np.flatnonzero(starts)
    if len(ends) + 1 > len(out):
        raise ValueError(
            f"{len(ends)} documents in {num_rows} rows of {seq_len} tokens do not fit the {len(out) - 1} that "
            f"data.mean_document and data.spare_documents make room for: set data.mean_document="
            f"{max(1, tokens.size // len(ends) // 2)}"
        )
    out[: len(ends)] = ends
    out[len(ends) :] = tokens.size
    return int(np.diff(out).max())
