import gzip
import io
import json
import lzma
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanosprint.data import sources
from nanosprint.data.sources import find_sources, read_pieces, split_text
from nanosprint.data.tokenizers import GPT2Tokenizer


def documents(source, column=None):
    found = []
    for piece in read_pieces(source, column):
        if piece.starts:
            found.append("")
        found[-1] += piece.text
    return found


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def packed(path, data):
    if path.suffix == ".gz":
        return write(path, gzip.compress(data))
    if path.suffix == ".xz":
        return write(path, lzma.compress(data))
    if path.suffix == ".zst":
        return write(path, pytest.importorskip("zstandard").ZstdCompressor().compress(data))
    return write(path, data)


def parquet(path, columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ndocument\n", ["one\ndocument\n"]),
        ("a\n<|endoftext|>\nb\n", ["a\n", "b\n"]),
        ("<|endoftext|>\na\n<|endoftext|>\n<|endoftext|>\nb", ["a\n", "b"]),
        ("a\r\n<|endoftext|>\r\nb", ["a\r\n", "b"]),
        ("a\nb <|endoftext|> c\n", ["a\nb <|endoftext|> c\n"]),
        ("a\n<|endoftext|>", ["a\n"]),
        ("\ufeffa", ["a"]),
        ("", []),
    ],
)
def test_text_files(tmp_path, text, expected):
    assert documents(write(tmp_path / "a.txt", text)) == expected


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_packed_files(tmp_path, suffix):
    text = "".join(f"line {i} é\n" for i in range(1000))
    assert documents(packed(tmp_path / f"a.txt{suffix}", text.encode())) == [text]
    rows = "\n".join(json.dumps({"text": f"document {i}\u2028\n"}) for i in range(1000))
    assert documents(packed(tmp_path / f"a.jsonl{suffix}", rows.encode())) == [
        f"document {i}\u2028\n" for i in range(1000)
    ]


def test_several_zst_frames(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.ZstdCompressor().compress(part) for part in (b"one ", b"two ", b"three")]
    assert documents(write(tmp_path / "a.txt.zst", b"".join(frames))) == ["one two three"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_damaged_packed_files(tmp_path, suffix, damage):
    path = packed(tmp_path / f"a.txt{suffix}", b"".join(b"%d\n" % (i * i) for i in range(20_000)))
    write(path, path.read_bytes()[:-500] if damage == "truncated" else b"nothing of the kind" * 9)
    with pytest.raises(ValueError, match="damaged") as error:
        documents(path)
    assert str(path) in str(error.value)


def test_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"id": list(range(600)), "text": [f"doc {i}" for i in range(600)]})
    assert documents(path) == [f"doc {i}" for i in range(600)]
    path = parquet(tmp_path / "b.parquet", {"body": ["x", "", "y"]})
    assert documents(path, "body") == ["x", "y"]


def test_parquet_without_the_column_names_those_there_are(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"id": [1], "content": ["x"]})
    with pytest.raises(ValueError, match=r"no column 'text', but 'id', 'content'.*--text-column") as error:
        documents(path)
    assert str(path) in str(error.value)


def test_bad_parquet(tmp_path):
    with pytest.raises(ValueError, match="row 2: 'text' holds NoneType"):
        documents(parquet(tmp_path / "a.parquet", {"text": ["x", None]}))
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"b\.parquet: not a readable parquet file"):
        documents(write(tmp_path / "b.parquet", "no parquet" * 10))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', "line 2: no key 'text', but 'body'.*--text-column"),
        ('{"text": "x"', "line 2: not valid JSON"),
        ('["x"]', "line 2: expected a JSON object with the key 'text', found a list"),
        ('{"text": 5}', "line 2: 'text' holds int"),
        ('{"text": "\\ud800"}', "line 2: 'text' holds half a surrogate pair"),
    ],
)
def test_bad_json_lines(tmp_path, line, message):
    with pytest.raises(ValueError, match=message) as error:
        documents(write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line + "\n"))
    assert "a.jsonl" in str(error.value)


