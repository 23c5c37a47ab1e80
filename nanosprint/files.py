"""Writing files that are either the old one or the new one, never half of each.

Whatever a run depends on later (records, requests, checkpoints, pictures) goes through here: the bytes go to a
temporary name in the same folder, are forced to the disk, and only then take the final name. A crash, a full disk
or `kill -9` leaves the previous file as it was.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"


def atomic_write(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Replace the file at `path` by `data` (text is written as UTF-8) in one indivisible move.

    The folder must exist. On any error the old file is untouched and the temporary one is gone; OSError passes through.
    """
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to fill, which takes the name `path` when the block ends without an exception.

    For what is too large to hold as bytes, such as checkpoints. Same promises as `atomic_write`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        # "x" through open() rather than tempfile, whose files only their owner may read
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Force the new name itself to the disk, where the system lets one open a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse; the data itself is already safe
        pass
    finally:
        os.close(descriptor)
