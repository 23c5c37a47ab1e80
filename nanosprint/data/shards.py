"""The .bin shard: a header of 256 little-endian int32, then the token ids as little-endian uint16.

The header holds the magic number 20240520, the version 1 and the number of tokens; the rest is zero. llm.c and
modded-nanogpt read and write the same files. A dataset is a folder of them: the name says which split a shard belongs
to (`NAME_val_000000.bin`, `NAME_train_000001.bin`, ...), and sorted by name they make one long stream. A document may
run over the end of a shard into the next. Shards may also be packed as `.bin.xz`; they are unpacked once, into a cache.

Reading is by memory map: opening costs nothing, and the system's page cache is shared between the processes of a host.
"""

import hashlib
import logging
import lzma
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np

from nanosprint.data.lock import locked
from nanosprint.files import atomic_file

log = logging.getLogger(__name__)

MAGIC = 20_240_520
VERSION = 1
HEADER_BYTES = 256 * 4
TOKEN = np.dtype("<u2")
MAX_TOKENS = 2**31 - 1  # the count is an int32
SHARD_TOKENS = 100_000_000  # 200 MB, as the published sets have them
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
HOW_TO_GET_DATA = (
    "get a published set with `nanosprint data download NAME`, "
    "or make one of your own text with `nanosprint data prepare`"
)


class ShardError(ValueError):
    """A shard, or a folder of them, that cannot be used."""


