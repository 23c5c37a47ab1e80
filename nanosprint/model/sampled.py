"""Softmax over a part of the vocabulary: all tokens that a micro-batch has as labels, and some of the others.

    Z = sum over sure v of exp l_v  +  1/q * sum over drawn v of exp l_v

The labels' tokens are all there ("sure"); of the others a share q is drawn, each as likely, and counts 1/q times, so
that Z is right on average. Its logarithm is a little too small then, the less so the more are drawn; the last part of a
run should have the whole softmax. The head's products and its loss shrink with the part.

Which tokens are drawn follows from the labels alone, by a hash of token and labels' sum: no random state, the same on
every device and after a resume; another micro-batch draws others, so the size of micro-batches is no mere detail here.

Source: importance sampling for softmax, Bengio & Senecal 2003; sure targets and one part for all rows, Jean et al.
2015, arXiv:1412.2007. For this benchmark: modded-nanogpt pull request 360.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanosprint.ops.softcap_xent import Labels

_WORD = (1 << 32) - 1
_FACTOR = 0x45D9F3B  # below 2^31, so that products of 32 bits fit 64


class Part(NamedTuple):
    """columns (n,): int64 ids of the vocabulary's tokens that are in the softmax, the sure ones first, ascending.

    labels: with the tokens' places among the columns for ids, and what the drawn ones count.
    """

    columns: Tensor
    labels: Labels


def draw(labels: Labels, vocabulary: int, count: int) -> Part:
    """`count` of the vocabulary's tokens for these labels. Where the labels alone have more, every loss is NaN.

    Raises ValueError for more than the vocabulary has.
    """
    if count > vocabulary:
        raise ValueError(f"a softmax over {count} of {vocabulary} tokens: there are not so many")
    device, wide = labels.ids.device, labels.weights.dtype
    ids = labels.ids.reshape(-1) + 1  # -1 is no token: place 0 takes it
    found = torch.zeros(vocabulary + 1, dtype=torch.bool, device=device).scatter_(0, ids, True)
    sure = found[1:]
    tokens = torch.arange(vocabulary, device=device)
    drawn_first = _hashed(tokens, labels.ids.sum()) * vocabulary + tokens  # no two are alike
    order = torch.where(sure, tokens - vocabulary, drawn_first).argsort()
    columns = order[:count]
    places = torch.full((vocabulary + 1,), -1, dtype=torch.int64, device=device)
    places = places.scatter_(0, columns + 1, torch.arange(count, device=device))
    number = sure.sum()
    left, drawn = (vocabulary - number).to(wide), (count - number).clamp(min=1).to(wide)
    rest = torch.stack([number.to(wide), (left / drawn).clamp(min=1).log()])
    weights = labels.weights + torch.where(number > count, torch.nan, 0.0).to(wide)
    return Part(columns, Labels(places[ids].view_as(labels.ids), weights, labels.totals, rest))


def _hashed(tokens: Tensor, salt: Tensor) -> Tensor:
    """A number in 0 .. 2^32 - 1 for each token, as good as random and another for another salt (murmur's finaliser).

    The compiler takes what is computed from an arange alone for an index of 32 bits; the salt comes in first for that.
    """
    x = tokens ^ ((salt * _FACTOR) & _WORD)
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _FACTOR) & _WORD
    return x ^ (x >> 16)
