"""Normalisation of activations: `x / sqrt(mean(x^2) + eps)` without gain (Zhang & Sennrich 2019, arXiv:1910.07467).

Or LayerNorm as GPT-2 has it. Attention norms queries and keys by the former, too (Henry et al. 2020, arXiv:2010.04245).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.model.roles import Role
from nanosprint.ops import rms_norm as ops

# RMSNorm's epsilon stays that of fp32 in bf16 too: bf16's own (2^-7) would shrink small embeddings many-fold.
FP32_EPS = torch.finfo(torch.float32).eps


def rms_norm(x: Tensor, eps: float | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`ops.rms_norm` with the epsilon of fp32 where none is given."""
    return ops.rms_norm(x, FP32_EPS if eps is None else eps, dtype)


class LayerNorm(nn.Module):
    """LayerNorm with gain and optional bias (Ba et al. 2016, arXiv:1607.06450)."""

    ROLES = {"gain": Role("vector.gain"), "bias": Role("vector.bias")}

    def __init__(self, dim: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normed x, in `dtype` where given."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.gain.shape, self.gain.to(x.dtype), bias, self.eps).to(dtype or x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` as a module without parameters."""

    def __init__(self, eps: float | None) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normed x, in `dtype` where given."""
        return rms_norm(x, self.eps, dtype)


def build_norm(config: ModelConfig) -> nn.Module:
    """The model's norm over its width, as the recipe has it."""
    if config.norm == "rms":
        return RMSNorm(config.norm_eps)
    return LayerNorm(config.dim, config.bias, FP32_EPS if config.norm_eps is None else config.norm_eps)
