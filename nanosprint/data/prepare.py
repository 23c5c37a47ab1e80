"""Text corpora to token shards: bounded memory, all cores, the same result whatever the number of threads.

One thread reads documents (see `sources`), a pool encodes them in tasks of about a million characters (tiktoken and
numpy work outside Python's lock), and the tokens are written in the order of the text. At most a few tasks per thread
are under way at a time.

Validation documents are held out whole. With `val_tokens=N` they are the first documents, until N targets (N + 1
tokens) are there. Without it a document is held out whenever those held out so far are below a tenth of all, up to
10,485,760 targets, unless it is longer than half of all that came before it. A corpus of one document (a book, a play),
or of two, has none to spare: the last tenth of its tokens is held out.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanosprint.data.publish import existing_dataset, publish
from nanosprint.data.shards import SHARD_TOKENS, ShardWriter, read_chunks
from nanosprint.data.sources import STDIN, Piece, find_sources, read_pieces
from nanosprint.data.tokenizers import KINDS, CharsTokenizer, Tokenizer, from_dict, save_tokenizer

DEFAULT_VAL_TARGETS = 10_485_760  # what the speedrun validates on
VAL_SHARE = 10  # without `val_tokens`: one token in so many, at most
TASK_CHARS = 500_000
Progress = Callable[[int, int], None]  # bytes of text and tokens so far


@dataclass(frozen=True)
class PrepareSummary:
    """What `prepare` made."""

    folder: Path
    tokenizer: str
    vocab_size: int
    documents: int
    val_documents: int  # 0 where the validation split is just the end of the text
    train_tokens: int
    val_tokens: int
    text_bytes: int  # UTF-8
    shards: tuple[Path, ...]
    seconds: float


class Encoded(NamedTuple):
    """A task's result. tokens: (n,) uint16 with BOS; starts: where in it documents start, (documents,) int."""

    tokens: np.ndarray
    starts: list[int]
    num_bytes: int


