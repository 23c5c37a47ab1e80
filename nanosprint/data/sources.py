"""Reading text corpora as a stream of documents, in bounded memory: .txt, .jsonl and .parquet, plain or compressed.

- A .txt file is one document, unless lines that hold nothing but `<|endoftext|>` separate several.
- A .jsonl file holds one document a line, under the key "text" or another that the caller names.
- A .parquet file holds one document a row, in the column "text" or another that the caller names.
- .txt and .jsonl may be packed as .gz, .xz or .zst; parquet compresses inside. "-" is standard input, read as text, or
  as JSON lines when the caller names a key.

A document comes as one or more pieces of about a million characters. A piece ends before white space that follows
something else: no GPT-2 token reaches over such a place, so the pieces' tokens are exactly the document's.
"""

import codecs
import gzip
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from nanosprint.data.tokenizers import END_OF_TEXT
from nanosprint.extras import require

STDIN = "-"
PACKED = (".gz", ".xz", ".zst")
SUFFIXES = (*(kind + packed for kind in (".txt", ".jsonl") for packed in ("", *PACKED)), ".parquet")
BLOCK = 1 << 20  # bytes or characters
LONGEST_PIECE = 16 * BLOCK  # text without any white space is cut here, come what may
DEFAULT_COLUMN = "text"

SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*\r?(?:\n|\Z)", re.MULTILINE)
SAFE_CUT = re.compile(r"(?<=\S)(?=[ \n])")


class Piece(NamedTuple):
    """Part of a document's text; `starts` marks a document's first piece."""

    text: str
    starts: bool


def find_sources(sources: Sequence[str | Path]) -> list[str | Path]:
    """The files that `sources` name, in their order; folders give the text files below them, sorted by path.

    Raises ValueError for a source that does not exist, a folder without text files, or a file of an unknown kind.
    """
    found: list[str | Path] = []
    for source in sources:
        path = Path(source)
        if str(source) == STDIN:
            found.append(STDIN)
        elif path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
            if not below:
                raise ValueError(f"the folder {path} holds no text files; known are {', '.join(SUFFIXES)}")
            found += below
        elif not path.exists():
            raise ValueError(f"{path} does not exist")
        elif not path.name.endswith(SUFFIXES):
            raise ValueError(f"{path}: unknown kind of file; known are {', '.join(SUFFIXES)}")
        else:
            found.append(path)
    if not found:
        raise ValueError("no text to prepare: name a file, a folder, or - for standard input")
    if found.count(STDIN) > 1:
        raise ValueError("standard input (-) can be read only once")
    return found


def read_pieces(source: str | Path, column: str | None = None) -> Iterator[Piece]:
    """The documents of one file, or of standard input ("-"), piece by piece; empty documents are left out.

    column: the key or column that holds the text (None: "text"). Raises ValueError naming the file, and the byte, line
    or row, for text that is not UTF-8, a broken file, or a document without text.
    """
    name = str(source)
    if name.endswith(".parquet"):
        return _of_documents(_parquet_texts(Path(source), column or DEFAULT_COLUMN))
    is_json = column is not None if name == STDIN else _plain_name(name).endswith(".jsonl")
    blocks = _decoded_blocks(name, is_json)
    return _of_documents(_json_texts(blocks, name, column or DEFAULT_COLUMN)) if is_json else _text_pieces(blocks)


def split_text(text: str) -> list[str]:
    """`text` in pieces of about a million characters, cut where no token can reach across."""
    pieces, rest = _cut(text)
    return [*pieces, rest] if rest else pieces


def _cut(text: str) -> tuple[list[str], str]:
    """Complete pieces, and the rest that may still grow: its end is no safe place."""
    pieces = []
    while len(text) > BLOCK:
        safe = SAFE_CUT.search(text, BLOCK)
        if not safe and len(text) <= LONGEST_PIECE:
            break
        at = min(safe.start() if safe else LONGEST_PIECE, LONGEST_PIECE)
        pieces.append(text[:at])
        text = text[at:]
    return pieces, text


def _of_documents(texts: Iterable[str]) -> Iterator[Piece]:
    for text in texts:
        for i, piece in enumerate(split_text(text)):
            yield Piece(piece, i == 0)


