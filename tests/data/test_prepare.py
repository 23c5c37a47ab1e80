import io
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nanosprint.data import sources
from nanosprint.data.prepare import prepare
from nanosprint.data.shards import find_shards, open_shard
from nanosprint.data.tokenizers import load_tokenizer


def stream(folder, split):
    return np.concatenate([open_shard(p) for p in find_shards(folder, split)]).tolist()


def json_lines(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["the", "cat", "sat", "é"], size=n)) for n in rng.integers(1, 60, 300)]
    return json_lines(tmp_path / "corpus.jsonl", texts), texts


@pytest.mark.parametrize("kind", ["gpt2", "bytes", "chars"])
def test_every_document_once_in_order(tmp_path, corpus, kind):
    if kind == "gpt2":
        pytest.importorskip("tiktoken")
    path, texts = corpus
    summary = prepare([path], kind, tmp_path / "out", shard_tokens=1000)
    tokenizer = load_tokenizer(tmp_path / "out", kind)
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    expected = [bos + tokenizer.encode(t).tolist() for t in texts]
    val, train = stream(tmp_path / "out", "val"), stream(tmp_path / "out", "train")
    # Deal them again, by the rule of the module's documentation.
    held, kept = [], []
    for document in expected:
        total = len(held) + len(kept)
        to_val = len(held) < total // 10 and len(document) <= total // 2
        (held if to_val else kept).extend(document)
    assert (val, train) == (held, kept)
    assert (summary.train_tokens, summary.val_tokens) == (len(train), len(val))
    assert summary.documents == 300
    assert 0.08 < len(val) / (len(val) + len(train)) < 0.12
    assert summary.text_bytes == sum(len(t.encode()) for t in texts)
    sizes = [len(open_shard(p)) for p in find_shards(tmp_path / "out", "train")]
    assert sizes[:-1] == [1000] * (len(sizes) - 1)
    assert [p.name for p in summary.shards[:2]] == [
        "out_val_000000.bin",
        "out_train_000001.bin" if len(val) <= 1000 else "out_val_000001.bin",
    ]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_the_same_result_whatever_the_number_of_threads(tmp_path, corpus, processes, monkeypatch):
    monkeypatch.setattr("nanosprint.data.prepare.TASK_CHARS", 100)
    path, _ = corpus
    prepare([path], "bytes", tmp_path / "one", name="n", processes=1)
    prepare([path], "bytes", tmp_path / "many", name="n", processes=processes)
    for one in sorted((tmp_path / "one").iterdir()):
        assert one.read_bytes() == (tmp_path / "many" / one.name).read_bytes()


def test_val_tokens_takes_the_first_documents_whole(tmp_path):
    texts = ["a" * 9, "b" * 9, "c" * 9, "d" * 9]
    summary = prepare([json_lines(tmp_path / "c.jsonl", texts)], "bytes", tmp_path / "out", val_tokens=10)
    assert summary.val_documents == 2  # 10 targets need 11 tokens, a document has 10
    assert stream(tmp_path / "out", "val") == [256, *b"a" * 9, 256, *b"b" * 9]
    assert stream(tmp_path / "out", "train") == [256, *b"c" * 9, 256, *b"d" * 9]


def test_no_validation_when_none_is_asked_for(tmp_path):
    summary = prepare([json_lines(tmp_path / "c.jsonl", ["a", "b"])], "bytes", tmp_path / "out", val_tokens=0)
    assert summary.val_tokens == 0
    assert not list((tmp_path / "out").glob("*val*"))


@pytest.mark.parametrize(("val_tokens", "held"), [(None, 100), (30, 31)])
def test_a_single_document_is_held_out_at_its_end(tmp_path, val_tokens, held):
    (tmp_path / "book.txt").write_text("".join(chr(97 + i % 26) for i in range(999)))
    summary = prepare([tmp_path / "book.txt"], "bytes", tmp_path / "out", val_tokens=val_tokens, shard_tokens=300)
    whole = [256, *(97 + i % 26 for i in range(999))]
    assert stream(tmp_path / "out", "train") == whole[:-held]
    assert stream(tmp_path / "out", "val") == whole[-held:]
    assert (summary.documents, summary.val_documents) == (1, 0)
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir()) == []


