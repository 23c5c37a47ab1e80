"""Head gates: each head's output is multiplied by a number of its token's own.

    y_h <- g_h y_h

A head that finds nothing can then say nothing; without a gate its softmax has to put its weight somewhere, and early
tokens become sinks. In speedrun record #28 the number is sigmoid(w · n[:12]), in #85 a gate net's plain output.
See also Qiu et al. 2025, arXiv:2505.06708.
"""

from torch import Tensor


def gated(y_BSHK: Tensor, gate_BSH: Tensor | float) -> Tensor:
    """Outputs (B, S, H, K) times gates (B, S, H), which may also be a 0-D tensor or a float; y's dtype is kept."""
    if isinstance(gate_BSH, float) or gate_BSH.ndim == 0:
        return y_BSHK * gate_BSH
    return y_BSHK * gate_BSH.to(y_BSHK.dtype).unsqueeze(-1)
