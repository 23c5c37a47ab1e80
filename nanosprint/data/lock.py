"""Taking turns between processes.

The processes of one run start together and want the same thing: a cache unpacked, a corpus built. One does the work
while the others wait, and then find it done.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path


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
