"""How a model's tensors are added up: a sum of named sources, each with a fixed, learned or computed weight.

Nearly every residual idea of the speedrun is such a sum: x0 and U-net skips, residual and post lambdas, backout, value
tables, bigram injection, MUDD connections. A recipe writes the sums down; `model/mixing.py` builds them.

Sources that a sum may name, where they exist: "x" the residual stream, "x0" the normed embedding, "bigram" the hashed
pair's row, "table0", "table1", ... a value table's rows, any tap that a layer before it wrote; after a mixer or MLP
"mixer" and "mlp", their output; among an attention layer's values "v", its own projection; and for gates "n", the
normed input of the mixer, and "e", the raw token embedding.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A constant."""

    value: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """One learned number of role `scalar.<role>`, that starts at `init`; with `sigmoid` it is squashed before use."""

    init: float
    role: str
    sigmoid: bool = False


@dataclass(frozen=True, kw_only=True)
class Column:
    """Numbers per token, outputs of the gate net `net` that start at `init`.

    As many as the place wants (heads, or one); `width` asks for fewer, each repeated for neighbours.
    """

    net: str
    init: float = 0.0
    width: int | None = None


@dataclass(frozen=True, kw_only=True)
class Read:
    """The first `dims` components of a source."""

    source: str
    dims: int


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`scale * sigmoid(w · reads)` per token, per head where heads want one; w (role `gate.<role>`) starts at zero."""

    reads: tuple[Read, ...]
    role: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Product:
    """The product of its factors."""

    factors: tuple[Fixed | Scalar | Column | Gate, ...]


Weight = Fixed | Scalar | Column | Gate | Product


@dataclass(frozen=True, kw_only=True)
class Term:
    """`weight * source` in a sum."""

    source: str
    weight: Weight = Fixed()


@dataclass(frozen=True, kw_only=True)
class GateNetSpec:
    """A small net that computes columns: `scale * (W2 gelu(W1 u) + b)` (Xiao et al. 2025, arXiv:2502.12170).

    W2 starts at zero and b at what the columns' users ask for, divided by `scale`. A `shared_scale` is a learned number
    that starts at `scale`, one for all nets that name the same. Roles: net.<name>.w1, .w2, .bias; net.<shared_scale>.
    """

    name: str
    hidden: int = 64
    scale: float = 0.1
    shared_scale: str | None = None
