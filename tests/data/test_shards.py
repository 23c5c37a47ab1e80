import contextlib
import hashlib
import lzma
import multiprocessing
import os
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanosprint.data import shards
from nanosprint.data.shards import ShardError, ShardWriter, checksum, find_shards, open_shard, read_header, write_shard


def test_reads_a_shard_written_by_hand(write):
    path = write("a_train_000001.bin", [1, 2, 65535])
    assert read_header(path) == 3
    tokens = open_shard(path)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [1, 2, 65535]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 5


def test_writes_what_others_can_read(tmp_path):
    path = tmp_path / "x_val_000000.bin"
    write_shard(path, np.array([7, 300, 50256]))
    raw = path.read_bytes()
    assert struct.unpack("<256i", raw[:1024]) == (20240520, 1, 3, *[0] * 253)
    assert struct.unpack("<3H", raw[1024:]) == (7, 300, 50256)


def test_an_empty_shard_is_legal(write):
    assert len(open_shard(write("a_val_0.bin", []))) == 0


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"magic": 20240519}, "magic number 20240519 instead of 20240520"),
        ({"version": 2}, "version 2"),
        ({"count": 4}, "truncated"),
        ({"count": 2}, "2 bytes too many"),
        ({"count": -1}, "claims -1 tokens"),
        ({"extra": b"\0"}, "1 bytes too many"),
    ],
)
def test_damaged_shards(write, header, message):
    path = write("bad_train_000001.bin", [1, 2, 3], **header)
    with pytest.raises(ShardError, match=message) as error:
        open_shard(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 1, 1023])
def test_header_larger_than_the_file(tmp_path, size):
    path = tmp_path / "short.bin"
    path.write_bytes(b"\0" * size)
    with pytest.raises(ShardError, match=f"{size} bytes, fewer than the 1024 of a header"):
        open_shard(path)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    shard_tokens=st.integers(1, 17),
    split=st.sampled_from(["train", "val"]),
)
def test_writer_cuts_the_stream_exactly(tmp_path_factory, lengths, shard_tokens, split):
    folder = tmp_path_factory.mktemp("w")
    stream = np.arange(sum(lengths), dtype=np.uint16)
    with ShardWriter(folder, "n", split, shard_tokens) as writer:
        position = 0
        for length in lengths:
            writer.add(stream[position : position + length])
            position += length
    first = {"train": 1, "val": 0}[split]
    assert [p.name for p in writer.paths] == [f"n_{split}_{first + i:06d}.bin" for i in range(len(writer.paths))]
    sizes = [len(open_shard(p)) for p in writer.paths]
    assert sizes[:-1] == [shard_tokens] * len(sizes[:-1])
    assert all(sizes)
    read = [t for p in writer.paths for t in open_shard(p).tolist()]
    assert read == stream.tolist()
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in writer.paths)


def test_an_interrupted_writer_leaves_only_complete_shards(tmp_path):
    writer = ShardWriter(tmp_path, "n", "train", 10)
    with contextlib.suppress(KeyboardInterrupt), writer:
        writer.add(np.arange(15))
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["n_train_000001.bin"]


@pytest.mark.parametrize("token", [-1, 65536])
def test_an_id_that_does_not_fit(tmp_path, token):
    with pytest.raises(ValueError, match=f"token id {token} does not fit"):
        write_shard(tmp_path / "x.bin", np.array([0, token]))
    assert not list(tmp_path.iterdir())


