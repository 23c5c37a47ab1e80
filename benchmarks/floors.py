"""How long a training step must take at least, by kernel group: arithmetic at the matrix rate, bytes at a copy's.

A floor is the larger of two times, for each kernel that the work is at least divided into: its floating-point
operations at the rate of its number format, and its operands, each read or written once, at the bandwidth of a copy.
Everything follows from the model and the plan; tokens and documents are those of the inputs given. Groups are those of
`training/profile.py`, so that a table can show both. Three things to know when reading the ratio of the two:

- Products move between groups as kernels get fused, so the MLP's floor is split as the record splits it: "fused MLP"
  has x W_up^T and g W_down^T, with all that a fused kernel does besides; the others are "fp8 products" (down) and "bf16
  products" (its gradients). `PRODUCTS` sums all three, and does not depend on the split.
- "elementwise" is no law: it counts the passes over the stream that are left when all is fused that lies between two
  products. `stream_passes` says which.
- "optimizer" includes Muon's products, which run as cuBLAS kernels where ours have no shape for them.

T tokens of a step, D width, V vocabulary. Sizes in elements, 2 bytes each in bf16 and 1 in FP8.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from nanosprint.config.groups import AdamConfig, MuonConfig, ParamGroup, match_group
from nanosprint.config.model import AttnSpec, LayerSpec
from nanosprint.config.recipe import Recipe
from nanosprint.config.schedule import StepPlan
from nanosprint.model.roles import Role, collect_roles
from nanosprint.model.techniques.paired_heads import doubled
from nanosprint.ops.attention_backends.contract import Documents
from nanosprint.optim.muon import matrix_shape
from nanosprint.training.batch import ModelInput

PRODUCTS = ("bf16 products", "fp8 products", "fused MLP")
POLAR_STEPS = 5  # iterations of either orthogonaliser
BYTES = {"fp32": 4, "bf16": 2, "bf16+16": 2}  # of a weight and its gradient, by `ParamGroup.storage`


@dataclass(frozen=True)
class Ceilings:
    """The best that a device was seen to do: FLOP/s of products by format, bytes/s of a copy, read and written."""

    bf16: float
    fp8: float
    copy: float

    def bytes_ms(self, count: float) -> float:
        """Milliseconds to move so many bytes."""
        return 1e3 * count / self.copy

    def least_ms(self, flops: float, nbytes: float, precision: str = "bf16") -> float:
        """The larger of two times: of so many operations, and of so many bytes."""
        return max(1e3 * flops / getattr(self, precision), self.bytes_ms(nbytes))

    def product_ms(self, m: int, n: int, k: int, precision: str) -> float:
        """(m, k) times (k, n), its result in bf16."""
        size = 1 if precision == "fp8" else 2
        return self.least_ms(2 * m * n * k, size * (m * k + k * n) + 2 * m * n, precision)


# By a part of the device's name. H200: products inside the published step of the record, a copy by itself.
CEILINGS = {"H200": Ceilings(bf16=790e12, fp8=1500e12, copy=4.24e12)}


def ceilings_of(device_name: str) -> Ceilings | None:
    """Those known for a device; None where nobody has measured them."""
    return next((found for part, found in CEILINGS.items() if part in device_name), None)


def visible_pairs(rows: int, seq_len: int, window: int | None, documents: Documents | None) -> int:
    """Sum over tokens of the keys each sees, from the actual documents."""
    lengths = [seq_len] * rows if documents is None else documents.cu_seqlens.diff().tolist()
    reach = seq_len if window is None else window + 1

    def pairs(length: int) -> int:
        ramp = min(length, reach)
        return ramp * (ramp + 1) // 2 + (length - ramp) * reach

    return sum(map(pairs, lengths))


@dataclass(frozen=True)
class Step:
    """A step of a recipe. `model` may be on the meta device: only its shapes count, so that nothing is forgotten.

    inputs: all its micro-batches, for the ends of documents. fp8: whether what the recipe has in FP8 is in FP8.
    """

    recipe: Recipe
    plan: StepPlan
    model: nn.Module
    inputs: Sequence[ModelInput]
    fp8: bool = True

    @property
    def tokens(self) -> int:
        return sum(given.targets.numel() for given in self.inputs)

    @property
    def fp8_head(self) -> bool:
        return self.fp8 and self.recipe.precision.fp8_head is not None

    @property
    def fp8_mlp(self) -> bool:
        return self.fp8 and self.recipe.precision.fp8_mlp is not None

    @cached_property
    def parameters(self) -> list[tuple[Role, tuple[int, ...], ParamGroup]]:
        """Role, shape and group of every parameter."""
        roles, groups = collect_roles(self.model), self.recipe.groups
        named = self.model.named_parameters()
        return [(roles[name], tuple(p.shape), match_group(roles[name].name, groups)) for name, p in named]

    def shapes(self, *roles: str) -> list[tuple[int, ...]]:
        """Shapes of the matrices whose role is one of those or below it."""
        below = tuple(f"{role}." for role in roles)
        return [shape for role, shape, _ in self.parameters if len(shape) == 2 and f"{role.name}.".startswith(below)]

    @property
    def mixers(self) -> list[AttnSpec]:
        return [layer.mixer for layer in self.recipe.model.layers if layer.mixer is not None]

    def visible_pairs(self, mixer: AttnSpec) -> int:
        """Pairs of query and key of a layer, each head's own counted once for `num_heads` heads."""
        window, pairs = None if mixer.window == "full" else getattr(self.plan.windows, mixer.window), 0
        for given in self.inputs:
            rows, seq_len = given.targets.shape
            documents = given.context.documents
            if mixer.paired:  # half the heads, over twice the length
                pairs += visible_pairs(rows, 2 * seq_len, window, doubled(documents)) // 2
            else:
                pairs += visible_pairs(rows, seq_len, window, documents)
        return pairs


