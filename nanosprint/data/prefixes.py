"""Which token each token begins with: the longest proper prefix of its bytes that is a token itself.

A model that expects " running" had better also expect " run"; training can ask for both (the speedrun's record #88).
The table depends on the vocabulary alone, never on data.
"""

from collections.abc import Sequence

import numpy as np

from nanosprint.data.tokenizers import Tokenizer

NONE = -1  # a token without a shorter one that it begins with


def prefixes_of(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """The table of a tokenizer, (vocab_size,) int64; -1 for its BOS and for ids that it does not know."""
    names = [None if t == tokenizer.bos else tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size)]
    return prefix_table(names, vocab_size)


def prefix_table(token_bytes: Sequence[bytes | None], vocab_size: int) -> np.ndarray:
    """For each id below `vocab_size` the id of its longest proper prefix among `token_bytes`, or -1: int64.

    None stands for a token without bytes, which has no prefix and is none. In sorted order a string comes after its
    prefixes, and those of its neighbours that it still begins with form a stack: O(V log V). Of equal strings one
    serves as the prefix of others. Raises ValueError for more tokens than `vocab_size`.
    """
    if len(token_bytes) > vocab_size:
        raise ValueError(f"{len(token_bytes)} tokens do not fit into vocab_size={vocab_size}")
    table = np.full(vocab_size, NONE, np.int64)
    named = sorted((name, token) for token, name in enumerate(token_bytes) if name)
    open_prefixes: list[tuple[bytes, int]] = []
    for name, token in named:
        while open_prefixes and not (name.startswith(open_prefixes[-1][0]) and name != open_prefixes[-1][0]):
            open_prefixes.pop()
        if open_prefixes:
            table[token] = open_prefixes[-1][1]
        open_prefixes.append((name, token))
    return table
