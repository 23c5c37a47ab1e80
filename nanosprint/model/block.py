"""One layer: what its spec says of mixer, MLP and skips, around a residual stream."""

import torch
from torch import Tensor, nn

from nanosprint.config.model import LayerSpec, ModelConfig
from nanosprint.model.attention import KVCache, SelfAttention
from nanosprint.model.context import Context
from nanosprint.model.mlp import MLP
from nanosprint.model.norm import build_norm
from nanosprint.model.roles import Role
from nanosprint.model.rotary import Rotary
from nanosprint.ops.attention import Attention


class Block(nn.Module):
    """x (B, S, D) -> (B, S, D): norm, mix, add; norm, MLP, add. Mixer and MLP are handed `compute_dtype`."""

    ROLES = {"entry": Role("scalar.entry"), "skip_weights": Role("scalar.skip")}

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        rotary: Rotary | None,
        attend: Attention,
        compute_dtype: torch.dtype,
        stream_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.spec, self.compute_dtype = config, spec, compute_dtype
        if spec.mixer is not None:
            self.mixer_norm = build_norm(config)
            self.mixer = SelfAttention(config, spec.mixer, rotary, attend, stream_dtype)
        if spec.mlp is not None:
            self.mlp_norm = build_norm(config)
            self.mlp = MLP(config, spec.mlp)
        # Stream and embedding enter the layer with these weights (x0 skip, speedrun record #9).
        self.entry = nn.Parameter(torch.tensor([1.0, 0.0])) if config.x0_skip else None
        inits = [skip.init for skip in spec.skips]
        self.skip_weights = nn.Parameter(torch.tensor(inits)) if inits else None

    def forward(
        self,
        x_BSD: Tensor,
        context: Context,
        x0_BSD: Tensor,
        taps: dict[str, Tensor],
        first_values: Tensor | None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`taps` holds earlier layers' outputs by name and is added to. Returns the stream and the mixer's values."""
        x, values = x_BSD, None
        for i, skip in enumerate(self.spec.skips):
            assert self.skip_weights is not None
            x = x + self.skip_weights[i].to(x.dtype) * taps[skip.tap]
        if self.entry is not None:
            keep, inject = self.entry.to(x.dtype).unbind()
            x = keep * x + inject * x0_BSD
        if self.spec.mixer is not None:
            mixed, values = self.mixer(self.mixer_norm(x, self.compute_dtype), context, first_values, cache)
            x = x + self.config.attn_branch_scale * mixed if self.config.attn_branch_scale != 1 else x + mixed
        if self.spec.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x, self.compute_dtype))
        if self.spec.tap is not None:
            taps[self.spec.tap] = x
        return x, values