def _text_pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    starts, kept = True, ""
    for block in blocks:  # blocks end at line ends, so a separator never lies across two
        parts = SEPARATOR.split(block) if END_OF_TEXT in block else [block]
        for part in parts[:-1]:
            for piece in split_text(kept + part):
                yield Piece(piece, starts)
                starts = False
            starts, kept = True, ""
        pieces, kept = _cut(kept + parts[-1])
        for piece in pieces:
            yield Piece(piece, starts)
            starts = False
    for piece in split_text(kept):
        yield Piece(piece, starts)
        starts = False


def _json_texts(blocks: Iterable[str], name: str, key: str) -> Iterator[str]:
    number = 0
    for block in blocks:
        for line in block.split("\n"):  # not splitlines: JSON strings may hold U+2028 and its like
            if line.strip():
                yield _json_text(line, key, f"{name}, line {number + 1}")
            number += 1
        number -= 1  # a block ends with its last line's newline, after which split sees an empty line


def _json_text(line: str, key: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with the key {key!r}, found a {type(row).__name__}")
    if key not in row:
        raise ValueError(f"{where}: no key {key!r}, but {_names(row)}: choose one with --text-column")
    return _checked(row[key], key, where)


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    pq = require("pyarrow.parquet", extra="data", purpose=f"reading {path}")
    pa = require("pyarrow", extra="data", purpose=f"reading {path}")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise ValueError(f"{path}: no column {column!r}, but {_names(names)}: choose one with --text-column")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for value in batch.column(0):
                    row += 1
                    yield _checked(value.as_py(), column, f"{path}, row {row}")
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, row {row}: text that is not UTF-8, at byte {error.start} of it") from None


def _checked(text: Any, column: str, where: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where}: {column!r} holds {type(text).__name__} instead of text")
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{where}: {column!r} holds half a surrogate pair, which is not text: remove it")
    return text


def _plain_name(name: str) -> str:
    return name[: -len(Path(name).suffix)] if name.endswith(PACKED) else name


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(n) for n in names) or "none"


def _decoded_blocks(name: str, whole_lines: bool) -> Iterator[str]:
    """Text in blocks of about a megabyte that end at line ends; very long lines are cut unless `whole_lines`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, kept = 0, ""
    for raw in _raw_blocks(name):
        try:
            text = decoder.decode(raw)
        except UnicodeDecodeError as error:
            offset = position - (len(error.object) - len(raw)) + error.start
            raise _not_utf8(name, offset) from None
        if position == 0:
            text = text.removeprefix("\ufeff")  # the mark that some editors put at the start
        position += len(raw)
        kept += text
        end = kept.rfind("\n") + 1
        if end == 0 and len(kept) > LONGEST_PIECE and not whole_lines:
            end = len(kept)
        if end:
            yield kept[:end]
            kept = kept[end:]
    unfinished = decoder.getstate()[0]
    if unfinished:
        raise _not_utf8(name, position - len(unfinished))
    if kept:
        yield kept


def _not_utf8(name: str, offset: int) -> ValueError:
    unpacked = " of its unpacked content" if name.endswith(PACKED) else ""
    return ValueError(f"{name}: not UTF-8 text: bad byte at offset {offset}{unpacked}. Convert it, e.g. with iconv")


def _raw_blocks(name: str) -> Iterator[bytes]:
    if name == STDIN:
        yield from _blocks_of(sys.stdin.buffer)
        return
    try:
        with open(name, "rb") as file:
            if name.endswith(".gz"):
                yield from _blocks_of(cast(BinaryIO, gzip.GzipFile(fileobj=file)))
            elif name.endswith(".xz"):
                yield from _blocks_of(cast(BinaryIO, lzma.LZMAFile(file)))  # noqa: SIM115 - `file` is closed
            elif name.endswith(".zst"):
                yield from _zst_blocks(file, name)
            else:
                yield from _blocks_of(file)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name}: damaged: {error}") from error


def _blocks_of(file: BinaryIO, size: int = BLOCK) -> Iterator[bytes]:
    return iter(lambda: file.read(size), b"")


def _zst_blocks(file: BinaryIO, name: str) -> Iterator[bytes]:
    # Not the library's stream_reader: it takes a file that stops in the middle for a complete one.
    zstandard = require("zstandard", extra="data", purpose=f"reading {name}")
    frame, is_inside = zstandard.ZstdDecompressor().decompressobj(), False
    for raw in _blocks_of(file, BLOCK // 16):
        while raw:
            try:
                yield frame.decompress(raw)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            is_inside, raw = not frame.eof, frame.unused_data
            if not is_inside:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if is_inside:
        raise EOFError("the file stops in the middle of a zstd frame")
