"""Shards written by hand, byte by byte, so that the reader is not tested against the writer only."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(name, tokens, **header): a shard in tmp_path; magic, version, count and extra bytes can be made wrong."""

    def write_by_hand(
        name: str,
        tokens: Sequence[int],
        *,
        magic: int = 20240520,
        version: int = 1,
        count: int | None = None,
        extra: bytes = b"",
    ) -> Path:
        header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens) + extra)
        return path

    return write_by_hand