def test_a_long_document_after_short_ones_is_for_training(tmp_path):
    (tmp_path / "a.txt").write_text("read me")
    (tmp_path / "b.txt").write_text("the book " * 1000)
    summary = prepare([tmp_path / "a.txt", tmp_path / "b.txt"], "bytes", tmp_path / "out")
    assert summary.train_tokens > 8000


def test_too_little_text_for_the_validation_asked_for(tmp_path):
    path = json_lines(tmp_path / "c.jsonl", ["a" * 9, "b" * 9])
    for wanted in (10, 19, 500):
        with pytest.raises(ValueError, match=f"val_tokens={wanted}: the sources have 20 tokens in 2 documents"):
            prepare([path], "bytes", tmp_path / "out", val_tokens=wanted)
    assert not (tmp_path / "out").exists()


def test_a_document_longer_than_several_shards(tmp_path):
    """Cut at every shard's end, and its pieces of a million characters are one document."""
    text = "0123456789 " * 250_000
    (tmp_path / "a.txt").write_text("first\n<|endoftext|>\n" + text)
    summary = prepare([tmp_path / "a.txt"], "bytes", tmp_path / "out", shard_tokens=1_000_000, val_tokens=3)
    assert summary.documents == 2
    assert [len(open_shard(p)) for p in find_shards(tmp_path / "out", "train")] == [1_000_000, 1_000_000, 750_001]
    assert stream(tmp_path / "out", "train") == [256, *text.encode()]


def test_chars_from_standard_input(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("héllo\n".encode() * 50)))
    summary = prepare(["-"], "chars", tmp_path / "out")
    assert summary.vocab_size == 5
    assert load_tokenizer(tmp_path / "out").decode(stream(tmp_path / "out", "train")) == ("héllo\n" * 50)[:270]


def test_refuses_to_overwrite(tmp_path, corpus):
    path, _ = corpus
    prepare([path], "bytes", tmp_path / "out", name="old")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="holds a data set already"):
        prepare([path], "chars", tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    prepare([path], "chars", tmp_path / "out", name="new", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "new_train_000001.bin",
        "new_val_000000.bin",
        "tokenizer.json",
    ]


def test_a_failure_leaves_the_old_dataset(tmp_path, corpus):
    path, _ = corpus
    prepare([path], "bytes", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\n" * 1000 + b"\xff")
    with pytest.raises(ValueError, match="bad byte at offset 5000"):
        prepare([path, bad], "bytes", tmp_path / "out", overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "bpe"}, "unknown tokenizer 'bpe'"),
        ({"val_tokens": -1}, "val_tokens=-1"),
        ({"processes": 0}, "processes=0"),
        ({"shard_tokens": 0}, "shard_tokens=0"),
        ({"name": "a/b"}, "name='a/b'"),
    ],
)
def test_bad_options(tmp_path, corpus, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare([corpus[0]], out=tmp_path / "out", **{"tokenizer": "bytes", **changes})


@pytest.mark.parametrize("kind", ["bytes", "chars"])
def test_no_text(tmp_path, kind):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="the sources hold no text"):
        prepare([tmp_path / "a.txt"], kind, tmp_path / "out")


def test_progress(tmp_path, corpus):
    calls = []
    summary = prepare([corpus[0]], "bytes", tmp_path / "out", progress=lambda *sizes: calls.append(sizes))
    assert calls[-1] == (summary.text_bytes, summary.train_tokens + summary.val_tokens)


MEASURE = """
import resource, sys
from pathlib import Path
from nanosprint.data.prepare import prepare
prepare([sys.argv[1]], "bytes", Path(sys.argv[2]), processes=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_stays_bounded(tmp_path):
    """Ten times the text, one document of 120 MB, takes hardly more memory."""
    line = "All work and no play makes Jack a dull boy.\n" * 1000
    peaks = []
    for name, times in (("small", 270), ("large", 2700)):
        with open(tmp_path / f"{name}.txt", "w") as file:
            for _ in range(times):
                file.write(line)
        command = [sys.executable, "-c", MEASURE, str(tmp_path / f"{name}.txt"), str(tmp_path / name)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] - peaks[0] < 30e6, peaks


def test_sources_are_those_of_the_documentation():
    assert sources.SUFFIXES == (
        ".txt", ".txt.gz", ".txt.xz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet",
    )  # fmt: skip