def read_header(path: Path) -> int:
    """The number of tokens that the header of the shard `path` claims.

    Raises ShardError if there is no whole header, or its magic number, version or count is wrong.
    """
    with open(path, "rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise ShardError(f"{path}: {len(raw)} bytes, fewer than the {HEADER_BYTES} of a header: not a token shard")
    magic, version, count = np.frombuffer(raw, "<i4", 3).tolist()
    if magic != MAGIC:
        raise ShardError(f"{path}: magic number {magic} instead of {MAGIC}: not a token shard")
    if version != VERSION:
        raise ShardError(f"{path}: shard version {version}; this program reads version {VERSION}")
    if count < 0:
        raise ShardError(f"{path}: the header claims {count} tokens: it is damaged, fetch or prepare the file again")
    return count


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard as a read-only memory map: (n,) uint16.

    Raises ShardError for a bad header and for a file longer or shorter than the header says.
    """
    count = read_header(path)
    expected, size = HEADER_BYTES + TOKEN.itemsize * count, path.stat().st_size
    if size < expected:
        raise ShardError(
            f"{path}: truncated: {size} bytes, but {count} tokens take {expected}. Fetch or prepare the file again"
        )
    if size > expected:
        raise ShardError(
            f"{path}: {size - expected} bytes too many after its {count} tokens. Fetch or prepare the file again"
        )
    if count == 0:
        return np.empty(0, TOKEN)
    return np.memmap(path, TOKEN, "r", HEADER_BYTES, (count,))


def read_chunks(path: Path, size: int = 1 << 20) -> Iterator[np.ndarray]:
    """The tokens of a shard in copies of at most `size`, (n,) uint16: in one pass, and in little memory."""
    count = read_header(path)
    for start in range(0, count, size):
        yield np.fromfile(path, TOKEN, min(size, count - start), offset=HEADER_BYTES + TOKEN.itemsize * start)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; reads it in pieces, at about 1 GB/s or more."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def header_bytes(count: int) -> bytes:
    """The header of a shard of `count` tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, count
    return header.tobytes()


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one shard, atomically. tokens: (n,) of any integer type, values below 65,536."""
    with atomic_file(path) as file:
        file.write(header_bytes(len(tokens)))
        file.write(np.ascontiguousarray(as_tokens(tokens)).data)


def as_tokens(tokens: np.ndarray) -> np.ndarray:
    """`tokens` as uint16. Raises ValueError for an id that does not fit."""
    if tokens.dtype == TOKEN or not tokens.size:
        return tokens.astype(TOKEN, copy=False)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > 0xFFFF:
        raise ValueError(f"token id {low if low < 0 else high} does not fit the 16 bits that a shard has for it")
    return tokens.astype(TOKEN)


class ShardWriter:
    """Writes a stream of token arrays as shards of exactly `shard_tokens`; the last one is shorter.

    Validation shards count from 0 and training shards from 1. A shard appears under its name when it is complete.
    Nothing is kept in memory. Leaving the `with` block by an exception discards the shard at hand.
    """

    def __init__(self, folder: Path, name: str, split: Split, shard_tokens: int = SHARD_TOKENS) -> None:
        if not 1 <= shard_tokens <= MAX_TOKENS:
            raise ValueError(f"shard_tokens={shard_tokens} must lie between 1 and {MAX_TOKENS}")
        self.folder, self.name, self.split, self.shard_tokens = folder, name, split, shard_tokens
        self.paths: list[Path] = []
        self.num_tokens = 0
        self._index = {"val": 0, "train": 1}[split]
        self._file: BinaryIO | None = None
        self._path = folder
        self._filled = 0
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self._finish()
        else:
            self._closing.__exit__(kind, error, traceback)

    def add(self, tokens: np.ndarray) -> None:
        """Append (n,) token ids of any integer type; splits them over as many shards as they need."""
        tokens = as_tokens(tokens)
        self.num_tokens += len(tokens)
        while len(tokens):
            if self._file is None:
                self._begin()
            assert self._file is not None
            part = tokens[: self.shard_tokens - self._filled]
            self._file.write(np.ascontiguousarray(part).data)
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == self.shard_tokens:
                self._finish()

    def _begin(self) -> None:
        self._path = self.folder / f"{self.name}_{self.split}_{self._index:06d}.bin"
        self._file = self._closing.enter_context(atomic_file(self._path))
        self._file.write(header_bytes(0))  # the count is filled in at the end
        self._filled = 0

    def _finish(self) -> None:
        if self._file is None:
            return
        self._file.seek(0)
        self._file.write(header_bytes(self._filled))
        self._closing.close()
        self._file = None
        self._index += 1
        self.paths.append(self._path)


def split_of(path: Path) -> Split | None:
    """The split a shard's name says: whichever of "train" and "val" comes last in it, so medieval_train is train."""
    train, val = path.name.rfind("train"), path.name.rfind("val")
    if train < 0 and val < 0:
        return None
    return "train" if train > val else "val"


def find_shards(folder: Path, split: Split, cache: Path | None = None) -> list[Path]:
    """The shards of one split in `folder`, sorted by name: `*train*.bin` or `*val*.bin`, and the same packed as `.xz`.

    Packed ones are unpacked once into `cache` (None: a folder under ~/.cache/nanosprint/unpacked that the names, sizes
    and times of the packed files decide), so the dataset folder may be read-only. Raises ShardError if there are none.
    """
    listed = list_shards(folder, split)
    packed = [p for p in listed if p.suffix == ".xz"]
    unpacked = dict(zip(packed, unpack_shards(packed, cache), strict=True)) if packed else {}
    return [unpacked.get(p, p) for p in listed]


def list_shards(folder: Path, split: Split, remedy: str = HOW_TO_GET_DATA) -> list[Path]:
    """As `find_shards`, but leaves packed ones packed. A plain shard wins over the same one packed."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ShardError(f"the data folder {folder} {what}: {remedy}")
    named = [p for p in folder.iterdir() if p.name.endswith((".bin", ".bin.xz")) and not p.name.startswith(".")]
    plain = {p.name for p in named if p.suffix == ".bin"}
    found = [p for p in named if split_of(p) == split and (p.suffix == ".bin" or p.stem not in plain)]
    if not found:
        raise ShardError(f"the data folder {folder} has no *{split}*.bin and no *{split}*.bin.xz: {remedy}")
    return sorted(found, key=lambda p: p.name.removesuffix(".xz"))


def unpack_shards(packed: Sequence[Path], cache: Path | None = None) -> list[Path]:
    """Unpack `.bin.xz` files of one folder into the cache unless they are there; returns the unpacked ones.

    Safe when several processes call it at once: one unpacks, the others wait. Raises ShardError for a damaged file.
    """
    folder = cache or default_cache(packed[0].parent)
    targets = [folder / p.name.removesuffix(".xz") for p in packed]
    if all(t.exists() for t in targets):
        return targets
    try:
        with locked(folder / ".lock"):
            todo = [(p, t) for p, t in zip(packed, targets, strict=True) if not t.exists()]
            log.info("unpacking %d shards of %s into %s (once)", len(todo), packed[0].parent, folder)
            with ThreadPoolExecutor(min(len(todo), os.cpu_count() or 1) or 1) as pool:  # lzma works outside the GIL
                for done, target in enumerate(pool.map(lambda pair: _unpack(*pair), todo), 1):
                    log.info("unpacked %s (%d of %d)", target.name, done, len(todo))
    except OSError as error:
        raise ShardError(
            f"cannot unpack {packed[0].parent} into the cache folder {folder}: {error}. "
            "Free space there, choose another cache folder, or unpack the files yourself with `xz -dk`"
        ) from error
    return targets


def default_cache(folder: Path) -> Path:
    """Where the packed shards of `folder` are unpacked to; another place once one of them has changed."""
    folder = folder.resolve()
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.glob("*.bin.xz"))]
    key = hashlib.sha256(repr((str(folder), facts)).encode()).hexdigest()[:12]
    return Path.home() / ".cache" / "nanosprint" / "unpacked" / f"{folder.name}-{key}"


def _unpack(packed: Path, target: Path) -> Path:
    with atomic_file(target) as out:
        try:
            with lzma.open(packed) as source:
                shutil.copyfileobj(source, out, 1 << 20)
        except (lzma.LZMAError, EOFError) as error:
            raise ShardError(f"{packed}: damaged xz file ({error}): fetch it again") from error
    try:
        open_shard(target)
    except ShardError as error:
        target.unlink()
        raise ShardError(f"{packed}: unpacks to a bad shard: {error}") from None
    return target
