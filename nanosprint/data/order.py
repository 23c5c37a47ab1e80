"""Which tokens a step reads: pure arithmetic on positions, without a file or a thread.

A step of B tokens is cut into rows of S tokens, each with the token after it as its last target. Three orders:

- `Sequential`: a step takes B + 1 consecutive tokens of one shard; the last is read again as the first of the next
  step. Where fewer are left in a shard, its tail is dropped for all lanes together, and the next shard begins.
- `Shuffled`: every shard is cut into blocks of S tokens (+ 1 target), and the blocks of all shards are dealt in a
  random order, anew in each epoch; an epoch's last blocks are dropped when they do not fill a step. From the second
  epoch on, cutting starts at a random offset below S, so that other tokens stand at the borders of blocks. The order
  is a function of the seed and the epoch (PCG64), nothing else.
- `Documents`: rows are filled with documents from their first token on (see `packing`). Where a shard's documents do
  not fill all rows of a step, its tail is dropped for all lanes together, and the step begins anew in the next shard.
  This one looks at the tokens, though only for the places where documents start.

A `Position` says where a step starts or ended; it is all the state there is, and the same for every rank.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from nanosprint.data.packing import DocumentStarts, Pieces, pack


class NotEnoughTokens(ValueError):
    """The shards cannot fill a single step."""


class StepShape(NamedTuple):
    """A step's tokens, those of a row, and those of the longest document, which only `Documents` looks at."""

    batch_tokens: int
    seq_len: int
    max_document: int | None = None


@dataclass(frozen=True, order=True)
class Position:
    """Epoch, shard and token within it; in shuffled order the shard is 0 and `offset` counts the epoch's blocks."""

    epoch: int = 0
    shard: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Rows:
    """Rows to read, in order: row i is tokens offsets[i] .. offsets[i] + seq_len of shard shards[i], its target too."""

    shards: np.ndarray  # (rows,) int64
    offsets: np.ndarray  # (rows,) int64


@dataclass(frozen=True)
class PackedRows:
    """Rows to read, in order, that are put together from pieces of one shard."""

    shard: int
    pieces: Pieces


class Order(Protocol):
    """An order in which steps read the shards."""

    def start(self, position: Position, shape: StepShape) -> Position:
        """Where a step reads that follows `position`: there, or after a tail that is too short.

        Raises NotEnoughTokens if no shard, or no epoch, holds a whole step.
        """
        ...

    def advance(self, start: Position, shape: StepShape) -> Position:
        """Where the step that reads at `start` ends."""
        ...

    def rows(self, start: Position, first: int, count: int, shape: StepShape) -> Rows | PackedRows:
        """Rows first .. first + count - 1 of the step that reads at `start`."""
        ...

    def passes(self, position: Position, shape: StepShape) -> float:
        """How many times the tokens have been read at `position`, dropped ones included."""
        ...


