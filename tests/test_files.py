"""Atomic writing: the old file or the new one, whatever goes wrong in between."""

import contextlib
import os
import stat
import subprocess
import sys

import pytest

from nanosprint.files import atomic_file, atomic_write


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("data", [b"\x00\xffbytes", "ümlaut\n"])
def test_writes_and_replaces(tmp_path, data):
    path = tmp_path / "a.bin"
    path.write_text("old")
    atomic_write(path, data)
    assert path.read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, function):
    path = tmp_path / "record.json"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["record.json"]


def test_data_is_on_disk_before_the_name_changes(tmp_path, monkeypatch):
    calls = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), real_fsync(fd))[1])

    def replace(a, b):
        assert os.path.dirname(a) == os.path.dirname(b) == str(tmp_path)
        calls.append("replace")
        real_replace(a, b)

    monkeypatch.setattr(os, "replace", replace)
    atomic_write(tmp_path / "x", "1")
    assert calls == ["fsync", "replace", "fsync"]  # the file, the name, the folder


def test_killed_before_the_rename_keeps_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    code = (
        "import os\nos.replace = lambda *_: os._exit(9)\n"
        f"import nanosprint.files\nnanosprint.files.atomic_write({str(path)!r}, 'new')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert path.read_text() == "old"


def test_streaming_and_exception_in_the_block(tmp_path):
    with atomic_file(tmp_path / "big") as file:
        for i in range(3):
            file.write(bytes([i]))
    assert (tmp_path / "big").read_bytes() == b"\x00\x01\x02"
    with contextlib.suppress(KeyboardInterrupt), atomic_file(tmp_path / "big") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "big").read_bytes() == b"\x00\x01\x02"
    assert names(tmp_path) == ["big"]


def test_readable_as_the_umask_says(tmp_path):
    old = os.umask(0o022)
    try:
        atomic_write(tmp_path / "x", "1")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


def test_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "no" / "x", "1")
