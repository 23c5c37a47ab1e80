"""A GPT built from a `ModelConfig`: embedding, layers, norm, head. This file is the whole forward pass.

Shape letters: B rows (independent sequences), S tokens of a row, D width, V vocabulary.
Parameters keep their storage dtype (fp32); matrix products are in `compute_dtype`, the residual stream in
`stream_dtype`.
"""

import torch
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.config.schedule import Windows
from nanosprint.model.attention import KVCache
from nanosprint.model.block import Block
from nanosprint.model.context import NO_CONTEXT, Context
from nanosprint.model.embedding import Embedding
from nanosprint.model.head import Head, Linear
from nanosprint.model.linear import linear
from nanosprint.model.norm import build_norm
from nanosprint.model.rotary import Rotary
from nanosprint.model.techniques.value_tables import ValueTables
from nanosprint.ops.attention import Limit, backend


class GPT(nn.Module):
    """The model of a recipe: `GPT(recipe.model)`.

    Weights are empty until `init_weights(seed)` fills them, so that building under `torch.device("meta")` costs
    nothing. Raises ValueError for a configuration that cannot work.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: str = "sdpa",
        compute_dtype: torch.dtype = torch.float32,
        stream_dtype: torch.dtype | None = None,
        head_linear: Linear = linear,
    ) -> None:
        super().__init__()
        config.validate()
        self.config, self.compute_dtype = config, compute_dtype
        self.stream_dtype = stream_dtype or compute_dtype
        attend = backend(attention)
        self.embed = Embedding(config)
        rotary = Rotary(config.rotary, config.head_dim, config.seq_len) if config.positions == "rotary" else None
        self.rotary = rotary
        self.layers = nn.ModuleList(
            Block(config, spec, rotary, attend, compute_dtype, self.stream_dtype) for spec in config.layers
        )
        self.value_tables = ValueTables(config) if config.value_tables else None
        self.norm = build_norm(config)
        self.head = Head(config, head_linear)

    def init_weights(self, seed: int) -> None:
        """Fill every weight from `seed`: the same values on every device and for every number of processes."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for module in self.modules():
            initialize = getattr(module, "init_weights", None)
            if module is not self and initialize is not None:
                initialize(generator)

    def hidden(
        self, tokens: Tensor, context: Context = NO_CONTEXT, caches: list[KVCache | None] | None = None
    ) -> Tensor:
        """Normed output (B, S, D) of the last layer. With caches, the tokens follow those that the caches hold."""
        start = next((c.length for c in caches or [] if c is not None), 0)
        x = x0 = self.embed(tokens, self.stream_dtype, start)
        if self.value_tables is not None:
            context = context._replace(tables=self.value_tables(tokens[:, self.config.history :], self.compute_dtype))
        taps: dict[str, Tensor] = {}
        first_values: Tensor | None = None
        for i, layer in enumerate(self.layers):
            x, values = layer(x, context, x0, taps, first_values, None if caches is None else caches[i])
            first_values = values if first_values is None else first_values
        return self.norm(x, self.compute_dtype)

    def forward(
        self, tokens: Tensor, context: Context = NO_CONTEXT, caches: list[KVCache | None] | None = None
    ) -> Tensor:
        """Logits (B, S, V) in fp32 for tokens (B, history + S) of any integer dtype; see `ModelConfig.history`."""
        return self.head(self.hidden(tokens, context, caches), self.embed.weight)

    def loss_sum(self, tokens: Tensor, targets_BS: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Cross-entropy of int64 targets (B, S) in nats, summed; a target of -1 does not count."""
        return self.head.loss_sum(self.hidden(tokens, context), targets_BS, self.embed.weight)

    def extend(self, seq_len: int) -> None:
        """Make positions reach `seq_len` tokens. Raises ValueError where learned positions end earlier."""
        if self.config.positions == "learned" and seq_len > self.config.seq_len:
            raise ValueError(f"learned positions end at model.seq_len={self.config.seq_len}; {seq_len} were asked for")
        if self.rotary is not None:
            self.rotary.extend(seq_len)

    def new_caches(self, batch_size: int, capacity: int) -> list[KVCache | None]:
        """Empty caches for generating up to `capacity` tokens in each of `batch_size` rows."""
        config, weight = self.config, self.embed.weight
        shape = (batch_size, capacity, config.num_heads, config.head_dim)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=self.compute_dtype, device=weight.device)

        return [None if spec.mixer is None else KVCache(empty(), empty()) for spec in config.layers]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int, windows: Windows | None = None) -> float:
        """Training FLOPs a token: 6 per weight of every matrix product, and attention over a causal row of `seq_len`.

        Windows bound what a token sees; the ends of documents, which depend on the data, do not count.

        A multiply-add counts 2, the backward pass twice the forward; look-ups count nothing (PaLM's convention,
        Chowdhery et al. 2022, arXiv:2204.02311, but with causal attention counted as the half that it is).
        """
        tables = ("embed.", "value_tables.")
        matrices = sum(p.numel() for n, p in self.named_parameters() if p.ndim == 2 and not n.startswith(tables))
        matrices += self.config.vocab_size * self.config.dim if self.config.tied_head else 0
        context = NO_CONTEXT if windows is None else Context(short=windows.short, long=windows.long)
        mixers = [spec.mixer for spec in self.config.layers if spec.mixer is not None]
        keys = sum(mean_keys(seq_len, context.window(mixer.window)) for mixer in mixers)
        return 6.0 * matrices + 12.0 * self.config.dim * keys


def mean_keys(seq_len: int, window: Limit | None) -> float:
    """How many keys a query of a causal row sees on average, itself included."""
    window = None if window is None else int(window)
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return window + 1 - window * (window + 1) / (2 * seq_len)
