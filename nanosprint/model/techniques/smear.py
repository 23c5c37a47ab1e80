"""Smear: a share of the token before is added to each raw embedding.

    e'_t = e_t + lambda sigmoid(w . first components of e_t) e_{t-1},   e'_0 = e_0

Heads that would look one token back are free for other things. The gate is driven by the token itself, and neighbours
are taken unsmeared. Lambda starts at zero. Within a row, ends of documents are not seen. (Speedrun record #34.)
"""

import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import SmearSpec
from nanosprint.model.mixing import NetLayouts, build_weight


class Smear(nn.Module):
    """e (B, S, D), embeddings before any norm -> (B, S, D)."""

    def __init__(self, spec: SmearSpec, layouts: NetLayouts) -> None:
        super().__init__()
        self.gate, self.weight = build_weight(spec.gate, layouts), build_weight(spec.weight, layouts)

    def forward(self, e_BSD: Tensor) -> Tensor:
        before = F.pad(e_BSD[:, :-1], (0, 0, 1, 0))
        return e_BSD + self.weight({}, {}) * self.gate({"e": e_BSD}, {}) * before
