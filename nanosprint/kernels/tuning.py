"""Block sizes by device and shape, measured where they do not say otherwise; the rest takes the default.

H200, torch 2.11, Triton 3.6, microseconds of one launch, best of six or seven tiles against cuBLAS (`bench_symmetric`):

    X X^T  48 x 768 x 768   54 :  67      b A + c A A  48 x 768   57 : 109     a X + B X  48 x 768 x 768   84 : 115
    X X^T  12 x 768 x 3072  39 :  66      b A + c A A  12 x 768   14 :  29     a X + B X  12 x 768 x 3072  81 : 112
    X^T X  12 x 3072 x 768  38 :  65                                           a X + X B  12 x 3072 x 768  80 : 113
    X X^T  24 x 256 x 768   6.7: 7.7      b A + c A A  24 x 256  5.1: 8.4      a X + B X  24 x 256 x 768   12 :  16

Two blocks of 4 warps on a multiprocessor beat one of 8: the epilogue of one runs under the products of the other. So
96 KiB of shared memory (three stages) is the most that a tile may take.
"""

from collections.abc import Callable
from typing import NamedTuple


class AttentionTile(NamedTuple):
    """A program of an attention kernel keeps one side's tokens and goes over the other's in blocks.

    The forward pass and `gradient_q` keep `queries`, `gradient_kv` keeps `keys`. registers: the most a thread may have
    (None: what the compiler likes). branch: ask of each block whether it needs a mask. descriptors: blocks are fetched
    by the copy engine, where there is one. overlap: by the kernels that order Hopper's products by hand
    (`attention_hopper`), always with branches and descriptors.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    branch: bool = True
    descriptors: bool = False
    overlap: bool = False

    def __str__(self) -> str:
        registers = "" if self.registers is None else f" r{self.registers}"
        flags = ("" if self.branch else " mask") + (" tma" if self.descriptors else "")
        flags += " overlap" if self.overlap else ""
        return f"q{self.queries} k{self.keys} w{self.warps} s{self.stages}{registers}{flags}"


class Tile(NamedTuple):
    """A block computes m x n results and reads k of the summed axis at a time, `stages` loads ahead.

    once: on the diagonal of a symmetric result both operands are the same rows, which are read once.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    once: bool = False


