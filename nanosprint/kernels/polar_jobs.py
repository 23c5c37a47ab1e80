"""Which tiles of which stacks the blocks of `polar_grouped` compute, and in which order: whole numbers, no arithmetic.

All stacks lie in one memory of `width` columns, one after the other, so that one description serves the copy engine for
all of them. A matrix with more rows than columns is cut into square blocks there, each transposed: X_1^T, X_2^T, ..
below each other. Then every Gram matrix is a sum of products of rows with rows, A = sum X_i^T X_i, and every update
multiplies from the left, X_i^T <- a X_i^T + B X_i^T. The last update turns the blocks back.
"""

import functools
import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TILE, PIECE = 128, 64  # rows and columns of a tile; of the summed axis at a time
STRAIGHT, TURNED = 1, 2  # how a finished tile is stored: as it is, transposed, or (the sum) both
_OVERHEAD = 3  # of a job, in products of one piece by one tile: what it costs beside them


class Bank(NamedTuple):
    """A stack of `num` matrices."""

    num: int
    rows: int
    cols: int

    @property
    def side(self) -> int:
        return min(self.rows, self.cols)

    @property
    def tall(self) -> bool:
        return self.rows > self.cols


class Job(NamedTuple):
    """Two tiles, the lower one TILE rows below the upper: where operands begin, steps of the summed axis, places.

    stores: STRAIGHT and TURNED of the upper tile, and four times those of the lower one; 0 where one is not wanted. row
    and col are the upper tile's; its transpose goes to turned_row and turned_col, the lower one's TILE columns further.
    """

    p_row: int
    q_row: int
    q_col: int
    steps: int
    stores: int
    row: int
    col: int
    turned_row: int
    turned_col: int

    @property
    def cost(self) -> int:
        return self.steps * ((self.stores & 3 != 0) + (self.stores & 12 != 0)) + _OVERHEAD


FIELDS = len(Job._fields)


class Work(NamedTuple):
    """Jobs of all blocks; those of block i are starts[i] up to starts[i + 1]."""

    jobs: tuple[Job, ...]
    starts: tuple[int, ...]


class Plan(NamedTuple):
    """Rows and columns of the memory of X and of that of A and B, and the work of each product.

    `last` is the update that turns blocks back.
    """

    rows: int
    width: int
    gram_rows: int
    gram_width: int
    gram: Work
    polynomial: Work
    update: Work
    last: Work


def fits(banks: Sequence[Bank]) -> bool:
    """Whether these can share launches: one width, whole tiles, and whole blocks where there are more rows."""
    return len({bank.cols for bank in banks}) == 1 and all(
        bank.num > 0 and not (bank.rows % TILE or bank.cols % TILE or (bank.tall and bank.rows % bank.cols))
        for bank in banks
    )


@functools.lru_cache(maxsize=16)
def plan(banks: tuple[Bank, ...], programs: int) -> Plan:
    """The work of `programs` blocks for stacks that fit."""
    assert fits(banks), banks
    matrices = list(_matrices(banks))
    return Plan(
        rows=sum(bank.num * bank.rows for bank in banks),
        width=banks[0].cols,
        gram_rows=sum(bank.num * bank.side for bank in banks),
        gram_width=max(bank.side for bank in banks),
        gram=deal([job for bank, x, a in matrices for job in _gram(bank, x, a)], programs),
        polynomial=deal([job for bank, _, a in matrices for job in _polynomial(bank, a)], programs),
        update=deal([job for bank, x, a in matrices for job in _update(bank, x, a, turn=False)], programs),
        last=deal([job for bank, x, a in matrices for job in _update(bank, x, a, turn=bank.tall)], programs),
    )


def deal(jobs: Sequence[Job], programs: int) -> Work:
    """Longest first, each to the block with the least to do so far. Of equal jobs neighbours go to neighbours, which
    then find the operands that they share in L2."""
    loads = [(0, i) for i in range(programs)]
    hands: list[list[Job]] = [[] for _ in range(programs)]
    for job in sorted(jobs, key=lambda job: -job.cost):
        load, i = loads[0]
        hands[i].append(job)
        heapq.heapreplace(loads, (load + job.cost, i))
    starts = [0]
    for hand in hands:
        starts.append(starts[-1] + len(hand))
    return Work(tuple(job for hand in hands for job in hand), tuple(starts))


def _matrices(banks: Sequence[Bank]) -> Iterator[tuple[Bank, int, int]]:
    """Each matrix with its first row in the memory of X and in that of A."""
    x = a = 0
    for bank in banks:
        for _ in range(bank.num):
            yield bank, x, a
            x, a = x + bank.rows, a + bank.side


def _gram(bank: Bank, x: int, a: int) -> Iterator[Job]:
    return _symmetric(x, a, bank.side, max(bank.rows, bank.cols) // PIECE)


def _polynomial(bank: Bank, a: int) -> Iterator[Job]:
    return _symmetric(a, a, bank.side, bank.side // PIECE)


def _symmetric(p: int, a: int, side: int, steps: int) -> Iterator[Job]:
    """The lower triangle of a matrix at row `a`, of products of rows with rows from `p` on, stored on both sides."""
    for m in range(0, side, 2 * TILE):
        for n in range(0, min(m + 2 * TILE, side), TILE):
            upper, lower = (
                0 if row < n or row >= side else STRAIGHT if row == n else STRAIGHT + TURNED for row in (m, m + TILE)
            )
            yield Job(p + m, p + n, 0, steps, upper + 4 * lower, a + m, n, a + n, m)


def _update(bank: Bank, x: int, a: int, *, turn: bool) -> Iterator[Job]:
    """B X, or of a tall matrix of each of its blocks; with `turn` stored transposed."""
    side, stores = bank.side, TURNED if turn else STRAIGHT
    for top in range(x, x + bank.rows, side):
        for m in range(0, side, 2 * TILE):
            both = stores + (4 * stores if m + TILE < side else 0)
            for n in range(0, bank.cols, TILE):
                yield Job(a + m, top, n, side // PIECE, both, top + m, n, top + n, m)