class Sequential:
    """Consecutive blocks, shard after shard. counts: tokens in each shard."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self._before = np.concatenate([[0], np.cumsum(self.counts)])

    def start(self, position: Position, shape: StepShape) -> Position:
        batch_tokens = shape.batch_tokens
        if max(self.counts) < batch_tokens + 1:
            raise NotEnoughTokens(
                f"a step of {batch_tokens} tokens needs a shard of at least {batch_tokens + 1}; the largest has "
                f"{max(self.counts)}: lower train.batch_tokens, or prepare larger shards"
            )
        epoch, shard, offset = position.epoch, position.shard, position.offset
        while self.counts[shard] - offset < batch_tokens + 1:
            shard, offset = shard + 1, 0
            if shard == len(self.counts):
                epoch, shard = epoch + 1, 0
        return Position(epoch, shard, offset)

    def advance(self, start: Position, shape: StepShape) -> Position:
        return Position(start.epoch, start.shard, start.offset + shape.batch_tokens)

    def rows(self, start: Position, first: int, count: int, shape: StepShape) -> Rows:
        offsets = start.offset + (first + np.arange(count)) * shape.seq_len
        return Rows(np.full(count, start.shard), offsets)

    def passes(self, position: Position, shape: StepShape) -> float:
        return position.epoch + (int(self._before[position.shard]) + position.offset) / int(self._before[-1])


class Shuffled:
    """Blocks of all shards in random order. counts: tokens in each shard."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        self.counts = tuple(counts)
        self.seed = seed
        # Only the latest epochs: a permutation of a large corpus takes 8 bytes per block.
        self._permutation = functools.lru_cache(maxsize=2)(self._make_permutation)
        self._blocks = functools.lru_cache(maxsize=4)(self._count_blocks)
        self._first_draw = functools.lru_cache(maxsize=4)(self._draw_first)

    def start(self, position: Position, shape: StepShape) -> Position:
        batch_tokens, seq_len, _ = shape
        num_rows = batch_tokens // seq_len
        for epoch in (position.epoch, position.epoch + 1, position.epoch + 2):  # a later one may be a block shorter
            taken = position.offset if epoch == position.epoch else 0
            if sum(self._blocks(epoch, seq_len)) - taken >= num_rows:
                return Position(epoch, 0, taken)
        raise NotEnoughTokens(
            f"a step of {batch_tokens} tokens needs {num_rows} blocks of {seq_len} + 1; the {sum(self.counts)} tokens "
            f"there are make {sum(self._blocks(position.epoch, seq_len))}: lower train.batch_tokens, or add data"
        )

    def advance(self, start: Position, shape: StepShape) -> Position:
        return Position(start.epoch, 0, start.offset + shape.batch_tokens // shape.seq_len)

    def rows(self, start: Position, first: int, count: int, shape: StepShape) -> Rows:
        seq_len = shape.seq_len
        chosen = self._permutation(start.epoch, seq_len)[start.offset + first : start.offset + first + count]
        ends = np.cumsum(self._blocks(start.epoch, seq_len))
        shards = np.searchsorted(ends, chosen, side="right")
        blocks = chosen - np.concatenate([[0], ends])[shards]
        return Rows(shards, self.shift(start.epoch, seq_len) + blocks * seq_len)

    def passes(self, position: Position, shape: StepShape) -> float:
        return position.epoch + position.offset / sum(self._blocks(position.epoch, shape.seq_len))

    def shift(self, epoch: int, seq_len: int) -> int:
        """Where in each shard the first block of this epoch begins, 0 .. seq_len - 1."""
        return 0 if epoch == 0 else self._first_draw(epoch) % seq_len

    def _draw_first(self, epoch: int) -> int:
        return int(self._random(epoch, 1)[0])

    def _count_blocks(self, epoch: int, seq_len: int) -> tuple[int, ...]:
        shift = self.shift(epoch, seq_len)
        return tuple(max(0, count - 1 - shift) // seq_len for count in self.counts)

    def _make_permutation(self, epoch: int, seq_len: int) -> np.ndarray:
        # The order of raw draws rather than Generator.permutation, whose result may change between numpy versions.
        draws = self._random(epoch, 1 + sum(self._blocks(epoch, seq_len)))
        return np.argsort(draws[1:], kind="stable")

    def _random(self, epoch: int, count: int) -> np.ndarray:
        return np.random.PCG64([self.seed, epoch]).random_raw(count)


class Documents:
    """Rows of documents from their first token on. shards: the tokens of each, (n,); start: begins a document.

    Every step packs within one shard. What the packing of a step finds is kept until the next one.
    """

    def __init__(self, shards: Sequence[np.ndarray], start: int) -> None:
        self.shards = tuple(shards)
        self.start_token = start
        self._before = np.concatenate([[0], np.cumsum([len(shard) for shard in self.shards])])
        self._found: tuple[int, DocumentStarts] | None = None  # of one shard at a time, by its number
        self._packed: tuple[tuple[Position, StepShape], Pieces | None] | None = None

    def start(self, position: Position, shape: StepShape) -> Position:
        epoch, shard, offset = position.epoch, position.shard, position.offset
        for _ in range(len(self.shards) + 1):  # the first is looked at from its middle, and so once more
            at = Position(epoch, shard, offset)
            if self._pack(at, shape) is not None:
                return at
            shard, offset = shard + 1, 0
            if shard == len(self.shards):
                epoch, shard = epoch + 1, 0
        raise NotEnoughTokens(
            f"a step of {shape.batch_tokens} tokens needs {shape.batch_tokens // shape.seq_len} rows of "
            f"{shape.seq_len} + 1 tokens, filled with documents of one shard and cut after "
            f"{shape.max_document or shape.seq_len + 1} tokens of each; none of the {len(self.shards)} shards, the "
            f"largest of {max(len(s) for s in self.shards)} tokens, holds as many that start with token "
            f"{self.start_token}: lower train.batch_tokens, or prepare larger shards"
        )

    def advance(self, start: Position, shape: StepShape) -> Position:
        return Position(start.epoch, start.shard, self._pieces(start, shape).end)

    def rows(self, start: Position, first: int, count: int, shape: StepShape) -> PackedRows:
        return PackedRows(start.shard, self._pieces(start, shape).part(first, count))

    def passes(self, position: Position, shape: StepShape) -> float:
        return position.epoch + (int(self._before[position.shard]) + position.offset) / int(self._before[-1])

    def _pieces(self, start: Position, shape: StepShape) -> Pieces:
        pieces = self._pack(start, shape)
        assert pieces is not None, "a step starts where its rows can be filled"
        return pieces

    def _pack(self, at: Position, shape: StepShape) -> Pieces | None:
        """All rows of the step at `at`; None if the shard has too few documents from there on."""
        if self._packed is None or self._packed[0] != (at, shape):
            rows, starts = shape.batch_tokens // shape.seq_len, self._starts(at)
            pieces = pack(starts, at.offset, rows, shape.seq_len, shape.max_document)
            self._packed = ((at, shape), pieces)
        return self._packed[1]

    def _starts(self, at: Position) -> DocumentStarts:
        if self._found is not None:
            shard, starts = self._found
            if shard == at.shard and starts.begin <= at.offset <= starts.scanned:
                starts.forget(at.offset)
                return starts
        starts = DocumentStarts(self.shards[at.shard], self.start_token, at.offset)
        self._found = (at.shard, starts)
        return starts


def make_order(order: str, shards: Sequence[np.ndarray], seed: int, document_start: int | None = None) -> Order:
    """The order by its name in a recipe. shards: the tokens of each, (n,).

    Raises ValueError for an unknown name, an impossible seed, or no start token for the order that needs it.
    """
    counts = [len(shard) for shard in shards]
    if order == "sequential":
        return Sequential(counts)
    if order == "documents":
        if document_start is None:
            raise ValueError("data.order=documents needs model.document_start, the token that starts a document")
        return Documents(shards, document_start)
    if order != "shuffled":
        raise ValueError(f"data.order={order!r}: expected sequential, shuffled or documents")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    return Shuffled(counts, seed)
