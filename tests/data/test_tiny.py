import hashlib

import numpy as np

from nanosprint.data.shards import open_shard
from nanosprint.data.tiny import build_tiny, tiny_documents
from nanosprint.data.tokenizers import load_tokenizer


def test_the_text_is_the_same_everywhere():
    text = "".join(tiny_documents())
    assert 180_000 < len(text) < 230_000
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "cfbcc4b708beb0e28ab8e0fa35d9ed4fa56497d8ddee0c6b8b8b37d28699d8d4"
    )


def test_the_dataset(tmp_path):
    build_tiny(tmp_path / "tiny")
    train, val = (open_shard(tmp_path / f"tiny/tiny_{name}.bin") for name in ("train_000001", "val_000000"))
    assert (train[0], val[0]) == (256, 256)
    assert (np.count_nonzero(train == 256), np.count_nonzero(val == 256)) == (540, 60)
    decoded = load_tokenizer(tmp_path / "tiny", "bytes").decode([*val, *train])
    assert decoded == "".join("<|endoftext|>" + text for text in tiny_documents())
