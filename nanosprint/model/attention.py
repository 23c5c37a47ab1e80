"""The mixing half of a layer: causal self-attention over the tokens of a row, or one token against a cache.

In order: one product for queries, keys and values; norm and rotary positions; what a key takes over from the token
before; what the values are summed up from; attention; what is added to it, taken away from it, multiplied by; the
output projection. Techniques that a recipe leaves out cost nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul

import torch
from torch import Tensor, nn

from nanosprint.config.model import AttnSpec, ModelConfig
from nanosprint.config.recipe import Fp8ProjectionSpec
from nanosprint.config.wiring import Column, Gate, Scalar, Term
from nanosprint.model.context import Context
from nanosprint.model.fp8_projection import Fp8Projection
from nanosprint.model.linear import init_linear, init_projection, linear
from nanosprint.model.mixing import Columns, Mixture, NetLayouts, ScalarWeight, build_weight
from nanosprint.model.norm import FP32_EPS, rms_norm
from nanosprint.model.roles import Role
from nanosprint.model.rotary import Rotary
from nanosprint.model.techniques.compose import compose_attention
from nanosprint.model.techniques.head_gate import gated
from nanosprint.model.techniques.paired_heads import apart, doubled, interleaved
from nanosprint.model.techniques.xsa import without_own_value
from nanosprint.ops.attention import Attention, Scale
from nanosprint.ops.fp8 import LARGEST
from nanosprint.ops.fp8_copies import Copy
from nanosprint.ops.key_offset import offset_keys
from nanosprint.ops.qk_norm_rotary import NormRotary, qk_norm_rotary

_OWN_VALUES = (Term(source="v"),)


@dataclass
class KVCache:
    """Keys and values of the tokens so far, (B, capacity, H, K) each; `length` of them are filled.

    `last_key` is the last token's key as it was before `offset_keys`, for the layers that want it.
    """

    k_BSHK: Tensor
    v_BSHK: Tensor
    length: int = 0
    last_key: Tensor | None = None

    def append(self, k_BSHK: Tensor, v_BSHK: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens and return all keys and values up to and including them."""
        stop = self.length + k_BSHK.size(1)
        self.k_BSHK[:, self.length : stop] = k_BSHK
        self.v_BSHK[:, self.length : stop] = v_BSHK
        self.length = stop
        return self.k_BSHK[:, :stop], self.v_BSHK[:, :stop]


