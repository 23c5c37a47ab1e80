"""Sums of sources with weights, as `config/wiring.py` describes them, and the columns of gate nets that weigh them.

A forward pass keeps a dict of sources, (B, S, D) tensors by name, and a dict of `Columns`, one for each gate net that
has been evaluated. Whatever adds up or scales asks both by name:

    weight = build_weight(spec, layouts, width)        # when the model is built
    value = weight(sources, columns)                   # a float, 0-D, or (B, S, width)

Columns are handed out while the model is built: `NetLayouts.request` notes how many numbers a place wants and where
they start, and the nets, built last, get as many outputs as were asked for.

Sums of this kind among the speedrun's records: x <- a x + b x0 at a layer's entry (#9); x <- x + s down_i from a layer
of the first half (#11, after the U-net, Ronneberger et al. 2015, arXiv:1505.04597); x - b x_middle before the last
norm (#40, "backout"); learned scales of stream and sub-layer; and with computed weights MUDD (#81).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import mul
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanosprint.config.wiring import Column, Fixed, Gate, GateNetSpec, Product, Scalar, Term, Weight
from nanosprint.model.linear import linear
from nanosprint.model.roles import Role

Sources = Mapping[str, Tensor]


class Request(NamedTuple):
    """Columns that a place was given: part number `part` of the outputs of `net`, wanted `width` wide."""

    net: str
    part: int
    width: int


class Columns:
    """Outputs of a gate net for every token, in the parts that were asked for."""

    def __init__(self, outputs_BSC: Tensor, sizes: Sequence[int]) -> None:
        # One split, whose gradient is one concatenation; a slice each would add up as many padded tensors.
        self._parts = outputs_BSC.split(list(sizes), dim=-1)

    def take(self, request: Request) -> Tensor:
        """(B, S, width); fewer columns than that are repeated, each for as many neighbours."""
        part = self._parts[request.part]
        times = request.width // part.size(-1)
        return part if times == 1 else part.unsqueeze(-1).expand(*part.shape, times).flatten(-2)


class NetLayouts:
    """Which columns of which gate net were asked for, in order, and where they start."""

    def __init__(self, specs: Iterable[GateNetSpec]) -> None:
        self._sizes: dict[str, list[int]] = {spec.name: [] for spec in specs}
        self._inits: dict[str, list[float]] = {name: [] for name in self._sizes}

    def request(self, column: Column, width: int) -> Request:
        """Columns for a place that wants `width` numbers per token."""
        size = width if column.width is None else column.width
        assert width % size == 0, "the model's configuration was validated"
        self._sizes[column.net].append(size)
        self._inits[column.net] += [column.init] * size
        return Request(column.net, len(self._sizes[column.net]) - 1, width)

    def sizes(self, net: str) -> tuple[int, ...]:
        """How many columns each request got, in the order of requests."""
        return tuple(self._sizes[net])

    def inits(self, net: str) -> tuple[float, ...]:
        """Where each column starts."""
        return tuple(self._inits[net])


class FixedWeight(nn.Module):
    """A constant, as a float, so that 1 costs nothing."""

    def __init__(self, spec: Fixed) -> None:
        super().__init__()
        self.value = spec.value

    def forward(self, sources: Sources, columns: Mapping[str, Columns]) -> float:
        return self.value


class ScalarWeight(nn.Module):
    """One learned number, 0-D: it takes part in products in its own precision and leaves their dtype alone."""

    def __init__(self, spec: Scalar) -> None:
        super().__init__()
        self.ROLES = {"value": Role(f"scalar.{spec.role}")}
        self.sigmoid = spec.sigmoid
        self.value = nn.Parameter(torch.tensor(float(spec.init)))

    def forward(self, sources: Sources, columns: Mapping[str, Columns]) -> Tensor:
        return self.value.sigmoid() if self.sigmoid else self.value


class ColumnWeight(nn.Module):
    """(B, S, width) from a gate net that was evaluated before."""

    def __init__(self, spec: Column, layouts: NetLayouts, width: int) -> None:
        super().__init__()
        self.request = layouts.request(spec, width)

    def forward(self, sources: Sources, columns: Mapping[str, Columns]) -> Tensor:
        return columns[self.request.net].take(self.request)


class GateWeight(nn.Module):
    """(B, S, width) from a few components of some sources; half of `scale` at first, since the weights are zero."""

    def __init__(self, spec: Gate, width: int) -> None:
        super().__init__()
        self.ROLES = {"weight": Role(f"gate.{spec.role}")}
        self.spec = spec
        self.weight = nn.Parameter(torch.zeros(width, sum(read.dims for read in spec.reads)))

    def forward(self, sources: Sources, columns: Mapping[str, Columns]) -> Tensor:
        reads = [sources[read.source][..., : read.dims] for read in self.spec.reads]
        return self.spec.scale * linear(reads[0] if len(reads) == 1 else torch.cat(reads, -1), self.weight).sigmoid()


class ProductWeight(nn.Module):
    """The product of its factors."""

    def __init__(self, spec: Product, layouts: NetLayouts, width: int) -> None:
        super().__init__()
        self.factors = nn.ModuleList(build_weight(factor, layouts, width) for factor in spec.factors)

    def forward(self, sources: Sources, columns: Mapping[str, Columns]) -> Tensor | float:
        values: list[Tensor | float] = [factor(sources, columns) for factor in self.factors]
        return reduce(mul, values)


def build_weight(weight: Weight, layouts: NetLayouts, width: int = 1) -> nn.Module:
    """The module of a weight, called as `module(sources, columns)`.

    It returns a float (Fixed), a 0-D tensor (Scalar), or (B, S, width); `width` is how many numbers per token the place
    wants, for instance the heads.
    """
    if isinstance(weight, Fixed):
        return FixedWeight(weight)
    if isinstance(weight, Scalar):
        return ScalarWeight(weight)
    if isinstance(weight, Column):
        return ColumnWeight(weight, layouts, width)
    if isinstance(weight, Gate):
        return GateWeight(weight, width)
    return ProductWeight(weight, layouts, width)


def scaled(weight: Tensor | float, source_BSD: Tensor, width: int = 1) -> Tensor:
    """A weight of `build_weight` times a source; `width` equal parts of D have a number each. The shape is kept."""
    if isinstance(weight, float):
        return source_BSD if weight == 1 else weight * source_BSD
    if width == 1 or weight.ndim == 0:
        return weight * source_BSD
    return (weight.unsqueeze(-1) * source_BSD.unflatten(-1, (width, -1))).flatten(-2)


class Maker(Protocol):
    """What makes a source by a product at its end, as mixers and MLPs do."""

    def multiply_output_by(self, number: ScalarWeight) -> None:
        """From now on multiply what comes out by a learned number, which is another module's parameter."""
        ...


