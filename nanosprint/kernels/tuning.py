"""Block sizes by device and shape. Each number here was measured; what was not measured takes the default.

H200, torch 2.11, Triton 3.6, microseconds of one launch, best of six or seven tiles against cuBLAS (`bench_symmetric`):

    X X^T  48 x 768 x 768   54 :  67      b A + c A A  48 x 768   57 : 109     a X + B X  48 x 768 x 768   84 : 115
    X X^T  12 x 768 x 3072  39 :  66      b A + c A A  12 x 768   14 :  29     a X + B X  12 x 768 x 3072  81 : 112
    X^T X  12 x 3072 x 768  38 :  65                                           a X + X B  12 x 3072 x 768  80 : 113
    X X^T  24 x 256 x 768   6.7: 7.7      b A + c A A  24 x 256  5.1: 8.4      a X + B X  24 x 256 x 768   12 :  16

Two blocks of 4 warps on a multiprocessor beat one of 8: the epilogue of one runs under the products of the other. So
96 KiB of shared memory (three stages) is the most that a tile may take.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """A block computes m x n results and reads k of the summed axis at a time, `stages` loads ahead."""

    m: int
    n: int
    k: int
    stages: int
    warps: int


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


MEASURED = ((9, 0),)  # compute capabilities on which the products were timed against cuBLAS
MIN_SIDE = 256  # shortest side of a matrix for which they were
_HOPPER = Tile(128, 128, 64, 3, 4)
_HOPPER_SMALL = Tile(64, 64, 128, 3, 4)  # 128 x 128 leaves most multiprocessors without a tile
_DEFAULT = Tile(64, 64, 32, 3, 4)  # fits every card since Ampere

QUANTIZE = (128, 128, 4)  # rows, columns, warps of a tile: 3.65 TB/s on 49,152 x 50,304, both layouts written
SOFTCAP_XENT = (4096, 16)  # columns at a time, warps of a row: not measured yet

# Products with squared ReLU, by what they compute (`ops.linear_relu2`): "up" and "dpre" in bf16, "up8" and "dpre8" from
# FP8 operands. Those named in FUSED_RELU2 are one kernel; the others cuBLAS and a pass. Not measured yet: none.
FUSED_RELU2: frozenset[str] = frozenset()
RELU2_TILES = {
    "up": Persistent(128, 256, 64, 4, 8),
    "dpre": Persistent(128, 256, 64, 3, 8),
    "up8": Persistent(128, 256, 128, 3, 8),
    "dpre8": Persistent(128, 256, 128, 3, 8),
}
_RELU2_DEFAULT = Persistent(64, 64, 64, 3, 4)  # fits every card since Ampere
RELU2_PASS = (2048, 4)  # elements at a time, warps of a block: not measured yet
RELU2_PEAKS = 1024  # slots for the blocks' maxima, and so the most blocks
RELU2_CANDIDATES = {  # tiles for the benchmark to try; the first of each kind is good on an H100 (records #59, #84)
    "bf16": (
        Persistent(128, 256, 64, 4, 8),
        Persistent(128, 256, 64, 3, 8),
        Persistent(128, 256, 64, 3, 8, flatten=False),
        Persistent(128, 128, 64, 5, 8),
        Persistent(128, 128, 64, 3, 4, blocks=2, flatten=False),
        Persistent(128, 128, 64, 2, 4, blocks=2),
        Persistent(256, 128, 64, 3, 8),
    ),
    "fp8": (
        Persistent(128, 256, 128, 3, 8),
        Persistent(128, 256, 128, 3, 8, flatten=False),
        Persistent(128, 256, 64, 6, 8),
        Persistent(128, 128, 128, 4, 8),
        Persistent(128, 128, 64, 4, 4, blocks=2),
        Persistent(128, 128, 64, 4, 4, blocks=2, flatten=False),
        Persistent(128, 128, 128, 2, 4, blocks=2, flatten=False),
        Persistent(256, 128, 128, 3, 8),
    ),
}

REQUANTIZE = (64, 4096, 8)  # blocks a matrix, elements at a time, warps: not measured yet
TURN_CODES = (64, 128, 4)  # rows, columns, warps of a tile of codes: not measured yet


def symmetric_tile(side: int, capability: tuple[int, int]) -> Tile:
    """Square tile for a symmetric result of side x side."""
    if capability not in MEASURED:
        return _DEFAULT
    return _HOPPER_SMALL if side <= 256 else _HOPPER


def full_tile(capability: tuple[int, int]) -> Tile:
    """Tile for a result without symmetry."""
    return _HOPPER if capability in MEASURED else _DEFAULT


def relu2_tile(kind: str, capability: tuple[int, int]) -> Persistent:
    """Tile for a product with squared ReLU, by what it computes."""
    return RELU2_TILES[kind] if capability in MEASURED else _RELU2_DEFAULT


def wins(side: int, capability: tuple[int, int]) -> bool:
    """Whether the products were measured to beat cuBLAS for matrices whose shorter side is this."""
    return capability in MEASURED and side >= MIN_SIDE
