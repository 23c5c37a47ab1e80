"""What is in a dataset: every header checked, tokens and documents counted, ids held against the vocabulary."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nanosprint.data.shards import SPLITS, ShardError, Split, list_shards, open_shard, split_of, unpack_shards
from nanosprint.data.tokenizers import FILE_NAME, Tokenizer, load_tokenizer

CHUNK = 1 << 22  # tokens looked at together
BAR_WIDTH = 40


@dataclass(frozen=True)
class ShardInfo:
    """One shard, with its errors if it has any."""

    path: Path
    split: Split | None
    tokens: int
    documents: int | None  # that start in it; None where the tokenizer marks none
    largest_id: int  # -1 if empty
    error: str | None = None


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset, or a single shard."""

    path: Path
    tokenizer: str
    tokenizer_assumed: bool  # there is no tokenizer.json
    vocab_size: int
    shards: tuple[ShardInfo, ...]
    lengths: tuple[int, ...] = field(default=())  # documents of 2**i to 2**(i + 1) - 1 tokens, BOS included

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(shard.error for shard in self.shards if shard.error)

    def tokens(self, split: Split | None = None) -> int:
        """Tokens of one split, or of all."""
        return sum(s.tokens for s in self.shards if split is None or s.split == split)

    def documents(self, split: Split | None = None) -> int | None:
        """Documents of one split, or of all; None where the tokenizer marks none."""
        counts = [s.documents for s in self.shards if split is None or s.split == split]
        return None if None in counts else sum(c for c in counts if c is not None)


def info(path: Path, cache: Path | None = None) -> DatasetInfo:
    """Look through every token of a shard (.bin or .bin.xz) or a dataset folder.

    Damaged shards and ids outside the vocabulary are reported in the result, one message a shard. Raises ValueError if
    there is nothing to look at.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise ShardError(f"{path} does not exist")
    listed = _all_shards(path) if path.is_dir() else [path]
    tokenizer = load_tokenizer(folder)
    histogram = np.zeros(32, np.int64)
    shards = []
    rest: dict[Split | None, int] = {}  # tokens of the document that goes on into the next shard of its split
    for shard in listed:
        shards.append(_look_through(shard, tokenizer, histogram, rest, cache))
    for length in rest.values():
        _count_lengths(histogram, np.array([length]))
    used = int(np.flatnonzero(histogram).max(initial=-1)) + 1
    return DatasetInfo(
        path=path,
        tokenizer=tokenizer.kind,
        tokenizer_assumed=not (folder / FILE_NAME).exists(),
        vocab_size=tokenizer.vocab_size,
        shards=tuple(shards),
        lengths=tuple(histogram[:used].tolist()),
    )


def format_info(found: DatasetInfo) -> str:
    """The result of `info` as lines of text."""
    return "\n".join(_lines(found))


def _all_shards(folder: Path) -> list[Path]:
    found, failures = [], []
    for split in SPLITS:
        try:
            found += list_shards(folder, split)
        except ShardError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return found


def _look_through(
    path: Path, tokenizer: Tokenizer, histogram: np.ndarray, rest: dict[Split | None, int], cache: Path | None
) -> ShardInfo:
    split = split_of(path)
    try:
        tokens = open_shard(unpack_shards([path], cache)[0] if path.suffix == ".xz" else path)
    except ShardError as damage:
        return ShardInfo(path, split, 0, 0, -1, str(damage))
    largest = max((int(chunk.max()) for chunk in _chunks(tokens)), default=-1)
    error = None
    if largest >= tokenizer.vocab_size:
        error = f"{path}: token id {largest} is outside the {tokenizer.vocab_size} ids of {tokenizer.kind}"
    if tokenizer.bos is None:
        return ShardInfo(path, split, len(tokens), None, largest, error)
    starts = _positions(tokens, tokenizer.bos)
    ends = np.concatenate([starts, [len(tokens)]])
    lengths = np.diff(ends, prepend=0)  # the first is what continues the shard before
    lengths[0] += rest.pop(split, 0)
    rest[split] = int(lengths[-1])
    _count_lengths(histogram, lengths[:-1])
    return ShardInfo(path, split, len(tokens), len(starts), largest, error)


def _count_lengths(histogram: np.ndarray, lengths: np.ndarray) -> None:
    lengths = lengths[lengths > 0]
    histogram += np.bincount(np.frexp(lengths.astype(float))[1] - 1, minlength=len(histogram))  # floor(log2)


def _positions(tokens: np.ndarray, bos: int) -> np.ndarray:
    found = [i * CHUNK + np.flatnonzero(chunk == bos) for i, chunk in enumerate(_chunks(tokens))]
    return np.concatenate([np.empty(0, np.int64), *found])


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), CHUNK):
        yield tokens[start : start + CHUNK]


def _lines(found: DatasetInfo) -> Iterable[str]:
    assumed = " (assumed: there is no tokenizer.json)" if found.tokenizer_assumed else ""
    yield f"{found.path}: tokenizer {found.tokenizer}, {found.vocab_size:,} ids{assumed}"
    for shard in found.shards:
        documents = "" if shard.documents is None else f", {shard.documents:,} documents"
        verdict = f"  ERROR {shard.error}" if shard.error else f"  {shard.tokens:,} tokens{documents}"
        yield f"  {shard.path.name}{verdict}"
    for split in SPLITS:
        count = found.documents(split) if found.tokens(split) else None
        yield f"{split}: {found.tokens(split):,} tokens" + ("" if count is None else f" in {count:,} documents")
    if any(found.lengths):
        yield "document lengths in tokens:"
        most = max(found.lengths)
        for i, count in enumerate(found.lengths):
            if not any(found.lengths[: i + 1]):
                continue
            bar = "#" * -(-count * BAR_WIDTH // most)
            yield f"  {2**i:>10,} - {2 ** (i + 1) - 1:<10,} {count:>10,} {bar}".rstrip()
