"""Making a dataset folder in one go.

Shards are written into a hidden folder inside the dataset's own (so on the same disk), and moved into place when all of
them are complete; the tokenizer comes last. An interrupted build leaves the old dataset, or none.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from nanosprint.data.shards import split_of
from nanosprint.data.tokenizers import FILE_NAME


def existing_dataset(folder: Path) -> list[Path]:
    """The files in `folder` that belong to a dataset: shards, packed shards, tokenizer.json."""
    if not folder.is_dir():
        return []
    shards = [p for p in folder.iterdir() if p.name.endswith((".bin", ".bin.xz")) and split_of(p)]
    return sorted(shards) + [p for p in [folder / FILE_NAME] if p.exists()]


@contextlib.contextmanager
def publish(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; what is in it when the block ends well replaces the dataset in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    workshop = folder / f".unfinished-{uuid.uuid4().hex[:12]}"
    workshop.mkdir()
    try:
        yield workshop
        for old in existing_dataset(folder):
            old.unlink()
        for path in sorted(workshop.iterdir(), key=lambda p: (p.name == FILE_NAME, p.name)):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # works only if it is empty: nothing came of it