class Mixture(nn.Module):
    """The sum of `weight * source` over the terms of a recipe, (B, S, D). A term of weight 1 is the source itself.

    Where whoever makes a source multiplies it, too (`hand_over`), the sum adds it as it comes.
    """

    def __init__(self, terms: Sequence[Term], layouts: NetLayouts, width: int = 1) -> None:
        super().__init__()
        assert terms, "a sum without terms has no shape"
        self.names, self.width = [term.source for term in terms], width
        self._handed_over: set[str] = set()
        self.weights = nn.ModuleList(build_weight(term.weight, layouts, width) for term in terms)

    def forward(self, sources: Sources, columns: Mapping[str, Columns]) -> Tensor:
        parts = [
            sources[name] if name in self._handed_over else scaled(weight(sources, columns), sources[name], self.width)
            for name, weight in zip(self.names, self.weights, strict=True)
        ]
        return reduce(torch.add, parts)

    def hand_over(self, source: str) -> ScalarWeight | None:
        """The one learned number that multiplies `source`: from now on an affair of whoever makes the source.

        None, and nothing changes, where the weight is another or the sum names the source more than once. The number
        stays a parameter of the sum.
        """
        weights = [weight for name, weight in zip(self.names, self.weights, strict=True) if name == source]
        if len(weights) != 1 or not isinstance(weights[0], ScalarWeight):
            return None
        self._handed_over.add(source)
        return weights[0]