class Persistent(NamedTuple):
    """The same for blocks that stay, `blocks` of them on a multiprocessor, and take tile after tile.

    Results leave a tile in `parts` (1 or 2) column parts. `flatten`: one loop over tiles and the summed axis.
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    blocks: int = 1
    parts: int = 2
    flatten: bool = True


class Resident(NamedTuple):
    """For blocks that keep `columns` rows of the weights, with all of the summed axis, while the other operand passes.

    It passes in pieces of `k`, `stages` ahead. registers: of a thread of the second group that computes; the first has
    what is left of 504. ahead: how many tiles beforehand L2 is told to fetch what passes; 0 not at all.
    """

    columns: int
    k: int
    stages: int
    registers: int = 232
    ahead: int = 2

    def fits(self, weights: tuple[int, int], size: int) -> bool:
        """Whether weights of that shape, `size` bytes a number, can be held so: pieces are 128 bytes wide."""
        rows, width = weights
        held = self.columns * width + self.stages * 64 * self.k
        return not (rows % self.columns or width % self.k) and self.k * size == 128 and held * size <= 224 * 1024


MEASURED = ((9, 0),)  # compute capabilities on which the products were timed against cuBLAS
MIN_SIDE = 256  # shortest side of a matrix for which they were
_HOPPER = Tile(128, 128, 64, 3, 4)
_HOPPER_SMALL = Tile(64, 64, 128, 3, 4)  # 128 x 128 leaves most multiprocessors without a tile
# Gram matrices that cuBLAS computes in full faster than the kernel half of them: sides, and how many matrices. H200,
# microseconds (`benchmarks.ops`): 60 x 256 x 768 in 10.9 against 29.0, of which some 10 were a copy that is gone; 24 of
# them the kernel computes in 6.7, cuBLAS in 7.7. Ten tiles each are a wave of 264 blocks for 26 matrices, three for 60.
CUBLAS_GRAMS = {(9, 0): ((range(256, 257), range(27, 2**16)),)}
_DEFAULT = Tile(64, 64, 32, 3, 4)  # fits every card since Ampere

QUANTIZE = (128, 128, 4)  # rows, columns, warps of a tile: 3.65 TB/s on 49,152 x 50,304, both layouts written
# Columns at a time, warps of a row, by bytes of the gradient's dtype. E5M2: 2.99 ms against 3.45 with 16 warps (plain
# loss, 49,152 x 50,304), bf16: 3.61 against 3.71 with 8 (`bench_fp8`).
SOFTCAP_XENT = {1: (4096, 8), 2: (4096, 16), 4: (4096, 16)}


class HeldRow(NamedTuple):
    """For blocks that keep a row of capped logits in shared memory, two on a multiprocessor.

    A row passes in chunks of 256 `warps` columns, `ahead` of them on their way to registers. Groups of so many are
    announced to L2 `soon` groups before they are computed; 0: not at all.
    """

    warps: int
    ahead: int
    soon: int

    def fits(self, columns: int, strides: tuple[int, ...], amplitude: float) -> bool:
        """Whether rows of that many columns can be held so. strides: of logits and gradient, from row to row.

        The compiler reads 16 bytes at once of what it knows to be at multiples of 16 words of two logits. amplitude:
        what no logit exceeds.
        """
        held = 512 * self.warps * -(-columns // (256 * self.warps))
        aligned = not any(n % 32 for n in (columns, *strides))
        return aligned and held + 1024 <= 113 * 1024 and amplitude <= SOFTCAP_BOUND


SOFTCAP_BOUND = 40.0  # of capped logits: exp(-2 x 40) is a normal number in fp32 yet
# Where Gluon serves (`softcap_xent_resident`); None: nowhere. Not timed yet, nor are the candidates.
SOFTCAP_XENT_HELD: HeldRow | None = HeldRow(8, 4, 2)
SOFTCAP_XENT_CANDIDATES = (
    *(HeldRow(8, 4, soon) for soon in (2, 0, 3, 6)),
    HeldRow(8, 3, 3),
    HeldRow(8, 6, 2),
    HeldRow(8, 8, 0),
    HeldRow(16, 3, 2),
)
QK_NORM_ROTARY = (8, 4)  # tokens, warps of a program for one head: 83 % of the floor, best of seven (`bench_rotary`)

# Attention. The first of each list is taken on Hopper; `bench_attention --sweep-tiles` times them all. Microseconds on
# an H200 at 49,152 tokens, 6 heads of 128, window 640, 337 keys a query: forward 168, gradient of q 203, of k and v
# 242; without `overlap` at best 194, 263 and 296. Over 27 cases of 32,768 to 196,608 tokens those with descriptors
# stand in this order, and the first was never more than 7 % behind another. Two programs of 4 warps share a
# multiprocessor if each stays below 113 KiB, and one's exponentials run under the other's products: those with 8 warps
# took 1.2 times as long or more. What has no descriptors is for cards without a copy engine.
ATTENTION_FORWARD = (
    AttentionTile(64, 64, 4, 2, descriptors=True, overlap=True),
    AttentionTile(64, 32, 4, 2, descriptors=True, overlap=True),
    AttentionTile(64, 64, 4, 3, descriptors=True, overlap=True),
    AttentionTile(64, 32, 4, 3, descriptors=True),
    AttentionTile(64, 64, 4, 3, descriptors=True),
    AttentionTile(64, 64, 4, 3),
    AttentionTile(64, 64, 4, 2),
)
ATTENTION_GRADIENT_Q = (
    AttentionTile(64, 64, 4, 2, descriptors=True, overlap=True),
    AttentionTile(64, 32, 4, 2, descriptors=True, overlap=True),
    AttentionTile(128, 32, 8, 3, descriptors=True),
    AttentionTile(64, 64, 4, 2, descriptors=True),
    AttentionTile(64, 32, 4, 3, descriptors=True),
    AttentionTile(64, 64, 4, 2),
    AttentionTile(64, 64, 4, 2, branch=False),
)
ATTENTION_GRADIENT_KV = (
    AttentionTile(64, 64, 4, 2, descriptors=True, overlap=True),
    AttentionTile(32, 64, 4, 3, descriptors=True, overlap=True),
    AttentionTile(64, 64, 4, 2, descriptors=True),
    AttentionTile(64, 64, 4, 2),
    AttentionTile(64, 64, 4, 2, branch=False),
    AttentionTile(32, 64, 4, 3),
)
# 80, 64 and 64 KiB at heads of 128: within the 99 that a program may have on consumer cards since Ampere.
_ATTENTION_DEFAULT = (AttentionTile(64, 64, 4, 2), AttentionTile(64, 32, 4, 2), AttentionTile(32, 64, 4, 2))


def attention_tiles(
    capability: tuple[int, int], gluon: Callable[[], bool]
) -> tuple[AttentionTile, AttentionTile, AttentionTile]:
    """Tiles of the forward pass, of `gradient_q` and of `gradient_kv`. `gluon` is asked for where it would serve."""
    if capability not in MEASURED:
        return _ATTENTION_DEFAULT
    lists = ATTENTION_FORWARD, ATTENTION_GRADIENT_Q, ATTENTION_GRADIENT_KV
    forward, over_queries, over_keys = (next(t for t in tiles if not t.overlap or gluon()) for tiles in lists)
    return forward, over_queries, over_keys


EMBEDDING = (128, 256, 1)  # sorted positions, columns and warps of a program: best of eight (`bench_embedding`)


class Band(NamedTuple):
    """Composed attention: queries and keys of a tile, `stages` loads ahead. Tiles follow each other over the band."""

    queries: int
    keys: int
    stages: int
    warps: int


class ComposeBands(NamedTuple):
    """A band for each kernel of composed attention, by the kernels' names."""

    maps: Band
    read: Band
    dmaps: Band
    dq: Band
    dk: Band
    dv: Band


