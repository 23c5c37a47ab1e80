import hashlib
import importlib.resources
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanosprint.data.tokenizers import (
    BytesTokenizer,
    CharsTokenizer,
    GPT2Tokenizer,
    load_tokenizer,
    save_tokenizer,
    stream_text,
)

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=80)


@pytest.fixture(scope="module")
def gpt2():
    pytest.importorskip("tiktoken")
    return GPT2Tokenizer()


def test_gpt2_known_ids(gpt2):
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert gpt2.encode("hello world").dtype == np.uint16
    assert (gpt2.vocab_size, gpt2.bos) == (50257, 50256)
    assert gpt2.decode([31373, 995]) == "hello world"


def test_gpt2_ranks_are_the_published_ones():
    raw = importlib.resources.files("nanosprint.data").joinpath("assets/gpt2.tiktoken").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


def test_gpt2_pattern_equals_the_published_one(gpt2):
    """Against tiktoken with the pattern as published, on text that stresses white space."""
    tiktoken = pytest.importorskip("tiktoken")
    published = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    other = tiktoken.Encoding(
        "other", pat_str=published, mergeable_ranks=gpt2._encoding._mergeable_ranks, special_tokens={}
    )
    rng = np.random.default_rng(0)
    parts = [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "a",
        "Word",
        "'s",
        "'ll",
        "12",
        "!?",
        "é",
        "中文",
        "\u00a0",
        "\x1c",
        "\u3000",
    ]
    for _ in range(300):
        text = "".join(rng.choice(parts, size=rng.integers(1, 30)))
        assert gpt2.encode(text).tolist() == other.encode_ordinary(text), repr(text)


def test_gpt2_takes_special_text_as_plain_text(gpt2):
    ids = gpt2.encode("<|endoftext|>").tolist()
    assert 50256 not in ids
    assert gpt2.decode(ids) == "<|endoftext|>"


def test_gpt2_survives_a_million_spaces(gpt2):
    assert gpt2.decode(gpt2.encode(" " * 1_000_000)) == " " * 1_000_000


@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT)
def test_round_trips(text):
    pytest.importorskip("tiktoken")
    for tokenizer in (GPT2Tokenizer(), BytesTokenizer(), CharsTokenizer("".join(sorted(set(text) | {"a"})))):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == text
        assert "".join(stream_text(tokenizer, ids)) == text
        assert b"".join(tokenizer.token_bytes(int(i)) for i in ids) == text.encode()


def test_streaming_holds_back_half_a_character():
    pieces = stream_text(BytesTokenizer(), "aé中".encode() + b"\xe4")
    assert list(pieces) == ["a", "é", "中", "\ufffd"]


def test_bytes():
    tokenizer = BytesTokenizer()
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.bos) == (257, 256)


def test_chars():
    tokenizer = CharsTokenizer("\n abé")
    assert tokenizer.encode("éa").tolist() == [4, 2]
    assert (tokenizer.vocab_size, tokenizer.bos) == (5, None)


@pytest.mark.parametrize(("text", "named"), [("abz", "'z'"), ("a\u4e2d", "U+4E2D"), ("A", "'A'")])
def test_a_character_outside_the_vocabulary(text, named):
    with pytest.raises(ValueError, match="is not in the vocabulary") as error:
        CharsTokenizer("abé").encode(text)
    assert named in str(error.value)
    assert "'abé'" in str(error.value)


@pytest.mark.parametrize("chars", ["", "ba", "aab"])
def test_bad_vocabularies(chars):
    with pytest.raises(ValueError, match="characters"):
        CharsTokenizer(chars)


@pytest.mark.parametrize("token", [-1, 257])
def test_ids_outside_the_vocabulary(token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the 257"):
        BytesTokenizer().decode([token])
    with pytest.raises(ValueError, match="outside the 3"):
        CharsTokenizer("abc").decode([0, token])


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), CharsTokenizer("abc")])
def test_save_and_load(tmp_path, tokenizer):
    save_tokenizer(tokenizer, tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (data["kind"], data["vocab_size"]) == (tokenizer.kind, tokenizer.vocab_size)
    loaded = load_tokenizer(tmp_path, tokenizer.kind)
    assert loaded.encode("abc").tolist() == tokenizer.encode("abc").tolist()


def test_load_without_a_file(tmp_path):
    pytest.importorskip("tiktoken")
    assert load_tokenizer(None, "bytes").kind == "bytes"
    assert load_tokenizer(tmp_path).kind == "gpt2"
    with pytest.raises(ValueError, match="chars"):
        load_tokenizer(tmp_path, "chars")
    with pytest.raises(ValueError, match="unknown tokenizer 'bpe'"):
        load_tokenizer(None, "bpe")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"kind": "x"}', '{"kind": "chars"}', '{"kind": "chars", "chars": "ba"}']
)
def test_a_damaged_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_the_wrong_kind(tmp_path):
    save_tokenizer(BytesTokenizer(), tmp_path)
    with pytest.raises(ValueError, match="made with the tokenizer 'bytes', but 'gpt2' is asked for"):
        load_tokenizer(tmp_path, "gpt2")


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(ValueError, match="surrogate"):
        BytesTokenizer().encode("a\ud800")


def test_without_tiktoken_the_message_names_the_extra(monkeypatch):
    from nanosprint.data import tokenizers

    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizers._gpt2_encoding.cache_clear()
    with pytest.raises(ValueError, match=r"nanosprint\[data\]"):
        GPT2Tokenizer()
    tokenizers._gpt2_encoding.cache_clear()
