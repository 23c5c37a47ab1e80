"""One layer: what its spec says of sums, mixer and MLP, around a residual stream."""

from typing import cast

import torch
from torch import Tensor, nn

from nanosprint.config.model import LayerSpec, ModelConfig
from nanosprint.model.context import Context
from nanosprint.model.mixer import Cache, build_mixer
from nanosprint.model.mixing import Columns, Maker, Mixture, NetLayouts
from nanosprint.model.mlp import MLP
from nanosprint.model.norm import build_norm
from nanosprint.model.rotary import Rotary
from nanosprint.ops.attention import Attention


class Block(nn.Module):
    """x (B, S, D) -> (B, S, D): enter, norm, mix, add; norm, MLP, add. Mixer and MLP are handed `compute_dtype`."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        rotary: Rotary | None,
        attend: Attention,
        compute_dtype: torch.dtype,
        stream_dtype: torch.dtype,
        layouts: NetLayouts,
    ) -> None:
        super().__init__()
        self.spec, self.compute_dtype = spec, compute_dtype
        self.join = Mixture(spec.join, layouts) if spec.join else None
        self.entry = Mixture(spec.entry, layouts) if spec.entry else None
        if spec.mixer is not None:
            self.mixer_norm = build_norm(config)
            self.mixer = build_mixer(config, spec.mixer, rotary, attend, stream_dtype, layouts)
            self.after_mixer = Mixture(spec.after_mixer, layouts)
            _multiply_at_the_source(self.after_mixer, "mixer", self.mixer, config)
        if spec.mlp is not None:
            self.mlp_norm = build_norm(config)
            self.mlp = MLP(config, spec.mlp)
            self.after_mlp = Mixture(spec.after_mlp, layouts)
            _multiply_at_the_source(self.after_mlp, "mlp", self.mlp, config)

    def forward(
        self,
        x_BSD: Tensor,
        context: Context,
        sources: dict[str, Tensor],
        columns: dict[str, Columns],
        cache: Cache | None = None,
    ) -> Tensor:
        """`sources` holds what the model knows by name; the stream, sub-layers' outputs and taps are written to it."""
        spec = self.spec
        sources["x"] = x_BSD
        if spec.tap_in is not None:
            sources[spec.tap_in] = x_BSD
        for enter in (self.join, self.entry):
            if enter is not None:
                sources["x"] = enter(sources, columns)
        if spec.mixer is not None:
            sources["n"] = self.mixer_norm(sources[spec.reads], self.compute_dtype)
            sources["mixer"] = self.mixer(sources["n"], context, sources, columns, cache)
            sources["x"] = self.after_mixer(sources, columns)
        if spec.mlp is not None:
            sources["mlp"] = self.mlp(self.mlp_norm(sources["x"], self.compute_dtype))
            sources["x"] = self.after_mlp(sources, columns)
        if spec.tap is not None:
            sources[spec.tap] = sources["x"]
        return sources["x"]


def _multiply_at_the_source(mixture: Mixture, name: str, maker: nn.Module, config: ModelConfig) -> None:
    """Have a sub-layer's last matrix multiplied by the learned number of its output, where the output is a product.

        w (y A^T) = y (w A)^T,   dL/dw = <y (dL/dout)^T, A>

    D² numbers or four times as many are multiplied, not D a token; above all the backward pass needs neither the output
    again, for the number's gradient, nor a second copy of the stream's gradient, times the number: two of the stream's
    size that are kept or written, and read, for each sub-layer.
    """
    number = None if config.bias else mixture.hand_over(name)
    if number is not None:
        cast(Maker, maker).multiply_output_by(number)