def test_json_line_numbers_over_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 64)
    rows = [json.dumps({"text": "x" * (i % 40)}) for i in range(200)]
    with pytest.raises(ValueError, match="line 201: not valid"):
        documents(write(tmp_path / "a.jsonl", "\n".join([*rows, "{"])))


@pytest.mark.parametrize("offset", [0, 3, 4095, 4096, 70_000])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_text_that_is_not_utf8(tmp_path, offset, suffix, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 4096)
    raw = bytearray(b"abc defg\n" * 10_000)
    raw[offset] = 0xFF
    with pytest.raises(ValueError, match=f"not UTF-8 text: bad byte at offset {offset}\\b") as error:
        documents(packed(tmp_path / f"a.txt{suffix}", bytes(raw)))
    assert "a.txt" in str(error.value)


def test_text_that_stops_inside_a_character(tmp_path):
    with pytest.raises(ValueError, match="offset 4"):
        documents(write(tmp_path / "a.txt", b"abc\n" + "é".encode()[:1]))


def test_characters_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 7)
    text = "aé中😀\n" * 50
    assert documents(write(tmp_path / "a.txt", text)) == [text]


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.sampled_from("ab \n\t\u00a0\x1c!"), max_size=400), block=st.integers(1, 40))
def test_pieces_have_the_tokens_of_the_whole(text, block):
    pytest.importorskip("tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        patch.setattr(sources, "LONGEST_PIECE", 10_000)
        pieces = split_text(text)
    assert "".join(pieces) == text
    tokenizer = GPT2Tokenizer()
    assert [t for piece in pieces for t in tokenizer.encode(piece).tolist()] == tokenizer.encode(text).tolist()


def test_a_long_text_file_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    """Pieces of a streamed file, whose blocks end where lines end, which is not always safe to cut."""
    pytest.importorskip("tiktoken")
    monkeypatch.setattr(sources, "BLOCK", 50)
    text = "word\n\n\nother  words\n" * 100 + "x" * 300 + "\n\n" + "y" * 100
    pieces = list(read_pieces(write(tmp_path / "a.txt", text)))
    assert len(pieces) > 10
    tokenizer = GPT2Tokenizer()
    assert [t for p in pieces for t in tokenizer.encode(p.text).tolist()] == tokenizer.encode(text).tolist()


def test_text_without_white_space_is_cut_in_the_end(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 10)
    monkeypatch.setattr(sources, "LONGEST_PIECE", 100)
    assert [len(p) for p in split_text("x" * 250)] == [100, 100, 50]


def stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def test_standard_input(monkeypatch):
    stdin(monkeypatch, b"a\n<|endoftext|>\nb\n")
    assert documents("-") == ["a\n", "b\n"]
    stdin(monkeypatch, b'{"body": "x"}\n{"body": "y"}\n')
    assert documents("-", "body") == ["x", "y"]


def test_folders_are_read_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "b/1.jsonl", "a.txt.gz", "notes.md"):
        (tmp_path / name).write_text("x")
    assert [str(p.relative_to(tmp_path)) for p in find_sources([tmp_path])] == ["a.txt.gz", "b/1.jsonl", "b/2.txt"]


def test_sources_that_cannot_be_used(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.pdf").write_text("x")
    for source, message in [("empty", "holds no text files"), ("a.pdf", "unknown kind"), ("none", "does not exist")]:
        with pytest.raises(ValueError, match=message):
            find_sources([tmp_path / source])
    with pytest.raises(ValueError, match="no text to prepare"):
        find_sources([])
    with pytest.raises(ValueError, match="only once"):
        find_sources(["-", "-"])


@pytest.mark.parametrize(("module", "name"), [("zstandard", "a.txt.zst"), ("pyarrow", "a.parquet")])
def test_missing_packages_name_the_extra(tmp_path, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'nanosprint\[data\]'"):
        documents(write(tmp_path / name, b"x"))
