"""Causal attention over a short reach, in chunks: queries of a chunk meet the keys of their own and the one before.

No query looks further back than `reach` tokens. With chunks of C >= reach tokens, a row of S tokens needs 2 S C scores
and mask entries instead of S², and keys and values are copied once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanosprint.ops.attention_backends.contract import Documents, first_key


def chunked(t: Tensor, chunk: int) -> Tensor:
    """(B, S, ...) -> (B, chunks, chunk, ...), the last chunk filled up with zeros."""
    B, S = t.shape[:2]
    num_chunks = -(-S // chunk)
    padding = (0, 0) * (t.ndim - 2) + (0, num_chunks * chunk - S)
    return F.pad(t, padding).reshape(B, num_chunks, chunk, *t.shape[2:])


def with_chunk_before(t: Tensor) -> Tensor:
    """(B, chunks, C, ...) -> (B, chunks, 2C, ...): in front of each chunk the one before it, of the first zeros."""
    before = F.pad(t, (0, 0) * (t.ndim - 2) + (1, 0))[:, :-1]
    return torch.cat((before, t), dim=2)


def band_mask(
    rows: int, seq_len: int, window: int | None, documents: Documents | None, chunk: int, device: torch.device
) -> Tensor:
    """What is visible: bool (rows, chunks, C, 2C), or (1, ...) without documents; keys as `with_chunk_before` has them.

    One chunk a row has no chunk before it: (..., C, C). `chunk` must be at least the reach.
    """
    num_chunks = -(-seq_len // chunk)
    first = first_key(rows, seq_len, window, documents, device)
    position = torch.arange(num_chunks * chunk, device=device, dtype=torch.int32)
    # Padding sees itself: a query that sees nothing would give NaN, and NaN times a gradient of zero is NaN.
    first = torch.where(position < seq_len, F.pad(first, (0, num_chunks * chunk - seq_len)), position)
    query = position.view(num_chunks, chunk, 1)
    key = position.view(num_chunks, 1, chunk)
    if num_chunks > 1:
        key = torch.cat((key - chunk, key), dim=2)
    return (first.view(-1, num_chunks, chunk, 1) <= key) & (key <= query)
