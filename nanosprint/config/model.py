"""What a model is made of: a few global choices and one spec per layer.

Specs are frozen values without torch, so that recipes load at once and can be printed, compared and hashed. Every
field is a switch of the ablation ladder; modules in `nanosprint/model/` read them once, when they are built. Layers
are described one by one: a layer number never appears in code, only in the recipe that writes `layers`.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from nanosprint.config.wires import validate_wiring
from nanosprint.config.wiring import Column, Gate, GateNetSpec, Scalar, Term

Activation = Literal["gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, kw_only=True)
class ComposeSpec:
    """Dynamically composable attention: all heads' local maps mixed into each (Xiao et al. 2024, arXiv:2405.08553).

    `window` counts the keys, the token itself included. `mix` (w1) weighs the maps, `add` (w2) what is added to a head.
    """

    mix: Column
    add: Column
    window: int = 112


@dataclass(frozen=True, kw_only=True)
class AttnSpec:
    """Causal self-attention.

    `window` names one of the schedule's windows, "full" sees everything before. `value_residual` mixes the first
    layer's values into this layer's own by a learned share; what comes out is the source "v" of the sum `values`.
    """

    window: Literal["full", "short", "long"] = "full"
    value_residual: bool = False
    values: tuple[Term, ...] = (Term(source="v"),)  # what the values are summed up from
    qkv_scale: Scalar | None = None  # on the merged weight: QK-norm cancels it on queries and keys
    out_scale: Scalar | None = None  # on the output projection's weight
    separate_qk: bool = False  # queries and keys in one matrix, orthogonalised by pairs of heads; values in another
    paired: bool = False  # heads h and h + H/2 share a softmax over a sequence of twice the length
    key_offset: tuple[tuple[int, int], ...] = ()  # ranges of a key's dimensions that come from the token before
    xsa: Column | None = None  # tanh(xsa) of an output's part along its own value is taken away
    head_gate: Column | Gate | None = None  # each head's output is multiplied by it
    compose: ComposeSpec | None = None


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """Two projections with an activation between them. `hidden` is the inner width.

    `down_layout` "in_out" stores the second (hidden, dim), which decides Muon's scale and variance axis.
    """

    hidden: int
    activation: Activation = "relu2"
    down_layout: Literal["out_in", "in_out"] = "out_in"


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One residual layer. A missing mixer or MLP is None; `tap` gives the layer's output a name for later sums.

    In order: `tap_in` names the stream as it comes; gate nets `nets` look at it; it becomes the sum `join`, then the
    sum `entry`, which may weigh again what joined (an empty sum changes nothing); the mixer sees the norm of `reads`;
    the stream becomes `after_mixer`, then `after_mlp`, where there is a mixer and an MLP.
    """

    mixer: AttnSpec | None
    mlp: MLPSpec | None
    tap: str | None = None
    tap_in: str | None = None
    nets: tuple[str, ...] = ()
    join: tuple[Term, ...] = ()
    entry: tuple[Term, ...] = ()
    reads: str = "x"
    after_mixer: tuple[Term, ...] = (Term(source="x"), Term(source="mixer"))
    after_mlp: tuple[Term, ...] = (Term(source="x"), Term(source="mlp"))


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864).

    `base` is the ratio of the fastest to the slowest frequency; `fraction` the share of the frequencies that rotate,
    the rest standing still (half-truncated rotary: 0.5). `pairs` says which dimensions turn together: i and i + K/2, or
    neighbours. With `yarn`, frequencies and the softmax scale follow the long window (Peng et al. 2023,
    arXiv:2309.00071).
    """

    base: float = 10_000.0
    fraction: float = 1.0
    pairs: Literal["halves", "neighbours"] = "halves"
    yarn: bool = False


@dataclass(frozen=True, kw_only=True)
class SoftcapSpec:
    """Keeps logits in a range: `cap * tanh(z / cap)`, or `cap * sigmoid((z + shift) / width)`."""

    kind: Literal["tanh", "sigmoid"] = "tanh"
    cap: float = 30.0
    shift: float = 0.0
    width: float = 7.5


@dataclass(frozen=True, kw_only=True)
class NgramSpec:
    """Tables of learned vectors for the last n tokens, n in `orders`, added to the token embedding.

    A table has a row for every combination of tokens where those fit into `rows`, else `rows` of them share by hash.
    """

    orders: tuple[int, ...] = (2, 3, 4, 5, 6)
    rows: int = 2**16  # of each table, a power of two


@dataclass(frozen=True, kw_only=True)
class SmearSpec:
    """A share of the token before is added to each raw embedding (speedrun record #34)."""

    gate: Gate
    weight: Scalar


@dataclass(frozen=True, kw_only=True)
class BigramSpec:
    """A hashed table of rows for pairs of tokens, the source "bigram" (speedrun records #62, #83, #85).

    With `signs`, a frozen table of that many rows of random signs, chosen by another hash, multiplies the rows. Orders
    beyond 2 add a row for the last n tokens each, from `longer_rows` of their own in the same table.
    """

    rows: int
    signs: int = 0
    orders: tuple[int, ...] = (2,)  # numbers of tokens, ascending from 2
    longer_rows: int = 0  # for each order beyond 2

    @property
    def size(self) -> int:
        """Rows of the whole table."""
        return self.rows + self.longer_rows * (len(self.orders) - 1)

    def validate(self) -> None:
        """Raise ValueError naming the first setting that cannot work and what would."""
        if self.rows < 2 or self.signs < 0:
            raise ValueError(f"model.bigram: rows={self.rows} must be at least 2, signs={self.signs} at least 0")
        if self.orders[:1] != (2,) or any(b <= a for a, b in pairwise(self.orders)):
            raise ValueError(
                f"model.bigram.orders={list(self.orders)}: expected numbers of tokens that ascend from 2, as in [2, 3]"
            )
        if len(self.orders) > 1 and self.longer_rows < 2:
            raise ValueError(
                f"model.bigram.longer_rows={self.longer_rows}: orders {list(self.orders[1:])} want 2 rows or more "
                f"each, for example {self.rows}"
            )
        if len(self.orders) == 1 and self.longer_rows:
            raise ValueError(
                f"model.bigram.longer_rows={self.longer_rows}, but orders={list(self.orders)} has none beyond 2: set "
                "it to 0, or orders to [2, 3]"
            )
        if self.size >= 2**31:
            raise ValueError(f"model.bigram has {self.size} rows: fewer than 2^31 can be addressed")


@dataclass(frozen=True, kw_only=True)
class InitSpec:
    """Initial values. `linear` "normal" uses `linear_std`; "fan_in" is uniform with sd `linear_std / sqrt(fan_in)`.

    `mlp_projection="as_up"` gives the matrix that leaves an MLP the distribution of the one that enters it, so that its
    sd goes by the model's width and not by the hidden units: 0.5 / sqrt(dim) with linear_std=0.5. Part of
    modded-nanogpt, pull request 347. Other matrices then get other random numbers of the same distributions.
    """

    linear: Literal["normal", "fan_in"] = "fan_in"
    linear_std: float = 3**-0.5  # of PyTorch's default uniform(+-1/sqrt(fan_in))
    embed_std: float = 1.0
    head: Literal["zero", "as_linear", "normal"] = "zero"
    projections: Literal["zero", "scaled", "as_linear"] = "zero"  # "scaled": linear_std / sqrt(2 * num_layers)
    qkv_std: float | None = None  # of attention's other matrices; None: linear_std
    attn_projection: Literal["zero", "scaled", "as_linear"] | None = None  # None: as the other projections
    mlp_projection: Literal["zero", "scaled", "as_linear", "as_up"] | None = None  # likewise
    value_table_std: float | None = None  # None: embed_std
    head_std: float | None = None  # for head="normal"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT. See the field comments; the recipes show complete values."""

    vocab_size: int  # columns of the softmax; ids the tokenizer does not know are never sampled
    dim: int
    num_heads: int
    seq_len: int  # longest context in training, in tokens
    layers: tuple[LayerSpec, ...]
    positions: Literal["learned", "rotary", "none"] = "rotary"
    rotary: RotarySpec = RotarySpec()
    norm: Literal["layernorm", "rms"] = "rms"  # layernorm has gain and, with `bias`, a bias; rms has neither
    norm_eps: float | None = None  # None: the machine epsilon of fp32
    bias: bool = False
    qk_norm: bool = True
    attn_scale: float | None = None  # None: 1 / sqrt(head_dim)
    tied_head: bool = False
    embed_norm: bool = True
    value_tables: int = 0
    nets: tuple[GateNetSpec, ...] = ()  # of which `input_nets` look at x0 and `output_nets` at the last stream
    input_nets: tuple[str, ...] = ()
    output_nets: tuple[str, ...] = ()
    input: tuple[Term, ...] = (Term(source="x0"),)  # the stream that enters the first layer
    output: tuple[Term, ...] = (Term(source="x"),)  # the stream that the last norm sees
    smear: SmearSpec | None = None
    bigram: BigramSpec | None = None
    head_copy: bool = False  # the embedding is a tensor of its own, but equal to the head until the schedule's split
    head_layout: Literal["out_in", "in_out"] = "out_in"
    ngrams: NgramSpec | None = None
    document_start: int | None = None  # the token that starts a document; attention then stays within documents
    softcap: SoftcapSpec | None = None
    init: InitSpec = InitSpec()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def attention(self) -> tuple[tuple[int, AttnSpec], ...]:
        """Number and mixer of each layer that attends; a layer may have no mixer, or one of another kind."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return tuple((i, mixer) for i, mixer in mixers if isinstance(mixer, AttnSpec))

    @property
    def history(self) -> int:
        """How many tokens before a row the model looks at besides the row itself."""
        return 0 if self.ngrams is None else max(self.ngrams.orders) - 1

    def validate(self) -> None:
        """Raise ValueError naming the first setting that cannot work and what would."""
        _require_positive(self, "vocab_size", "dim", "num_heads", "seq_len")
        if not self.layers:
            raise ValueError("model.layers is empty: a model needs at least one layer (model.num_layers >= 1)")
        if self.dim % self.num_heads:
            fits = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            nearest = min(fits, key=lambda h: abs(h - self.num_heads))
            raise ValueError(
                f"model.dim={self.dim} is not divisible by model.num_heads={self.num_heads}: try {nearest} heads"
            )
        if self.positions == "rotary" and self.head_dim % 4:
            raise ValueError(
                f"rotary positions need a head size divisible by 4, not {self.head_dim} "
                f"(model.dim={self.dim} / model.num_heads={self.num_heads})"
            )
        if not 0 < self.rotary.fraction <= 1 or self.rotary.base <= 1:
            raise ValueError(
                f"model.rotary: fraction={self.rotary.fraction} must lie above 0 and at most at 1, "
                f"base={self.rotary.base} above 1"
            )
        if self.positions != "rotary" and self.rotary != RotarySpec():
            raise ValueError(
                f"model.rotary is set, but model.positions={self.positions} has no use for it: set "
                "model.positions=rotary, or model.rotary={}"
            )
        if (
            self.softcap is not None
            and self.softcap.kind == "tanh"
            and replace(self.softcap, cap=30.0) != SoftcapSpec()
        ):
            raise ValueError("model.softcap.kind=tanh has no shift and no width: set kind=sigmoid, or leave them out")
        if self.tied_head and self.init.head == "zero":
            raise ValueError("model.tied_head with model.init.head=zero would zero the embedding: use as_linear")
        if self.ngrams is not None:
            orders, rows = self.ngrams.orders, self.ngrams.rows
            if not orders or min(orders) < 2 or len(set(orders)) < len(orders):
                raise ValueError(f"model.ngrams.orders={list(orders)}: expected different numbers of tokens, 2 or more")
            if rows < 2 or rows & (rows - 1):
                raise ValueError(
                    f"model.ngrams.rows={rows} is not a power of two: try {2 ** max(1, rows.bit_length())}"
                )
        if self.document_start is not None and not 0 <= self.document_start < self.vocab_size:
            raise ValueError(
                f"model.document_start={self.document_start} is no token of model.vocab_size={self.vocab_size}: set it "
                "to the id that starts a document, or to none"
            )
        self._validate_tables()
        self._validate_heads()
        validate_wiring(self)

    @property
    def steps_with_cache(self) -> bool:
        """Whether one more token can be had from the keys and values of those before, without reading them again."""
        return self.smear is None and self.bigram is None

    def _validate_tables(self) -> None:
        """Token tables besides the embedding, and what the embedding shares with the head."""
        if self.value_tables and self.tied_head:
            raise ValueError("model.value_tables wants an embedding with a rate of its own: set model.tied_head=false")
        if self.head_copy and (self.tied_head or self.init.head == "zero"):
            raise ValueError(
                f"model.head_copy with model.tied_head={self.tied_head} and model.init.head={self.init.head}: it wants "
                "a head of its own that does not start at zero; set tied_head=false and init.head=normal"
            )
        if self.init.head == "normal" and self.init.head_std is None:
            raise ValueError("model.init.head=normal does not say how wide: set model.init.head_std, for example 0.005")
        if self.init.head != "normal" and self.init.head_std is not None:
            raise ValueError(
                f"model.init.head_std={self.init.head_std} is for head=normal, not {self.init.head}: set "
                "model.init.head_std=none"
            )
        if self.tied_head and self.head_layout == "in_out":
            raise ValueError(
                "model.head_layout=in_out with model.tied_head: an embedding is stored row by row; set "
                "model.head_layout=out_in, or model.head_copy=true in place of model.tied_head"
            )
        if self.bias and any(layer.mlp is not None and layer.mlp.down_layout == "in_out" for layer in self.layers):
            raise ValueError("model.bias=true is for mlp.down_layout=out_in: set model.bias=false")
        if self.bigram is not None:
            self.bigram.validate()

    def _validate_heads(self) -> None:
        """What layers' mixers ask of heads."""
        for number, (i, mixer) in enumerate(self.attention):
            place = f"model.layers.{i}.mixer"
            if number == 0 and mixer.value_residual:
                raise ValueError(f"{place}.value_residual: the first attention has no earlier values to mix in")
            if mixer.paired and self.num_heads % 2:
                raise ValueError(f"{place}.paired takes heads by twos, model.num_heads={self.num_heads} is odd")
            if mixer.paired and self.positions == "rotary" and self.rotary.pairs != "neighbours":
                raise ValueError(f"{place}.paired wants model.rotary.pairs=neighbours, not {self.rotary.pairs}")
            if mixer.compose is not None and mixer.compose.window < 1:
                raise ValueError(f"{place}.compose.window={mixer.compose.window} counts the token itself: at least 1")
            if mixer.paired and (mixer.xsa or mixer.key_offset or mixer.compose):
                raise ValueError(f"{place}.paired has no place for xsa, key_offset or compose: set one or the other")
            for start, stop in mixer.key_offset:
                if not 0 <= start < stop <= self.head_dim:
                    raise ValueError(
                        f"{place}.key_offset holds ({start}, {stop}): ranges lie within the {self.head_dim} dimensions "
                        "of a head"
                    )


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"model.{name}={value} must be at least 1")
