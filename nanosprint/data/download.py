"""Fetching published token sets from the Hugging Face hub: GPT-2 tokens, 100 M (200 MB) a file.

huggingface_hub knows the addresses and transfers, with a progress bar; this module chooses the files, skips complete
ones, goes on with half a file at the byte where it stopped, tries again after dropped connections, verifies each file
before it gets its name, and says how to go on when it cannot.
HF_ENDPOINT, read by huggingface_hub itself, names a mirror.
"""

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanosprint.data.shards import ShardError, open_shard
from nanosprint.data.tokenizers import FILE_NAME, saved_kind
from nanosprint.extras import require
from nanosprint.files import atomic_write

log = logging.getLogger(__name__)

ATTEMPTS = 4  # per file; each goes on where the one before stopped
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Published:
    """A token set on the hub: its repository, the stem of its file names, and how many training files it has."""

    repo: str
    stem: str
    num_train: int

    def file_names(self, shards: int | None) -> list[str]:
        """The validation file and the first `shards` training files; None: all of them."""
        count = self.num_train if shards is None else shards
        if not 1 <= count <= self.num_train:
            raise ValueError(f"--shards {count} must lie between 1 and {self.num_train}, as many as {self.repo} has")
        return [f"{self.stem}_val_000000.bin", *(f"{self.stem}_train_{i:06d}.bin" for i in range(1, count + 1))]


PUBLISHED = {
    "fineweb10B": Published("kjj0/fineweb10B-gpt2", "fineweb", 103),
    "fineweb100B": Published("kjj0/fineweb100B-gpt2", "fineweb", 1030),
    "finewebedu10B": Published("kjj0/finewebedu10B-gpt2", "finewebedu", 99),
}


class DownloadError(ValueError):
    """A set that could not be fetched whole; the message says how to go on."""


def download(
    name: str,
    folder: Path,
    shards: int | None = None,
    *,
    pause_s: float = 2.0,
    notify: Callable[[str], None] = log.info,
) -> list[Path]:
    """Fetch the set `name` into `folder`: its validation file and the first `shards` training files (None: all).

    Complete files are skipped; a call after an interruption goes on. Returns the paths. pause_s: seconds before the
    second attempt at a file, doubled before each further one. `notify` gets a line of text per file. Raises ValueError
    for an unknown name or count, DownloadError if the hub cannot be reached or a file stays incomplete.
    """
    if name not in PUBLISHED:
        raise ValueError(f"unknown data set {name!r}; to download there are {', '.join(PUBLISHED)}")
    published = PUBLISHED[name]
    wanted = published.file_names(shards)
    fetch = _fetcher(published.repo)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder)
    for i, path in enumerate((folder / file_name for file_name in wanted), 1):
        if _is_complete(path):
            notify(f"{path.name} is here already ({i} of {len(wanted)})")
            continue
        notify(f"{path.name} ({i} of {len(wanted)})")
        _fetch_verified(fetch, path, published.repo, pause_s, notify)
    return [folder / file_name for file_name in wanted]


def _claim(folder: Path) -> None:
    kind = saved_kind(folder)
    if kind not in (None, "gpt2"):
        raise ValueError(f"{folder} holds a data set made with the tokenizer {kind!r}: choose another folder")
    atomic_write(folder / FILE_NAME, b'{"kind": "gpt2", "vocab_size": 50257}\n')


def _is_complete(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        open_shard(path)
    except ShardError as error:
        log.warning("%s; it will be fetched again", error)
        path.unlink()
        return False
    return True


def _fetch_verified(
    fetch: Callable[[Path], None], path: Path, repo: str, pause_s: float, notify: Callable[[str], None]
) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            fetch(path)
            return
        except (_Dropped, ShardError) as error:
            failure = error
        if attempt < ATTEMPTS:
            notify(f"{path.name}: {failure}; trying again ({attempt + 1} of {ATTEMPTS})")
            time.sleep(pause_s * 2 ** (attempt - 1))
    raise DownloadError(f"could not fetch {path.name} in {ATTEMPTS} attempts: {failure}. {_how_to_go_on(repo, path)}")


def _how_to_go_on(repo: str, path: Path) -> str:
    return (
        f"What has arrived is kept in {path.parent}: give the same command again to go on from there. Offline? Set "
        f"HF_ENDPOINT to a mirror you can reach, or fetch the files from https://huggingface.co/datasets/{repo} on "
        f"another machine and copy them into {path.parent}"
    )


class _Dropped(Exception):
    """The connection failed; another attempt may work."""


def _fetcher(repo: str) -> Callable[[Path], None]:
    """A function that fetches one file of `repo`, going on with the part of it that is there."""
    hub = require("huggingface_hub", extra="data", purpose="data download")
    errors = require("huggingface_hub.errors", extra="data", purpose="data download")
    # Its HTTP client, and so the class of a transport error, differs between versions; this is always its base.
    transport_errors: tuple[type[BaseException], ...] = (OSError, *errors.HfHubHTTPError.__bases__)

    def fetch(path: Path) -> None:
        try:
            _fetch_into(path, hub.hf_hub_url(repo, path.name, repo_type="dataset"))
        except (errors.EntryNotFoundError, errors.RepositoryNotFoundError) as error:
            raise DownloadError(f"the hub has no {path.name} in {repo}: {_first_line(error)}") from error
        except errors.OfflineModeIsEnabled as error:
            raise DownloadError(f"HF_HUB_OFFLINE forbids it: unset it. {_how_to_go_on(repo, path)}") from error
        except transport_errors as error:
            if getattr(error, "errno", None) in NOT_WRITABLE:
                raise DownloadError(f"cannot write {path}: {error}") from error
            raise _Dropped(_first_line(error)) from error

    return fetch


def _fetch_into(path: Path, url: str) -> None:
    """Fetch `url` into `path`. A part stays under a hidden name that holds the content's ETag, for the next attempt.

    hf_hub_download would do, but since version 1 it throws the part of an interrupted file away; its inner `http_get`
    goes on at any byte.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    facts = get_hf_file_metadata(url)
    tag = re.sub(r"[^0-9A-Za-z]", "", facts.etag or "none")[:40]
    part = path.with_name(f".{path.name}.{tag}.part")
    headers = build_hf_headers() if facts.location == url else {}  # no credentials for another host
    with open(part, "ab") as file:
        if facts.size is not None and file.tell() > facts.size:
            file.truncate(0)
        http_get(
            facts.location,
            file,
            resume_size=file.tell(),
            headers=headers,
            expected_size=facts.size,
            displayed_filename=path.name,
        )
        file.flush()
        os.fsync(file.fileno())
    try:
        open_shard(part)
    except ShardError as error:
        part.unlink()  # complete by its size, yet wrong: going on with it would not help
        raise ShardError(str(error).replace(str(part), str(path))) from None
    os.replace(part, path)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
