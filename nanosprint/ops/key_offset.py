"""Key offset: some dimensions of a key come from the token before.

    k_t[a:b] <- k_(t-1)[a:b],   t >= 1, for each range a:b of a head's dimensions

A query that finds its token by those dimensions lands on the token after it and reads that one's value: one layer does
what an induction head needs two for (Olsson et al. 2022, arXiv:2209.11895). Ranges that rotary positions leave alone
are shifted without a change of angle. The shift crosses documents, not rows. Source: speedrun records #49 and #62.
"""

import torch
from torch import Tensor


def offset_keys(k_BSHK: Tensor, ranges: tuple[tuple[int, int], ...], before_B1HK: Tensor | None = None) -> Tensor:
    """Keys (B, S, H, K) with the dimensions of `ranges` one token late, in new memory; the dtype is kept.

    before: the keys, as they were, of the token in front of the first. Without it the first token keeps its own.
    """
    head = k_BSHK[:, :1] if before_B1HK is None else before_B1HK
    earlier = torch.cat((head, k_BSHK[:, :-1]), dim=1)
    # One selection by a mask that costs a compiled graph nothing; no slice is written in place.
    dim = torch.arange(k_BSHK.size(-1), device=k_BSHK.device)
    late = torch.zeros_like(dim, dtype=torch.bool)
    for start, stop in ranges:
        late = late | ((start <= dim) & (dim < stop))
    return torch.where(late, earlier, k_BSHK)