def floors_ms(step: Step, ceilings: Ceilings) -> dict[str, float]:
    """Milliseconds by kernel group, of those groups that the step has."""
    floors = {
        "bf16 products": bf16_products(step, ceilings),
        "fp8 products": fp8_products(step, ceilings),
        "fused MLP": fused_mlp(step, ceilings),
        "attention": attention(step, ceilings),
        "composed attention": composed_attention(step, ceilings),
        "softmax and loss": loss(step, ceilings),
        "copies and transposes": head_transpose(step, ceilings) + quantise(step, ceilings),
        "elementwise": elementwise(step, ceilings),
        "embedding": embedding(step, ceilings),
        "optimizer": optimizer(step, ceilings),
    }
    return {group: ms for group, ms in floors.items() if ms > 0}


def bf16_products(step: Step, ceilings: Ceilings) -> float:
    """Of every matrix, y = x W^T, dx = dy W and dW = dy^T x, but for those that other groups have."""
    return (
        projections(step, ceilings)
        + three_products(step, step.shapes("net"), "bf16", ceilings)
        + mlp_products(step, ceilings)["bf16"]
        + head_products(step, ceilings)["bf16"]
    )


def fp8_products(step: Step, ceilings: Ceilings) -> float:
    """The head's three and the MLP's y = post W_down, where the recipe has them in FP8."""
    return mlp_products(step, ceilings)["fp8"] + head_products(step, ceilings)["fp8"]


def fused_mlp(step: Step, ceilings: Ceilings) -> float:
    """post = relu(x W_up^T)^2 in FP8 and dpre = 2 sqrt(post) (g W_down^T) in bf16: two products of 2 T D F each."""
    return mlp_products(step, ceilings)["fused"]


def projections(step: Step, ceilings: Ceilings) -> float:
    """Q, K, V and O, forward and both gradients: 3 products of 2 T D 4D a layer."""
    mlp = ("matrix.mlp_up", "matrix.mlp_down")
    names = sorted({role.name for role, _, _ in step.parameters if role.name.startswith("matrix.")} - {*mlp})
    return three_products(step, step.shapes(*names), "bf16", ceilings)


