"""Taking turns between processes.

The processes of one run start together and want the same thing: a cache unpacked, a corpus built. One does the work
while the others wait, and then find it done.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is made if need be; wait for it as long as it takes.

    The system releases the lock when the process ends, however it ends, so that a killed one blocks nobody.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def try_lock(path: Path) -> BinaryIO | None:
    """Take an exclusive lock on the file `path` without waiting: the open file that holds it, or None if it is taken.

    The lock lasts until the file is closed or the process ends.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab")  # noqa: SIM115 - the caller keeps it open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
