"""The mixing half of a layer: causal self-attention over the tokens of a row, or one token against a cache."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanosprint.config.model import AttnSpec, ModelConfig
from nanosprint.model.context import Context
from nanosprint.model.linear import init_linear, init_projection, linear
from nanosprint.model.mixing import Columns, Mixture, NetLayouts
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
    }

    def __init__(
        self,
        config: ModelConfig,
        spec: AttnSpec,
        rotary: Rotary | None,
        attend: Attention,
        stream_dtype: torch.dtype,
        layouts: NetLayouts,
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
        self.values = Mixture(spec.values, layouts, config.num_heads)

    def init_weights(self, generator: torch.Generator) -> None:
        init_linear(self.qkv, self.config.init, generator)
        init = self.config.init
        init_projection(self.out, init, generator, self.config.num_layers, init.attn_projection)

    def forward(
        self,
        x_BSD: Tensor,
        context: Context,
        sources: dict[str, Tensor],
        columns: dict[str, Columns],
        cache: KVCache | None = None,
    ) -> Tensor:
        """The mixed tokens. The model's first attention leaves its values in `sources`, for value residuals."""
        B, S, D = x_BSD.shape
        q, k, v = self._queries_keys_values(x_BSD, 0 if cache is None else cache.length)
        first = sources.setdefault("first_values", v)
        if self.value_mix is not None:
            v = torch.lerp(v, first, self.value_mix.to(v.dtype))
        v = self.values({**sources, "v": v.flatten(2)}, columns).view_as(k)
        if cache is not None:
            k, v = cache.append(k, v)
        scale = self.scale if context.attn_scale is None else context.attn_scale
        y = self.attend(q, k, v, scale, context.window(self.spec.window), context.documents)
        return linear(y.reshape(B, S, D), self.out, self.out_bias)

    def new_cache(self, batch_size: int, capacity: int, dtype: torch.dtype) -> KVCache:
        """An empty cache for up to `capacity` tokens in each of `batch_size` rows."""
        shape = (batch_size, capacity, self.config.num_heads, self.config.head_dim)
        k, v = (torch.empty(shape, dtype=dtype, device=self.qkv.device) for _ in range(2))
        return KVCache(k, v)

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