COMPOSE_WINDOW = 256  # keys: `maps` and `dmaps` hold a whole band in registers, of which wider ones need too many
# Best of 76 on an H200 for 6 heads of 128 and a window of 112 (`bench_compose --sweep`): 49,152 tokens forward in 195
# us, backward in 627.
_COMPOSE_HOPPER = ComposeBands(
    maps=Band(16, 128, 3, 4),
    read=Band(64, 32, 2, 4),
    dmaps=Band(16, 128, 3, 4),
    dq=Band(64, 32, 2, 4),
    dk=Band(32, 64, 1, 4),
    dv=Band(32, 64, 2, 4),
)
_COMPOSE_DEFAULT = ComposeBands(*[Band(16, 64, 1, 4)] * 6)  # fits every card since Ampere


def compose_bands(capability: tuple[int, int]) -> ComposeBands:
    """How the kernels of composed attention cut their bands."""
    return _COMPOSE_HOPPER if capability == (9, 0) else _COMPOSE_DEFAULT


# Products with squared ReLU, by what they compute (`ops.linear_relu2`): "up" and "dpre" in bf16, "up8" and "dpre8"
# from FP8 operands. Those named in FUSED_RELU2 are one kernel; the others cuBLAS and a pass. Milliseconds on an H200,
# weights resident, streamed, and cuBLAS with a pass, 49,152 tokens, 768 to 3072: up 0.370, 0.397, 0.475; dpre 0.372,
# 0.476, 0.550; up8 0.225, 0.334, 0.404; dpre8 0.274, 0.444, 0.465.
FUSED_RELU2 = frozenset(("up", "dpre", "up8", "dpre8"))
RELU2_TILES = {
    "up": Persistent(128, 256, 64, 4, 8),
    "dpre": Persistent(128, 256, 64, 3, 8),
    "up8": Persistent(128, 256, 128, 3, 8),
    "dpre8": Persistent(128, 128, 64, 4, 4, blocks=2, flatten=False),
}
# Kinds that keep the weights in shared memory where they fit (`linear_relu2_resident`), in a Triton whose Gluon that is
# written for.
RESIDENT_RELU2 = frozenset(("up", "dpre", "up8", "dpre8"))
RELU2_RESIDENT = {
    "up": Resident(128, 64, 4),
    "dpre": Resident(128, 64, 4),
    "up8": Resident(256, 128, 4),
    "dpre8": Resident(256, 128, 4),
}
# Where the products of all stacks of an orthogonalisation share launches (`polar_grouped`): written for (9, 0), not
# timed yet. Pieces in its ring: with halves of two finished tiles, 224 KiB.
GROUPED_POLAR: tuple[tuple[int, int], ...] = ()
GROUPED_STAGES = 4
GLUON = ("3.6.",)  # it is experimental: names and arguments change with every release
_RELU2_DEFAULT = Persistent(64, 64, 64, 3, 4)  # fits every card since Ampere
RELU2_PASS = (2048, 4)  # elements at a time, warps of a block: not measured yet
RELU2_PEAKS = 1024  # slots for the blocks' maxima, and so the most blocks
RELU2_CANDIDATES: dict[str, tuple[Persistent | Resident, ...]] = {  # for `bench_mlp --sweep`
    "bf16": (
        Resident(128, 64, 4),
        Resident(128, 64, 4, ahead=0),
        Persistent(128, 256, 64, 4, 8),
        Persistent(128, 256, 64, 3, 8),
        Persistent(256, 128, 64, 4, 8),
        Persistent(128, 128, 64, 3, 4, blocks=2, flatten=False),
    ),
    "fp8": (
        Resident(256, 128, 4),
        Resident(256, 128, 4, 240),
        Resident(256, 128, 4, ahead=0),
        Resident(256, 128, 3),
        Persistent(128, 256, 128, 3, 8),
        Persistent(128, 256, 64, 6, 8),
        Persistent(256, 128, 128, 3, 8),
        Persistent(128, 128, 64, 4, 4, blocks=2, flatten=False),
    ),
}

