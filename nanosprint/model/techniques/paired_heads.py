"""Paired heads: heads j and j + H/2 of a layer share one softmax over a sequence of twice the length.

    position 2t + i of slot j is head j + i H/2 of token t,   i in {0, 1}, j < H/2

A query then chooses among two views of each token in one softmax, for no arithmetic more: twice the positions, half the
heads, and the window, which counts positions, reaches half as many tokens back. The second group of heads sees the
first group's keys of the same token, and not the other way round.

Rotary positions double too, but there heads alternate by their own number: even ones stand at 2t and odd ones at
2t + 1. Source: speedrun record #58.
"""

from torch import Tensor

from nanosprint.ops.attention import Documents, times


def interleaved(t_BSHK: Tensor) -> Tensor:
    """(B, S, H, K) -> (B, 2S, H/2, K); H must be even. In memory ordered by tokens, a view."""
    B, S, H, K = t_BSHK.shape
    return t_BSHK.reshape(B, 2 * S, H // 2, K)


def apart(t_BSHK: Tensor) -> Tensor:
    """Undoes `interleaved`: (B, 2S, H/2, K) -> (B, S, H, K)."""
    B, S, H, K = t_BSHK.shape
    return t_BSHK.reshape(B, S // 2, 2 * H, K)


def doubled(documents: Documents | None) -> Documents | None:
    """Documents of interleaved rows: every end and the longest length twice as far."""
    if documents is None:
        return None
    return Documents(2 * documents.cu_seqlens, times(documents.max_seq_len, 2))
