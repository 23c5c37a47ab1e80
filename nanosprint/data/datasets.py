"""From the name in a recipe to a folder of shards.

"shakespeare" and "tiny" are built on first use; published sets and your own must be there already, and the error says
how to get them. `--data DIR` takes any folder with train and val shards, whatever the name.
"""

from collections.abc import Callable
from pathlib import Path

from nanosprint.data.download import PUBLISHED
from nanosprint.data.lock import locked
from nanosprint.data.shakespeare import build_shakespeare
from nanosprint.data.shards import HOW_TO_GET_DATA, SPLITS, ShardError, list_shards
from nanosprint.data.tiny import build_tiny
from nanosprint.data.tokenizers import FILE_NAME

BUILT_IN: dict[str, Callable[[Path], None]] = {"shakespeare": build_shakespeare, "tiny": build_tiny}


def ensure_dataset(name: str, folder: str | Path | None = None, root: Path = Path("data")) -> Path:
    """The folder of the dataset `name`: `folder` if given, else root/name, built first if it is an embedded one.

    Several processes may call it at once. Raises ValueError if there is no data and says how to get it.
    """
    if folder is not None:
        _check(Path(folder), HOW_TO_GET_DATA)
        return Path(folder)
    home = root / name
    if name in BUILT_IN:
        _build_once(home, BUILT_IN[name])
    elif not home.is_dir():
        raise ShardError(f"the data set {name!r} is not here (there is no folder {home}): {how_to_get(name)}")
    _check(home, how_to_get(name))
    return home


def how_to_get(name: str) -> str:
    """The command that brings a dataset of this name."""
    if name in BUILT_IN:
        return f"delete the folder data/{name}, and it is built again"
    if name in PUBLISHED:
        return f"get it with `nanosprint data download {name}`, or name another folder with --data DIR"
    return (
        f"make it with `nanosprint data prepare FILE --out data/{name}`, or name another folder with --data DIR "
        f"(built in: {', '.join(BUILT_IN)}; to download: {', '.join(PUBLISHED)})"
    )


def _check(folder: Path, remedy: str) -> None:
    for split in SPLITS:
        list_shards(folder, split, remedy)


def _build_once(home: Path, build: Callable[[Path], None]) -> None:
    if _is_complete(home):
        return
    with locked(home / ".lock"):
        if not _is_complete(home):  # another process may have built it while this one waited
            build(home)


def _is_complete(home: Path) -> bool:
    return (home / FILE_NAME).exists()  # a build writes it last
