import lzma

import pytest

from nanosprint.data.info import format_info, info
from nanosprint.data.tokenizers import BytesTokenizer, CharsTokenizer, save_tokenizer


@pytest.fixture
def dataset(write, tmp_path):
    """Documents of 1, 3, 8 (over two shards) and 5 tokens in training, of 2 in validation."""
    write("d/x_train_000001.bin", [256, 256, 1, 2, 256, 1, 2])
    write("d/x_train_000002.bin", [3, 4, 5, 6, 7, 256, 1, 2, 3, 4])
    write("d/x_val_000000.bin", [256, 9])
    save_tokenizer(BytesTokenizer(), tmp_path / "d")
    return tmp_path / "d"


def test_a_dataset(dataset):
    found = info(dataset)
    assert (found.tokens("train"), found.tokens("val"), found.tokens()) == (17, 2, 19)
    assert (found.documents("train"), found.documents("val")) == (4, 1)
    assert found.lengths == (1, 2, 1, 1)  # 1, 2-3, 4-7, 8-15
    assert found.errors == ()
    text = format_info(found)
    for part in ("train: 17 tokens in 4 documents", "val: 2 tokens in 1 documents", "x_train_000002.bin", "bytes"):
        assert part in text


def test_a_single_shard(dataset):
    found = info(dataset / "x_train_000001.bin")
    assert (found.tokens(), found.documents(), found.tokenizer) == (7, 3, "bytes")


def test_a_packed_shard(dataset, tmp_path):
    path = dataset / "x_val_000000.bin"
    (dataset / "x_val_000000.bin.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    assert info(dataset, tmp_path / "cache").tokens("val") == 2


def test_errors_are_listed(dataset, write):
    write("d/x_train_000003.bin", [1, 2], count=5)
    write("d/x_train_000004.bin", [1], magic=7)
    write("d/x_train_000005.bin", [257])
    errors = info(dataset).errors
    assert [len(errors), "truncated" in errors[0], "magic" in errors[1]] == [3, True, True]
    assert "token id 257 is outside the 257 ids of bytes" in errors[2]
    assert format_info(info(dataset)).count("ERROR") == 3


def test_characters_have_no_documents(write, tmp_path):
    write("d/x_train_000001.bin", [0, 1])
    save_tokenizer(CharsTokenizer("ab"), tmp_path / "d")
    found = info(tmp_path / "d")
    assert found.documents() is None
    assert "documents" not in format_info(found)


def test_without_tokenizer_json_gpt2_is_assumed_and_said(write, tmp_path):
    pytest.importorskip("tiktoken")
    write("d/x_train_000001.bin", [50256, 1, 2])
    found = info(tmp_path / "d")
    assert (found.tokenizer, found.tokenizer_assumed, found.documents()) == ("gpt2", True, 1)
    assert "assumed" in format_info(found)


def test_nothing_to_look_at(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        info(tmp_path / "none")
    with pytest.raises(ValueError, match="nanosprint data"):
        info(tmp_path)