def test_checksum(write):
    path = write("a_train_000001.bin", range(5000))
    assert checksum(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_finds_and_sorts_by_split(write, tmp_path):
    for name in ("b_train_000002.bin", "b_train_000001.bin", "b_val_000000.bin", "notes.txt", ".x_train_1.bin"):
        write(name, [1])
    assert [p.name for p in find_shards(tmp_path, "train")] == ["b_train_000001.bin", "b_train_000002.bin"]
    assert [p.name for p in find_shards(tmp_path, "val")] == ["b_val_000000.bin"]


def test_a_name_with_both_words_belongs_to_one_split(write, tmp_path):
    """The name `medieval` holds "val": its training shards must not be validated on."""
    write("medieval_train_000001.bin", [1])
    write("medieval_val_000000.bin", [2])
    assert [p.name for p in find_shards(tmp_path, "train")] == ["medieval_train_000001.bin"]
    assert [p.name for p in find_shards(tmp_path, "val")] == ["medieval_val_000000.bin"]


@pytest.mark.parametrize("case", ["missing", "empty", "file"])
def test_no_data(tmp_path, case):
    folder = tmp_path / "d"
    if case == "empty":
        folder.mkdir()
    if case == "file":
        folder.write_text("")
    with pytest.raises(ShardError, match=r"nanosprint data (download|prepare)") as error:
        find_shards(folder, "train")
    assert str(folder) in str(error.value)
    if case == "empty":
        assert "*train*.bin" in str(error.value)


def pack(path, remove=True):
    packed = path.with_name(path.name + ".xz")
    packed.write_bytes(lzma.compress(path.read_bytes(), preset=0))
    if remove:
        path.unlink()
    return packed


def test_packed_shards_are_unpacked_once(write, tmp_path):
    for i in (1, 2, 3):
        pack(write(f"d/a_train_{i:06d}.bin", range(i * 10)))
    cache = tmp_path / "cache"
    (tmp_path / "d").chmod(0o555)
    try:
        found = find_shards(tmp_path / "d", "train", cache)
        assert [len(open_shard(p)) for p in found] == [10, 20, 30]
        assert {p.parent for p in found} == {cache}
        times = [p.stat().st_mtime_ns for p in found]
        assert [p.stat().st_mtime_ns for p in find_shards(tmp_path / "d", "train", cache)] == times
    finally:
        (tmp_path / "d").chmod(0o755)


def test_the_default_cache_follows_the_packed_files(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    packed = pack(write("d/a_train_000001.bin", [1, 2]))
    first = find_shards(tmp_path / "d", "train")[0]
    assert first.is_relative_to(tmp_path / "home/.cache/nanosprint/unpacked")
    packed.write_bytes(lzma.compress(write("new.bin", [3, 4, 5]).read_bytes()))
    os.utime(packed, ns=(1, time.time_ns()))
    second = find_shards(tmp_path / "d", "train")[0]
    assert second.parent != first.parent
    assert open_shard(second).tolist() == [3, 4, 5]


def test_both_splits_share_the_default_cache(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("a_train_000001.bin", "a_val_000000.bin"):
        pack(write(f"d/{name}", [1, 2]))
    assert find_shards(tmp_path / "d", "train")[0].parent == find_shards(tmp_path / "d", "val")[0].parent


def test_a_plain_shard_wins_over_the_same_one_packed(write, tmp_path):
    plain = write("a_train_000001.bin", [1])
    pack(plain, remove=False)
    assert find_shards(tmp_path, "train", tmp_path / "cache") == [plain]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "bad shard inside"])
def test_corrupt_xz(write, tmp_path, damage):
    path = write("d/a_train_000001.bin", range(2000), **({"magic": 3} if damage == "bad shard inside" else {}))
    packed = pack(path)
    if damage == "truncated":
        packed.write_bytes(packed.read_bytes()[:-40])
    if damage == "garbage":
        packed.write_bytes(b"not xz at all")
    with pytest.raises(ShardError, match=r"a_train_000001\.bin\.xz") as error:
        find_shards(tmp_path / "d", "train", tmp_path / "cache")
    assert ("magic" if damage == "bad shard inside" else "damaged xz") in str(error.value)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_an_unwritable_cache_says_what_to_do(write, tmp_path):
    pack(write("d/a_train_000001.bin", [1]))
    (tmp_path / "blocked").write_text("a file, where a folder should be")
    with pytest.raises(ShardError, match=r"cannot unpack .* into the cache folder"):
        find_shards(tmp_path / "d", "train", tmp_path / "blocked" / "cache")


def _unpack_in_another_process(folder, cache, results):
    results.put([open_shard(p).sum().item() for p in find_shards(folder, "train", cache)])


def test_several_processes_unpack_at_once(write, tmp_path):
    for i in (1, 2):
        pack(write(f"d/a_train_{i:06d}.bin", np.arange(30_000) * i % 60_000))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    args = (tmp_path / "d", tmp_path / "cache", results)
    workers = [context.Process(target=_unpack_in_another_process, args=args) for _ in range(3)]
    for worker in workers:
        worker.start()
    sums = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join()
    assert sums[0] == sums[1] == sums[2]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [
        ".lock",
        "a_train_000001.bin",
        "a_train_000002.bin",
    ]


def test_default_shard_size_is_that_of_the_published_sets():
    assert shards.SHARD_TOKENS == 100_000_000