def three_products(step: Step, shapes: list[tuple[int, ...]], precision: str, ceilings: Ceilings) -> float:
    """Output, gradient of the input, gradient of the weight."""
    return 3 * sum(ceilings.product_ms(step.tokens, *shape, precision) for shape in shapes)


def mlp_products(step: Step, ceilings: Ceilings) -> dict[str, float]:
    """Six a layer, in FP8 where the recipe says so: up and down forward; dpre and dx, dW_up and dW_down backward."""
    found = {"bf16": 0.0, "fp8": 0.0, "fused": 0.0}
    spec = step.recipe.precision.fp8_mlp
    for shape in step.shapes("matrix.mlp_up"):
        in_bf16, in_fp8 = (ceilings.product_ms(step.tokens, *shape, precision) for precision in ("bf16", "fp8"))
        if spec is None or not step.fp8_mlp:
            found["bf16"] += 6 * in_bf16
            continue
        found["fused"] += in_fp8 + (in_fp8 if spec.backward else in_bf16)
        others_in_fp8 = spec.down + spec.backward + 2 * spec.weights
        found["bf16"] += (4 - others_in_fp8) * in_bf16
        found["fp8"] += others_in_fp8 * in_fp8
    return found


def head_products(step: Step, ceilings: Ceilings) -> dict[str, float]:
    """Logits, dx and dW: 3 products of 2 T D V."""
    precision, model = "fp8" if step.fp8_head else "bf16", step.recipe.model
    ms = three_products(step, [(model.vocab_size, model.dim)], precision, ceilings)
    return {"bf16": 0.0, "fp8": 0.0, precision: ms}


def attention(step: Step, ceilings: Ceilings) -> float:
    """4 D operations forward for every visible pair of query and key, 2.5 times that backward.

    Bytes: q, k, v and the output, T D each; backward the same four with their gradients.
    """
    dim, ms = step.recipe.model.dim, 0.0
    for mixer in step.mixers:
        flops = 4 * dim * step.visible_pairs(mixer)
        for times, tensors in ((1.0, 4), (2.5, 8)):
            ms += max(1e3 * times * flops / ceilings.bf16, ceilings.bytes_ms(2 * tensors * step.tokens * dim))
    return ms


def composed_attention(step: Step, ceilings: Ceilings) -> float:
    """All heads' scores and one product with the values, over `window` keys: 4 T W D forward, 2.5 times that backward.

    Bytes: q, k, v, the base output and the result, T D each; backward q, k, v, the output's gradient and three more.
    """
    dim, ms = step.recipe.model.dim, 0.0
    for compose in (mixer.compose for mixer in step.mixers if mixer.compose is not None):
        flops = 4 * step.tokens * compose.window * dim
        for times, tensors in ((1.0, 5), (2.5, 7)):
            ms += max(1e3 * times * flops / ceilings.bf16, ceilings.bytes_ms(2 * tensors * step.tokens * dim))
    return ms


def loss(step: Step, ceilings: Ceilings) -> float:
    """Logits (T, V) read once in bf16, their gradient written once, in FP8 where the head is."""
    return ceilings.bytes_ms(step.tokens * step.recipe.model.vocab_size * (3 if step.fp8_head else 4))


def head_transpose(step: Step, ceilings: Ceilings) -> float:
    """The FP8 head's gradient (T, V), read and written transposed, for dW."""
    return ceilings.bytes_ms(2 * step.tokens * step.recipe.model.vocab_size) if step.fp8_head else 0.0


def quantise(step: Step, ceilings: Ceilings) -> float:
    """E4M3 copies of what enters products, T D each: of the head's input both ways round, of the MLPs' after a maximum.

    Weights likewise, once a step.
    """
    model, numbers = step.recipe.model, 0
    if step.fp8_head:
        numbers += (2 + 1 + 1) * model.dim * (step.tokens + model.vocab_size)
    if step.fp8_mlp:
        for hidden, dim in step.shapes("matrix.mlp_up"):
            numbers += (2 + 2 + 1) * dim * (step.tokens + hidden) + (2 + 1) * dim * hidden
    return ceilings.bytes_ms(numbers)


