"""A made-up corpus of 200 KB, for tests and first tries: needs no package, no network and no disk to speak of.

Sentences of invented words from a seeded generator. Words are skewed like real ones (Zipf) and each prefers certain
followers, so that a small model has letters, words and a little order to learn.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nanosprint.data.publish import publish
from nanosprint.data.shards import write_shard
from nanosprint.data.tokenizers import BytesTokenizer, save_tokenizer

NUM_DOCUMENTS = 600
NUM_VAL_DOCUMENTS = 60
NUM_WORDS = 240
NUM_FOLLOWERS = 6
SYLLABLE = ((*"bdfgklmnprstv", "st", "tr"), (*"aeiou",), ("", "", *"nrsl"))  # head, vowel, tail


def build_tiny(folder: Path) -> None:
    """Make the dataset `folder`: the bytes of 540 training and 60 validation documents, each after a BOS."""
    tokenizer = BytesTokenizer()
    documents = [np.concatenate([[256], tokenizer.encode(text)]) for text in tiny_documents()]
    with publish(folder) as workshop:
        write_shard(workshop / "tiny_val_000000.bin", np.concatenate(documents[:NUM_VAL_DOCUMENTS]))
        write_shard(workshop / "tiny_train_000001.bin", np.concatenate(documents[NUM_VAL_DOCUMENTS:]))
        save_tokenizer(tokenizer, workshop)


def tiny_documents(seed: int = 1) -> list[str]:
    """The documents as text, the same everywhere: `Random.random` is the one method whose sequence Python promises."""
    draw = random.Random(seed).random
    words = _words(draw)
    followers = [[_zipf(draw, NUM_WORDS) for _ in range(NUM_FOLLOWERS)] for _ in range(NUM_WORDS)]

    def sentence() -> str:
        word = _zipf(draw, NUM_WORDS)
        chosen = [words[word]]
        for _ in range(3 + int(9 * draw())):
            word = followers[word][int(NUM_FOLLOWERS * draw())] if draw() < 0.75 else _zipf(draw, NUM_WORDS)
            chosen.append(words[word])
        return " ".join(chosen).capitalize() + (". " if draw() < 0.9 else "? ")

    return ["".join(sentence() for _ in range(4 + int(14 * draw()))).rstrip() + "\n" for _ in range(NUM_DOCUMENTS)]


def _words(draw: Callable[[], float]) -> list[str]:
    words: dict[str, None] = {}  # keeps the order of invention
    while len(words) < NUM_WORDS:
        syllables = 1 + int(2.4 * draw())
        parts = [part[int(len(part) * draw())] for _ in range(syllables) for part in SYLLABLE]
        words["".join(parts)] = None
    return sorted(words, key=len)  # the frequent ones are short


def _zipf(draw: Callable[[], float], size: int) -> int:
    return int(size ** draw()) - 1  # P(rank <= r) = log(r + 1) / log(size)