def prepare(
    sources: Sequence[str | Path],
    tokenizer: str,
    out: Path,
    *,
    name: str | None = None,
    val_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    text_column: str | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> PrepareSummary:
    """Tokenize files, folders or standard input ("-") into the dataset folder `out`.

    tokenizer: "gpt2", "chars" or "bytes"; "chars" reads the text twice, first for its characters. name: stem of the
    shard names, `out`'s own by default. val_tokens: validation targets to hold out, 0 for none (see the module).
    processes: encoding threads, by default one per core. progress: called often with bytes and tokens so far.
    Raises ValueError for sources, options or text that cannot be used, and if `out` holds a dataset and `overwrite` is
    not set. Nothing appears in `out` until all is done.
    """
    started = time.perf_counter()
    _check_options(tokenizer, val_tokens, shard_tokens, processes)
    name = _checked_name(name or out.resolve().name)
    files = find_sources(sources)
    if existing_dataset(out) and not overwrite:
        raise ValueError(f"{out} holds a data set already: choose another folder, or overwrite it with --overwrite")
    with ExitStack() as stack:
        if tokenizer == "chars":
            files = [stack.enter_context(_on_disk(f, text_column)) for f in files]
        encoder = _make_tokenizer(tokenizer, files, text_column)
        workshop = stack.enter_context(publish(out))
        writer = _SplitWriter(workshop, name, shard_tokens, val_tokens)
        pieces = (piece for file in files for piece in read_pieces(file, text_column))
        with writer:
            for encoded in _encode_in_order(pieces, encoder, processes or os.cpu_count() or 1):
                writer.add(encoded)
                if progress is not None:
                    progress(writer.num_bytes, writer.num_tokens)
        shards = writer.finish()
        save_tokenizer(encoder, workshop)
    return PrepareSummary(
        folder=out,
        tokenizer=tokenizer,
        vocab_size=encoder.vocab_size,
        documents=writer.num_documents,
        val_documents=writer.num_val_documents,
        train_tokens=writer.train.num_tokens,
        val_tokens=writer.val.num_tokens,
        text_bytes=writer.num_bytes,
        shards=tuple(out / p.name for p in shards),
        seconds=time.perf_counter() - started,
    )


class _SplitWriter:
    """Deals documents to the two splits, as the module's head says, and writes them."""

    def __init__(self, folder: Path, name: str, shard_tokens: int, val_targets: int | None) -> None:
        self.folder, self.name, self.shard_tokens, self.val_targets = folder, name, shard_tokens, val_targets
        self.val = ShardWriter(folder, name, "val", shard_tokens)
        self.train = ShardWriter(folder, name, "train", shard_tokens)
        self.num_bytes = self.num_documents = self.num_val_documents = 0
        self._current = self.train

    @property
    def num_tokens(self) -> int:
        return self.val.num_tokens + self.train.num_tokens

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(self.val)
        self._stack.enter_context(self.train)

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def add(self, encoded: Encoded) -> None:
        ends = [*encoded.starts, len(encoded.tokens)]
        self._current.add(encoded.tokens[: ends[0]])  # the document that an earlier task began
        for start, end in zip(encoded.starts, ends[1:], strict=True):
            self.num_documents += 1
            self._current = self.train
            if self._wants_validation(end - start):
                self._current = self.val
                self.num_val_documents += 1
            self._current.add(encoded.tokens[start:end])
        self.num_bytes += encoded.num_bytes

    def _wants_validation(self, length: int) -> bool:
        """Whether the document that begins now is held out; `length` is what this task has of it."""
        if self.val_targets is not None:
            return self.val_targets > 0 and self.val.num_tokens < self.val_targets + 1
        wanted = min(DEFAULT_VAL_TARGETS + 1, self.num_tokens // VAL_SHARE)
        return self.val.num_tokens < wanted and length <= self.num_tokens // 2

    def finish(self) -> list[Path]:
        """Check that both splits have what was asked for; returns all shards."""
        if self.num_tokens == 0:
            raise ValueError("the sources hold no text")
        if self.val_targets is None and not self.val.num_tokens:
            self._hold_out_end(min(self.num_tokens // VAL_SHARE, DEFAULT_VAL_TARGETS + 1))
        elif self.val_targets and self.num_documents == 1 and self.val_targets + 1 < self.num_tokens:
            self._hold_out_end(self.val_targets + 1)
        asked = self.val_targets
        if asked and (self.val.num_tokens < asked + 1 or not self.train.num_tokens):
            raise ValueError(
                f"val_tokens={asked}: the sources have {self.num_tokens} tokens in {self.num_documents} documents, and "
                f"validation takes whole documents; that leaves {self.train.num_tokens} for training and "
                f"{self.val.num_tokens} for validation. Ask for fewer, or add text"
            )
        return [*self.val.paths, *self.train.paths]

    def _hold_out_end(self, held: int) -> None:
        """Write the shards again, with the last `held` tokens as validation."""
        whole = [*self.val.paths, *self.train.paths]
        start = self.num_tokens - held
        folder = self.folder / "whole"
        folder.mkdir()
        moved = [path.rename(folder / path.name) for path in whole]
        self.val = ShardWriter(self.folder, self.name, "val", self.shard_tokens)
        self.train = ShardWriter(self.folder, self.name, "train", self.shard_tokens)
        self.num_val_documents, position = 0, 0
        with self.val, self.train:
            for tokens in (chunk for path in moved for chunk in read_chunks(path)):
                cut = min(max(0, start - position), len(tokens))
                self.train.add(tokens[:cut])
                self.val.add(tokens[cut:])
                position += len(tokens)
        shutil.rmtree(folder)


def _encode_in_order(pieces: Iterable[Piece], tokenizer: Tokenizer, threads: int) -> Iterator[Encoded]:
    """Encode in a pool, yield in order, with at most two tasks per thread waiting or under way."""
    pending: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="encode") as pool:
        try:
            for task in _tasks(pieces):
                pending.append(pool.submit(_encode, task, tokenizer))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _tasks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    task: list[Piece] = []
    size = 0
    for piece in pieces:
        task.append(piece)
        size += len(piece.text)
        if size >= TASK_CHARS:
            yield task
            task, size = [], 0
    if task:
        yield task


def _encode(task: list[Piece], tokenizer: Tokenizer) -> Encoded:
    parts: list[np.ndarray] = []
    starts: list[int] = []
    length = num_bytes = 0
    bos = np.array([] if tokenizer.bos is None else [tokenizer.bos], np.uint16)
    for text, is_start in task:
        if is_start:
            starts.append(length)
            parts.append(bos)
            length += len(bos)
        parts.append(tokenizer.encode(text))
        length += len(parts[-1])
        num_bytes += len(text) if text.isascii() else len(text.encode())
    return Encoded(np.concatenate(parts), starts, num_bytes)


def _make_tokenizer(kind: str, files: Sequence[str | Path], text_column: str | None) -> Tokenizer:
    if kind != "chars":
        return from_dict({"kind": kind})
    chars: set[str] = set()
    for file in files:
        for piece in read_pieces(file, text_column):
            chars.update(piece.text)
    if not chars:
        raise ValueError("the sources hold no text")
    return CharsTokenizer("".join(sorted(chars)))


@contextmanager
def _on_disk(source: str | Path, text_column: str | None) -> Iterator[str | Path]:
    """`source`, or a temporary file with what standard input holds, so that it can be read twice."""
    if str(source) != STDIN:
        yield source
        return
    suffix = ".txt" if text_column is None else ".jsonl"
    with tempfile.NamedTemporaryFile(prefix="nanosprint-stdin-", suffix=suffix) as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield copy.name


def _check_options(tokenizer: str, val_tokens: int | None, shard_tokens: int, processes: int | None) -> None:
    if tokenizer not in KINDS:
        raise ValueError(f"unknown tokenizer {tokenizer!r}; the known ones are {', '.join(KINDS)}")
    if val_tokens is not None and val_tokens < 0:
        raise ValueError(f"val_tokens={val_tokens} must be 0 or more")
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes} must be at least 1")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens} must be at least 1")


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise ValueError(f"name={name!r}: use letters, digits, '-', '_' and '.', as it becomes part of file names")
    return name
