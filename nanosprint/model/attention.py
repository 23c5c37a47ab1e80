"""The mixing half of a layer: causal self-attention over the tokens of a row, or one token against a cache."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanosprint.config.model import AttnSpec, ModelConfig
from nanosprint.model.context import Context
from nanosprint.model.linear import init_linear, init_projection, linear
from nanosprint.model.norm import FP32_EPS, rms_norm
from nanosprint.model.roles import Role
from nanosprint.model.rotary import Rotary
from nanosprint.ops.attention import Attention
from nanosprint.ops.qk_norm_rotary import qk_norm_rotary


@dataclass
class KVCache:
    """Keys and values of the tokens so far, (B, capacity, H, K) each; `length` of them are filled."""

    k_BSHK: Tensor
    v_BSHK: Tensor
    length: int = 0

    def append(self, k_BSHK: Tensor, v_BSHK: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens and return all keys and values up to and including them."""
        stop = self.length + k_BSHK.size(1)
        self.k_BSHK[:, self.length : stop] = k_BSHK
        self.v_BSHK[:, self.length : stop] = v_BSHK
        self.length = stop
        return self.k_BSHK[:, :stop], self.v_BSHK[:, :stop]


class SelfAttention(nn.Module):
    """x (B, S, D) -> (B, S, D). Q, K and V are one matrix of three blocks, D rows each.

    Products are in x's dtype, norm and rotation of queries and keys in that of the stream.
    """

    ROLES = {
        "qkv": Role("matrix.qkv", blocks=3),
        "out": Role("matrix.attn_out"),
        "qkv_bias": Role("vector.bias"),
        "out_bias": Role("vector.bias"),
        "value_mix": Role("scalar.value_mix"),
        "value_scale": Role("scalar.value_scale"),
        "table_weight": Role("scalar.table_weight"),
    }

    def __init__(
        self,
        config: ModelConfig,
        spec: AttnSpec,
        rotary: Rotary | None,
        attend: Attention,
        stream_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.spec, self.attend, self.stream_dtype = config, spec, attend, stream_dtype
        self.rotary = rotary
        self.scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
        self.qkv = nn.Parameter(torch.empty(3 * config.dim, config.dim))
        self.out = nn.Parameter(torch.empty(config.dim, config.dim))
        self.qkv_bias = nn.Parameter(torch.zeros(3 * config.dim)) if config.bias else None
        self.out_bias = nn.Parameter(torch.zeros(config.dim)) if config.bias else None
        # Share of the first layer's values (value residual: Zhou et al. 2024, arXiv:2410.17897).
        self.value_mix = nn.Parameter(torch.tensor(0.5)) if spec.value_residual else None
        self.value_scale = None if spec.value_scale is None else nn.Parameter(torch.tensor(spec.value_scale))
        self.table_weight = None if spec.value_table is None else nn.Parameter(torch.tensor(0.5))

    def init_weights(self, generator: torch.Generator) -> None:
        init_linear(self.qkv, self.config.init, generator)
        init_projection(self.out, self.config.init, generator, self.config.num_layers)

    def forward(
        self, x_BSD: Tensor, context: Context, first_values: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the mixed tokens and this layer's own values (B, S, H, K), which later layers may want."""
        B, S, D = x_BSD.shape
        q, k, v = self._queries_keys_values(x_BSD, 0 if cache is None else cache.length)
        own_values = v
        if self.value_mix is not None:
            assert first_values is not None, "the recipe was validated: an earlier layer has values"
            v = torch.lerp(v, first_values, self.value_mix.to(v.dtype))
        if self.value_scale is not None:
            v = self.value_scale.to(v.dtype) * v
        if self.table_weight is not None:
            assert self.spec.value_table is not None
            assert context.tables is not None
            v = v + self.table_weight.to(v.dtype) * context.tables[self.spec.value_table].view(v.shape)
        if cache is not None:
            k, v = cache.append(k, v)
        y = self.attend(q, k, v, self.scale, context.window(self.spec.window), context.documents)
        return linear(y.reshape(B, S, D), self.out, self.out_bias), own_values

    def _queries_keys_values(self, x_BSD: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, H, K) each; queries and keys normed and turned as the recipe has it, the first token at `start`."""
        B, S, D = x_BSD.shape
        config, qkv = self.config, linear(x_BSD, self.qkv, self.qkv_bias)
        if config.qk_norm and self.rotary is not None:
            tables = self.rotary.tables(start, S)
            return qk_norm_rotary(qkv, config.num_heads, *tables, FP32_EPS, self.stream_dtype)
        q, k, v = (t.view(B, S, config.num_heads, config.head_dim) for t in qkv.split(D, dim=-1))
        if config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, start), self.rotary(k, start)
        return q, k, v
