"""Block sizes by device and shape."""

from typing import NamedTuple


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    stages: int
    warps: int


QUANTIZE = (128, 128, 8)
