import random

import numpy as np
import pytest

from nanosprint.data.prefixes import prefix_table, prefixes_of
from nanosprint.data.tokenizers import BytesTokenizer, CharsTokenizer


def by_trying(names, vocab_size):
    """Every prefix of every token, the longest first."""
    ids = {name: token for token, name in reversed(list(enumerate(names))) if name}
    table = [-1] * vocab_size
    for token, name in enumerate(names):
        for length in range(len(name or b"") - 1, 0, -1):
            if name[:length] in ids:
                table[token] = ids[name[:length]]
                break
    return np.array(table)


def test_random_vocabularies():
    rng = random.Random(0)
    for size in (1, 7, 300):
        names = list({bytes(rng.choices(b"ab\x00\xff", k=rng.randint(1, 7))): None for _ in range(size)})
        rng.shuffle(names)
        names.insert(len(names) // 2, None)
        table = prefix_table(names, len(names) + 3)
        assert table.dtype == np.int64
        np.testing.assert_array_equal(table, by_trying(names, len(names) + 3))
    assert (prefix_table([b"a", b"b", b"ab", b"abab", b"aba"], 6) == [-1, -1, 0, 4, 2, -1]).all()


def test_gpt2():
    pytest.importorskip("tiktoken")
    from nanosprint.data.tokenizers import GPT2Tokenizer

    tokenizer = GPT2Tokenizer()
    table = prefixes_of(tokenizer, 50_304)
    names = [tokenizer.token_bytes(t) for t in range(50_256)]
    np.testing.assert_array_equal(table[:50_256], by_trying(names, 50_256))
    assert (np.flatnonzero(table < 0) == [*range(256), *range(50_256, 50_304)]).all()


def test_other_tokenizers_have_none():
    assert (prefixes_of(BytesTokenizer(), 260) == -1).all()
    assert (prefixes_of(CharsTokenizer("ab"), 2) == -1).all()


def test_too_many_tokens():
    with pytest.raises(ValueError, match=r"3 tokens.*vocab_size=2"):
        prefix_table([b"a", b"b", b"c"], 2)


def test_equal_strings():
    table = prefix_table([b"a", b"a", b"ab"], 3)
    assert (table[:2] == -1).all()
    assert table[2] in (0, 1)
