"""Gate nets: small nets that compute, for every token, the weights with which streams are added up or heads scaled.

    columns = s (W2 gelu(W1 u) + b),   W2 = 0 and s b = what each weight starts at

The idea is that of multiway dynamic dense connections (MUDDFormer: Xiao et al. 2025, arXiv:2502.12170): how much of an
earlier layer a token wants depends on the token. One net serves many places, each of which takes its columns, so that
a token's weights cost two products. `u` is a stream as it is, without norm. (Speedrun records #81 and #85.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.config.wiring import GateNetSpec
from nanosprint.model.linear import linear
from nanosprint.model.mixing import Columns, NetLayouts
from nanosprint.model.roles import Role

_ALIGN = 8  # outputs of a product in bf16 start at multiples of 16 bytes, which halves the time of what reads them


class GateNet(nn.Module):
    """u (B, S, D) -> `Columns`, as many as were asked of `layouts` by the time the net is built."""

    def __init__(self, spec: GateNetSpec, dim: int, layouts: NetLayouts) -> None:
        super().__init__()
        self.ROLES = {name: Role(f"net.{spec.name}.{name}") for name in ("w1", "w2", "bias")}
        self.spec, self.sizes = spec, layouts.sizes(spec.name)
        inits = torch.tensor(layouts.inits(spec.name)) / spec.scale
        self.w1 = nn.Parameter(torch.empty(spec.hidden, dim))
        self.w2 = nn.Parameter(torch.zeros(len(inits), spec.hidden))
        self.bias = nn.Parameter(inits)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        bound = self.w1.size(1) ** -0.5
        self.w1.uniform_(-bound, bound, generator=generator)

    def forward(self, u_BSD: Tensor, scale: Tensor | None = None) -> Columns:
        """`scale` (0-D) is the learned number that takes the place of the recipe's constant."""
        extra = -len(self.bias) % _ALIGN
        w2, bias = F.pad(self.w2, (0, 0, 0, extra)), F.pad(self.bias, (0, extra))
        out = linear(F.gelu(linear(u_BSD, self.w1)), w2, bias)
        return Columns((self.spec.scale if scale is None else scale) * out, (*self.sizes, extra))


class GateNets(nn.Module):
    """All gate nets of a model by name, and the scales that several share."""

    def __init__(self, config: ModelConfig, layouts: NetLayouts) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({spec.name: GateNet(spec, config.dim, layouts) for spec in config.nets})
        self.shared = {spec.name: spec.shared_scale for spec in config.nets if spec.shared_scale is not None}
        self.ROLES = {name: Role(f"net.{name}") for name in self.shared.values()}
        for spec in config.nets:
            if spec.shared_scale is not None:
                self.register_parameter(spec.shared_scale, nn.Parameter(torch.tensor(spec.scale)))

    def forward(self, name: str, u_BSD: Tensor, dtype: torch.dtype) -> Columns:
        """Columns of the net `name`, computed in `dtype`."""
        scale = self.get_parameter(self.shared[name]) if name in self.shared else None
        columns: Columns = self.nets[name](u_BSD.to(dtype), scale)
        return columns