class SelfAttention(nn.Module):
    """x (B, S, D) -> (B, S, D). Q, K and V are one matrix of three blocks, D rows each, or with `separate_qk` two.

    Products are in x's dtype, norm and rotation of queries and keys in that of the stream.
    """

    ROLES = {
        "qkv": Role("matrix.qkv", blocks=3),
        "v": Role("matrix.v"),
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
        self.rotary, self.places = rotary, 2 if spec.paired else 1
        self.scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
        self._build_matrices()
        # Share of the first layer's values (value residual: Zhou et al. 2024, arXiv:2410.17897).
        self.value_mix = nn.Parameter(torch.tensor(0.5)) if spec.value_residual else None
        self.values = None if spec.values == _OWN_VALUES else Mixture(spec.values, layouts, config.num_heads)

        def build(weight: Scalar | Column | Gate | None) -> nn.Module | None:
            return None if weight is None else build_weight(weight, layouts, config.num_heads)

        self.qkv_scale, self.out_scale = build(spec.qkv_scale), build(spec.out_scale)
        self.xsa, self.head_gate = build(spec.xsa), build(spec.head_gate)
        if spec.compose is not None:
            weights = spec.compose.mix, spec.compose.add
            self.compose_mix, self.compose_add = (build_weight(w, layouts, config.num_heads) for w in weights)
        self.fp8_qkv: Fp8Projection | None = None
        self.fp8_out: Fp8Projection | None = None
        self._number: tuple[ScalarWeight, ...] = ()  # at most one; in a tuple it is no module of this one

    def _build_matrices(self) -> None:
        D, H = self.config.dim, self.config.num_heads
        if self.spec.separate_qk:
            self.qk, self.v = nn.Parameter(torch.empty(2 * D, D)), nn.Parameter(torch.empty(D, D))
            # Two neighbouring heads' queries are one matrix for the optimizer, and so are their keys (record #80).
            self.ROLES = {**self.ROLES, "qk": Role("matrix.qk", blocks=H if H % 2 == 0 else 2)}
        else:
            self.qkv = nn.Parameter(torch.empty(3 * D, D))
        self.out = nn.Parameter(torch.empty(D, D))
        self.qkv_bias = nn.Parameter(torch.zeros(3 * D)) if self.config.bias else None
        self.out_bias = nn.Parameter(torch.zeros(D)) if self.config.bias else None

    def init_weights(self, generator: torch.Generator) -> None:
        init = self.config.init
        scale = 1.0 if init.qkv_std is None else init.qkv_std / init.linear_std
        for weight in self._qkv_parts():
            init_linear(weight, init, generator, scale)
        init_projection(self.out, self.config.init, generator, self.config.num_layers, self.config.init.attn_projection)

    def forward(
        self,
        x_BSD: Tensor,
        context: Context,
        sources: dict[str, Tensor],
        columns: Mapping[str, Columns],
        cache: KVCache | None = None,
    ) -> Tensor:
        """The mixed tokens of normed ones. `sources` and `columns` are what `build_weight` describes.

        The model's first attention leaves its values in `sources`, for value residuals.
        """
        start = 0 if cache is None else cache.length
        offset = self.spec.key_offset if cache is None else ()
        q, k, v = self._queries_keys_values(x_BSD, start, self._merged_weight(sources, columns), offset)
        if cache is not None and self.spec.key_offset:
            before, cache.last_key = cache.last_key, k[:, -1:]
            k = offset_keys(k, self.spec.key_offset, before)
        v = own_v = self._summed_values(v, sources, columns)
        if cache is not None:
            k, v = cache.append(k, v)
        scale = self.scale if context.attn_scale is None else context.attn_scale
        y = self._attended(q, k, v, scale, context)
        if self.spec.compose is not None:
            w1, w2 = self.compose_mix(sources, columns), self.compose_add(sources, columns)
            window = self.spec.compose.window
            y = compose_attention(y, q, k, v, w1, w2, scale, window, context.documents)
        if self.xsa is not None:
            y = without_own_value(y, own_v, self.xsa(sources, columns))
        if self.head_gate is not None:
            y = gated(y, self.head_gate(sources, columns))
        factor = self._out_factor()
        out = self.out if factor is None else factor * self.out
        return _projected(self.fp8_out, y, out, self.out_bias)

    def multiply_output_by(self, number: ScalarWeight) -> None:
        """From now on multiply what comes out by a learned number, which is another module's parameter. No biases."""
        assert self.out_bias is None
        self._number = (number,)

    def _out_factor(self) -> Tensor | None:
        """What the output projection is multiplied by, 0-D; None for 1."""
        own = () if self.out_scale is None else (self.out_scale,)
        numbers = [number({}, {}) for number in (*own, *self._number)]  # Scalars, which read nothing
        return reduce(mul, numbers) if numbers else None

    def train_in_fp8(self, spec: Fp8ProjectionSpec, gradient_scale: float) -> None:
        """From now on compute the projections' products in training in FP8, once `fp8_copies` have been made.

        gradient_scale: of the loss as it is differentiated.
        """
        D, device, backward = self.config.dim, self.out.device, gradient_scale if spec.backward else None
        if spec.qkv:
            largest = math.sqrt(D) / LARGEST  # of a row whose mean square is 1
            self.fp8_qkv = Fp8Projection((3 * D, D), device, gradient_scale=backward, input_scale=largest)
        if spec.out:
            self.fp8_out = Fp8Projection((D, D), device, gradient_scale=backward, headroom=spec.headroom)

    def fp8_copies(self, steps: int) -> list[Copy]:
        """What is to be quantised anew after every update, whatever their number."""
        qkv_factor = None if self.qkv_scale is None else self.qkv_scale({}, {})  # a Scalar, which reads nothing
        known = (self.fp8_qkv, self._qkv_parts(), qkv_factor), (self.fp8_out, (self.out,), self._out_factor())
        return [fp8.weight.copy_of(parts, factor) for fp8, parts, factor in known if fp8 is not None]

    def new_cache(self, batch_size: int, capacity: int, dtype: torch.dtype) -> KVCache:
        """An empty cache for up to `capacity` tokens in each of `batch_size` rows."""
        shape = (batch_size, capacity, self.config.num_heads, self.config.head_dim)
        k, v = (torch.empty(shape, dtype=dtype, device=self.out.device) for _ in range(2))
        return KVCache(k, v)

    def _queries_keys_values(
        self, x_BSD: Tensor, start: int, weight: Tensor, offset: tuple[tuple[int, int], ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, H, K) each; queries and keys normed and turned as the recipe has it, the first token at `start`.

        offset: ranges of a key's dimensions that come from the token before, in the same row.
        """
        B, S, D = x_BSD.shape
        config, fp8 = self.config, self.fp8_qkv
        if config.qk_norm and self.rotary is not None:
            cos, sin = self.rotary.tables(start, S, self.places)
            pairs, turning = config.rotary.pairs, self.rotary.turning
            how = NormRotary(config.num_heads, cos, sin, FP32_EPS, self.stream_dtype, pairs, offset, turning)
            if fp8 is not None and torch.is_grad_enabled():
                return fp8.queries_keys_values(x_BSD, weight, how)
            return qk_norm_rotary(linear(x_BSD, weight, self.qkv_bias), *how)
        qkv = _projected(fp8, x_BSD, weight, self.qkv_bias)
        q, k, v = (t.view(B, S, config.num_heads, config.head_dim) for t in qkv.split(D, dim=-1))
        if config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, start, self.places), self.rotary(k, start, self.places)
        return q, offset_keys(k, offset) if offset else k, v

    def _qkv_parts(self) -> tuple[Tensor, ...]:
        """The matrices that stand one above the other in the merged weight."""
        return (self.qk, self.v) if self.spec.separate_qk else (self.qkv,)

    def _merged_weight(self, sources: Mapping[str, Tensor], columns: Mapping[str, Columns]) -> Tensor:
        """(3D, D). The learned scale multiplies the weight: 3 D² products, against 3 D a token on what comes out."""
        parts = self._qkv_parts()
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        return weight if self.qkv_scale is None else self.qkv_scale(sources, columns) * weight

    def _summed_values(self, own_BSHK: Tensor, sources: dict[str, Tensor], columns: Mapping[str, Columns]) -> Tensor:
        """(B, S, H, K) in the dtype of the layer's own values: what the recipe sums up, in place of those alone."""
        v, first = own_BSHK, sources.setdefault("first_values", own_BSHK)
        if self.value_mix is not None:
            v = torch.lerp(v, first, self.value_mix.to(v.dtype))
        if self.values is None:
            return v
        summed: Tensor = self.values({**sources, "v": v.flatten(2)}, columns)
        return summed.to(v.dtype).view(v.shape)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, scale: Scale, context: Context) -> Tensor:
        window, documents = context.window(self.spec.window), context.documents
        if not self.spec.paired:
            return self.attend(q, k, v, scale, window, documents)
        q, k, v = interleaved(q), interleaved(k), interleaved(v)
        return apart(self.attend(q, k, v, scale, window, doubled(documents)))


def _projected(fp8: Fp8Projection | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of x (B, S, D) or (B, S, H, K), in training by `fp8` if there is one: models with biases have none."""
    if fp8 is not None and torch.is_grad_enabled():
        y: Tensor = fp8(x, weight)
        return y
    return linear(x.flatten(2), weight, bias)
