"""A GPT built from a `ModelConfig`: embedding, layers, norm, head. This file is the whole forward pass.

Everything that a later sum may name is kept in a dict of sources, and what gate nets computed in a dict of columns;
`config/wiring.py` lists them.

Shape letters: B rows (independent sequences), S tokens of a row, D width, V vocabulary.
Parameters keep their storage dtype (fp32); matrix products are in `compute_dtype`, the residual stream in
`stream_dtype`.
"""

import torch
from torch import Tensor, nn

from nanosprint.config.model import ModelConfig
from nanosprint.config.recipe import Fp8MLPSpec, Fp8ProjectionSpec
from nanosprint.config.schedule import Windows
from nanosprint.model.attention import SelfAttention
from nanosprint.model.block import Block
from nanosprint.model.context import NO_CONTEXT, Context
from nanosprint.model.embedding import Embedding
from nanosprint.model.head import Head, HeadLoss
from nanosprint.model.mixer import Cache
from nanosprint.model.mixing import Columns, Mixture, NetLayouts
from nanosprint.model.mlp import MLP
from nanosprint.model.norm import build_norm
from nanosprint.model.roles import collect_roles
from nanosprint.model.rotary import Rotary
from nanosprint.model.techniques.bigram import BigramTable
from nanosprint.model.techniques.gate_net import GateNets
from nanosprint.model.techniques.value_tables import ValueTables
from nanosprint.ops.attention import Limit, backend
from nanosprint.ops.embedding import rows_of
from nanosprint.ops.fp8_copies import renew


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
        head_loss: HeadLoss | None = None,
    ) -> None:
        super().__init__()
        config.validate()
        self.config, self.compute_dtype = config, compute_dtype
        self.stream_dtype = stream_dtype or compute_dtype
        attend, layouts = backend(attention), NetLayouts(config.nets)
        self.embed = Embedding(config, layouts)
        self.bigram = BigramTable(config.bigram, config.dim) if config.bigram else None
        self.input = Mixture(config.input, layouts)
        self.rotary = rotary = _rotary(config)
        self.layers = nn.ModuleList(
            Block(config, spec, rotary, attend, compute_dtype, self.stream_dtype, layouts) for spec in config.layers
        )
        self.value_tables = ValueTables(config) if config.value_tables else None
        self.output = Mixture(config.output, layouts)
        self.nets = GateNets(config, layouts)  # last: by now everything has asked for its columns
        self.norm = build_norm(config)
        self.head = Head(config, head_loss)
        # Found once: to go through all modules takes the host a millisecond, and `refresh` is called at every step.
        self._matrices = [module for module in self.modules() if isinstance(module, MLP | SelfAttention)]

    def init_weights(self, seed: int) -> None:
        """Fill every weight from `seed`: the same values on every device and for every number of processes."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for module in self.modules():
            initialize = getattr(module, "init_weights", None)
            if module is not self and initialize is not None:
                initialize(generator)
        if self.config.head_copy:
            assert self.head.weight is not None
            head = self.head.weight.detach()
            self.embed.weight.detach().copy_(head.T if self.config.head_layout == "in_out" else head)

    def hidden(self, tokens: Tensor, context: Context = NO_CONTEXT, caches: list[Cache | None] | None = None) -> Tensor:
        """Normed output (B, S, D) of the last layer. With caches, the tokens follow those that the caches hold."""
        sources = self._sources(tokens, next((c.length for c in caches or [] if c is not None), 0))
        columns: dict[str, Columns] = {}
        self._evaluate(self.config.input_nets, sources["x0"], columns)
        x = self.input(sources, columns)
        for i, layer in enumerate(self.layers):
            self._evaluate(self.config.layers[i].nets, x, columns)
            x = layer(x, context, sources, columns, None if caches is None else caches[i])
        self._evaluate(self.config.output_nets, x, columns)
        return self.norm(self.output(sources, columns), self.compute_dtype)

    def _sources(self, tokens: Tensor, start: int) -> dict[str, Tensor]:
        """What is known of the tokens before the first layer; the first stands at position `start`."""
        tokens_BS = tokens[:, self.config.history :]
        rows = rows_of(tokens_BS)
        sources = {"x0": self.embed(tokens, rows, self.stream_dtype, start)}
        if self.bigram is not None:
            sources["bigram"] = self.bigram(tokens_BS, self.stream_dtype)
        if self.value_tables is not None:
            sources |= self.value_tables(rows, self.compute_dtype)
        return sources

    def _evaluate(self, nets: tuple[str, ...], x_BSD: Tensor, columns: dict[str, Columns]) -> None:
        """Add the columns of the gate nets named, which look at a stream."""
        for name in nets:
            columns[name] = self.nets(name, x_BSD, self.compute_dtype)

    def forward(
        self, tokens: Tensor, context: Context = NO_CONTEXT, caches: list[Cache | None] | None = None
    ) -> Tensor:
        """Logits (B, S, V) in fp32 for tokens (B, history + S) of any integer dtype; see `ModelConfig.history`."""
        return self.head(self.hidden(tokens, context, caches), self.embed.weight)

    def loss_sum(self, tokens: Tensor, targets_BS: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Cross-entropy of int64 targets (B, S) in nats, summed; a target of -1 does not count.

        With `context.loss` it is that objective, in which the targets of a row serve its earlier tokens, too.
        """
        hidden = self.hidden(tokens, context)
        return self.head.loss_sum(hidden, targets_BS, self.embed.weight, context.loss, context.head_counts)

    def set_prefixes(self, table: Tensor) -> None:
        """Tell the head each token's longest proper prefix: (n,) int64 of at most V tokens, -1 where there is none.

        `data.prefixes` makes the table. Until this is called no token has one. In place, so that compiled code sees it.
        """
        self.head.set_prefixes(table)

    def add_rows_in_place(self) -> None:
        """Let look-ups add their gradients to those that the tables have, row by row: see `ops.embedding.lookup`.

        From then on tables must have a gradient before a step, such as the zeros that the engine gives them.
        """
        for table in (self.embed, self.bigram, self.value_tables):
            if table is not None:
                table.in_place = True

    def train_mlps_in_fp8(self, spec: Fp8MLPSpec) -> None:
        """Compute the MLPs' training products in FP8, from the first `refresh` on. The model must be on its device."""
        for mlp in self._mlps():
            mlp.train_in_fp8(spec)

    def fuse_mlps(self) -> None:
        """Compute the squared-ReLU MLPs that are not in FP8 by one operator each way: see `ops.linear_relu2`."""
        for mlp in self._mlps():
            mlp.fuse()

    def _mlps(self) -> list[MLP]:
        return [module for module in self._matrices if isinstance(module, MLP)]

    def train_projections_in_fp8(self, spec: Fp8ProjectionSpec, divisor: int) -> None:
        """The same of attention's projections. The loss is divided by about `divisor` before it is differentiated."""
        for module in self._matrices:
            if isinstance(module, SelfAttention):
                module.train_in_fp8(spec, spec.gradient / divisor)

    @torch.no_grad()
    def refresh(self, steps: int) -> None:
        """Renew what is computed from the weights once an update: FP8 copies. `steps`: updates done so far.

        To be called when the weights have their first values and after every update; nothing to do without FP8.
        """
        renew([copy for module in self._matrices for copy in module.fp8_copies(steps)])

    def extend(self, seq_len: int) -> None:
        """Make positions reach `seq_len` tokens. Raises ValueError where learned positions end earlier."""
        if self.config.positions == "learned" and seq_len > self.config.seq_len:
            raise ValueError(f"learned positions end at model.seq_len={self.config.seq_len}; {seq_len} were asked for")
        if self.rotary is not None:
            self.rotary.extend(seq_len)

    def set_windows(self, windows: tuple[int, ...]) -> float:
        """Let rotary positions follow the long windows so far, in tokens; the softmax scale's factor. See `Rotary`."""
        return 1.0 if self.rotary is None else self.rotary.set_windows(windows)

    def new_caches(self, batch_size: int, capacity: int) -> list[Cache | None]:
        """Empty caches for generating up to `capacity` tokens in each of `batch_size` rows.

        Raises ValueError where one more token cannot be had from a cache; see `ModelConfig.steps_with_cache`.
        """
        if not self.config.steps_with_cache:
            raise ValueError("the model's techniques look across tokens, which caches do not hold: read the whole row")
        mixers = [getattr(layer, "mixer", None) for layer in self.layers]
        return [None if m is None else m.new_cache(batch_size, capacity, self.compute_dtype) for m in mixers]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int, windows: Windows | None = None) -> float:
        """Training FLOPs a token: 6 per weight of every matrix product, and attention over a causal row of `seq_len`.

        Windows bound what a token sees; the ends of documents, which depend on the data, do not count.

        A multiply-add counts 2, the backward pass twice the forward; look-ups count nothing (PaLM's convention,
        Chowdhery et al. 2022, arXiv:2204.02311, but with causal attention counted as the half that it is).
        """
        roles, lookups = collect_roles(self), ("embed", "table")
        matrices = sum(
            p.numel()
            for name, p in self.named_parameters()
            if p.ndim == 2 and roles[name].name.partition(".")[0] not in lookups
        )
        matrices += self.config.vocab_size * self.config.dim if self.config.tied_head else 0
        context = NO_CONTEXT if windows is None else Context(short=windows.short, long=windows.long)
        keys = 0.0
        for _, mixer in self.config.attention:
            # Paired heads: half the heads over a sequence of twice the length, each key an interleaved position.
            keys += mean_keys(2 * seq_len if mixer.paired else seq_len, context.window(mixer.window))
            if mixer.compose is not None:
                keys += mean_keys(seq_len, mixer.compose.window - 1)
        return 6.0 * matrices + 12.0 * self.config.dim * keys


def _rotary(config: ModelConfig) -> Rotary | None:
    """Tables for all layers; where some pair their heads, of two positions a token."""
    if config.positions != "rotary":
        return None
    paired = any(mixer.paired for _, mixer in config.attention)
    return Rotary(config.rotary, config.head_dim, config.seq_len, places=2 if paired else 1)


def mean_keys(seq_len: int, window: Limit | None) -> float:
    """How many keys a query of a causal row sees on average, itself included."""
    window = None if window is None else int(window)
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return window + 1 - window * (window + 1) / (2 * seq_len)