def elementwise(step: Step, ceilings: Ceilings) -> float:
    """`stream_passes` of each layer over T D numbers in bf16, forward; the backward pass twice as many."""
    passes = sum(stream_passes(layer) for layer in step.recipe.model.layers) + len(step.recipe.model.output) + 1
    return ceilings.bytes_ms(3 * 2 * passes * step.tokens * step.recipe.model.dim)


def stream_passes(layer: LayerSpec) -> int:
    """Tensors of the stream's size that a layer reads and writes forward between its products, if all is fused.

    Each sum reads its terms and writes the result, its norm riding along for one more tensor written. Queries, keys
    and values are read and written once, further sources of values read. What is taken from or multiplied onto the
    attention's output reads and writes it.
    """
    passes = sum(len(terms) + 1 for terms in (layer.join, layer.entry) if terms)
    if (mixer := layer.mixer) is not None:
        passes += 1 + 6 + len(mixer.values) - 1 + len(layer.after_mixer) + 1
        passes += 2 if mixer.xsa is not None or mixer.head_gate is not None else 0
    return passes + (1 + len(layer.after_mlp) + 1 if layer.mlp is not None else 0)


def embedding(step: Step, ceilings: Ceilings) -> float:
    """A row of each table for every token: read, written to the stream; its gradient read and added to the table's.

    The table of pairs gives a row for each of its orders, which leave together. A dense gradient of a table costs more:
    it is filled with zeros, and the optimizer reads all of it.
    """
    numbers, bigram = 0, step.recipe.model.bigram
    orders = 1 if bigram is None else len(bigram.orders)
    for role, shape, group in step.parameters:
        if role.name.split(".")[0] == "embed" and len(shape) == 2:
            rows = orders if role.name == "embed.bigram" else 1
            numbers += shape[1] * (rows * 3 * BYTES[group.storage] + 2 + 2)
    if bigram is not None and bigram.signs:
        numbers += orders * step.recipe.model.dim  # a byte each
    return ceilings.bytes_ms(step.tokens * numbers)


def optimizer(step: Step, ceilings: Ceilings) -> float:
    """Weights and moments read and written, gradients read; for Muon the polar factor's products besides.

    A group that moves on every n-th step counts for an n-th. Of rules other than Adam and Muon only weights and
    gradients count.
    """
    return sum(
        (ceilings.bytes_ms(_state_bytes(shape, group)) + _polar_ms(shape, role, group, ceilings)) / group.every
        for role, shape, group in step.parameters
    )


def _state_bytes(shape: tuple[int, ...], group: ParamGroup) -> int:
    """Moments are in fp32, of which Adam has two and Muon one; "bf16+16" keeps two bytes more."""
    moments = 2 if isinstance(group.rule, AdamConfig) else int(isinstance(group.rule, MuonConfig))
    lows = 2 * 2 if group.storage == "bf16+16" else 0
    return math.prod(shape) * (3 * BYTES[group.storage] + 8 * moments + lows)


def _polar_ms(shape: tuple[int, ...], role: Role, group: ParamGroup, ceilings: Ceilings) -> float:
    """A = X X^T and b A + c A A^T, half of each by symmetry, then a X + B X, five times: 3 r^2 n + r^3 for r x n."""
    if not isinstance(group.rule, MuonConfig):
        return 0.0
    small, large = sorted(matrix_shape(shape, role.blocks))
    return 1e3 * role.blocks * POLAR_STEPS * (3 * small**2 * large + small**3) / ceilings.bf16


def products_line(groups: dict[str, float], floors: dict[str, float]) -> Iterator[str]:
    """All products together, measured and at least, however they are fused."""
    ms, least = (sum(found.get(group, 0.0) for group in PRODUCTS) for found in (groups, floors))
    if least:
        yield f"{' + '.join(PRODUCTS)}: {ms:.3f} ms, floor {least:.3f}, ratio {ms / least:.2f}"