PEAKS = (64, 4096, 8)  # blocks a weight, elements at a time, warps: not measured yet
TURN_CODES = (64, 128, 4)  # rows, columns, warps of a tile of codes: not measured yet


def symmetric_tile(side: int, capability: tuple[int, int]) -> Tile:
    """Square tile for a symmetric result of side x side."""
    if capability not in MEASURED:
        return _DEFAULT
    return _HOPPER_SMALL if side <= 256 else _HOPPER


def cublas_gram(side: int, batch: int, capability: tuple[int, int]) -> bool:
    """Whether to leave Gram matrices of that side, so many at once, to cuBLAS."""
    return any(side in sides and batch in batches for sides, batches in CUBLAS_GRAMS.get(capability, ()))


def full_tile(capability: tuple[int, int]) -> Tile:
    """Tile for a result without symmetry."""
    return _HOPPER if capability in MEASURED else _DEFAULT


def relu2_tile(kind: str, capability: tuple[int, int]) -> Persistent:
    """Tile for a product with squared ReLU, by what it computes."""
    return RELU2_TILES[kind] if capability in MEASURED else _RELU2_DEFAULT


def wins(side: int, capability: tuple[int, int]) -> bool:
    """Whether the products were measured to beat cuBLAS for matrices whose shorter side is this."""
    return capability in MEASURED and side >= MIN_SIDE
