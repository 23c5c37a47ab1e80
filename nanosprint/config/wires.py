"""Whether a model's sums can be had: every source written, every gate net evaluated, before it is used.

The check walks the forward pass in order and remembers what exists by then, as `model/gpt.py` will.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanosprint.config.wiring import Column, Gate, Product, Term, Weight

if TYPE_CHECKING:
    from nanosprint.config.model import AttnSpec, LayerSpec, ModelConfig

OWN_NAMES = {"x", "x0", "n", "e", "v", "mixer", "mlp", "bigram"}  # sources that no tap may be called


def validate_wiring(config: "ModelConfig") -> None:
    """Raise ValueError naming the first sum, tap or gate net of a `ModelConfig` that cannot work, and what would."""
    _Walk(config).run()


class _Walk:
    """The forward pass with names in place of tensors."""

    def __init__(self, config: "ModelConfig") -> None:
        self.config = config
        self.sources = {"x0", *(f"table{i}" for i in range(config.value_tables))}
        if config.bigram is not None:
            self.sources.add("bigram")
        self.declared = [net.name for net in config.nets]
        self.evaluated: list[str] = []
        self.used: set[str] = set()  # gate nets
        self.read: set[str] = set()  # sources

    def run(self) -> None:
        config = self.config
        self.declare()
        if config.smear is not None:
            self.weight(config.smear.gate, "model.smear.gate", 1, {"e"})
        self.evaluate(config.input_nets, "model.input_nets")
        self.sum(config.input, "model.input", self.sources)
        self.sources.add("x")
        attention = dict(config.attention)
        for i, layer in enumerate(config.layers):
            self.layer(layer, attention.get(i), f"model.layers.{i}")
        self.evaluate(config.output_nets, "model.output_nets")
        self.sum(config.output, "model.output", self.sources)
        for name in self.declared:
            if name not in self.used:
                raise ValueError(f"model.nets has {name!r}, but no weight takes a column of it: remove it")
        self.tables()

    def tables(self) -> None:
        """Refuse token tables that nothing reads: they would be trained by nothing."""
        config = self.config
        for i in range(config.value_tables):
            if f"table{i}" not in self.read:
                raise ValueError(
                    f"model.value_tables={config.value_tables}, but no sum reads 'table{i}': name it in "
                    "model.layers.N.mixer.values, or have fewer tables"
                )
        if config.bigram is not None and "bigram" not in self.read:
            raise ValueError(
                "model.bigram is set, but no sum reads 'bigram': name it in model.input or in a sum of a layer, or set "
                "model.bigram=none"
            )

    def declare(self) -> None:
        for net in self.config.nets:
            if not net.name.isidentifier() or self.declared.count(net.name) > 1 or net.hidden < 1 or net.scale == 0:
                raise ValueError(
                    f"model.nets: {net} wants a name of its own, of letters and digits, hidden >= 1 and a scale"
                )
            shared = {other.scale for other in self.config.nets if other.shared_scale == net.shared_scale}
            if net.shared_scale is not None and len(shared) > 1:
                raise ValueError(f"model.nets share {net.shared_scale!r}, but start at {sorted(shared)}: use one scale")

    def layer(self, layer: "LayerSpec", attention: "AttnSpec | None", place: str) -> None:
        self.write(layer.tap_in, place)
        self.evaluate(layer.nets, f"{place}.nets")
        if layer.join:
            self.sum(layer.join, f"{place}.join", self.sources)
        if layer.entry:
            self.sum(layer.entry, f"{place}.entry", self.sources)
        if layer.mixer is not None:
            self.source(layer.reads, f"{place}.reads", self.sources)
            if attention is not None:
                self.mixer(attention, f"{place}.mixer")
            self.sum(layer.after_mixer, f"{place}.after_mixer", self.sources | {"n", "mixer"})
        if layer.mlp is not None:
            self.sum(layer.after_mlp, f"{place}.after_mlp", self.sources | {"mlp"})
        self.write(layer.tap, place)

    def mixer(self, mixer: "AttnSpec", place: str) -> None:
        heads, known = self.config.num_heads, self.sources | {"n"}
        self.sum(mixer.values, f"{place}.values", known | {"v"}, heads)
        weights: list[tuple[str, Weight | None]] = [("xsa", mixer.xsa), ("head_gate", mixer.head_gate)]
        if mixer.compose is not None:
            weights += [("compose.mix", mixer.compose.mix), ("compose.add", mixer.compose.add)]
        for name, weight in weights:
            if weight is not None:
                self.weight(weight, f"{place}.{name}", heads, known)

    def write(self, tap: str | None, place: str) -> None:
        if tap is None:
            return
        if tap in OWN_NAMES or tap.startswith("table"):
            raise ValueError(f"{place} calls a tap {tap!r}, the name of another source: choose a different one")
        if tap in self.sources:
            raise ValueError(f"{place} writes tap {tap!r}, which was already written: choose a different name")
        self.sources.add(tap)

    def evaluate(self, names: Iterable[str], place: str) -> None:
        for name in names:
            self.net(name, place, self.declared)
            if name in self.evaluated:
                raise ValueError(f"{place} evaluates gate net {name!r} a second time: once is all it may be")
            self.evaluated.append(name)

    def net(self, name: str, place: str, known: list[str]) -> None:
        if name in known:
            return
        if name in self.declared:
            raise ValueError(
                f"{place} takes columns of gate net {name!r}, which nothing has evaluated by then: name it in "
                "model.input_nets, or in the nets of this or an earlier layer"
            )
        raise ValueError(f"{place} names gate net {name!r}, which model.nets does not have (it has {self.declared})")

    def sum(self, terms: tuple[Term, ...], place: str, known: set[str], width: int = 1) -> None:
        if not terms:
            raise ValueError(f"{place} is an empty sum: give at least one term")
        for i, term in enumerate(terms):
            self.source(term.source, f"{place}.{i}", known)
            self.weight(term.weight, f"{place}.{i}.weight", width, known)

    def source(self, name: str, place: str, known: set[str]) -> None:
        if name in known:
            self.read.add(name)
            return
        if name == "bigram":
            remedy = "set model.bigram"
        elif name.startswith("table") and name[5:].isdigit():
            remedy = f"model.value_tables={self.config.value_tables}, and tables count from 0"
        else:
            remedy = f"by then there are {', '.join(sorted(known))}"
        raise ValueError(f"{place} reads source {name!r} before anything writes it: {remedy}")

    def weight(self, weight: Weight, place: str, width: int, known: set[str]) -> None:
        if isinstance(weight, Product):
            if not weight.factors:
                raise ValueError(f"{place} is an empty product: give at least one factor")
            for factor in weight.factors:
                self.weight(factor, place, width, known)
        elif isinstance(weight, Column):
            self.net(weight.net, place, self.evaluated)
            self.used.add(weight.net)
            if weight.width is not None and (weight.width < 1 or width % weight.width):
                raise ValueError(f"{place}.width={weight.width} does not divide the {width} numbers that are wanted")
        elif isinstance(weight, Gate):
            for read in weight.reads:
                self.source(read.source, place, known)
                if not 1 <= read.dims <= self.config.dim:
                    raise ValueError(f"{place} reads {read.dims} dimensions of model.dim={self.config.dim}")
            if not weight.reads:
                raise ValueError(f"{place}.reads is empty: a gate looks at one source at least")
