"""Parts of the loop that whole runs do not show."""

from types import SimpleNamespace

import pytest

from nanosprint.recipes import load_recipe
from nanosprint.training.loop import Loop


class Tokens:
    """Three tokens and a BOS: "a", "ab", "b"."""

    bos, vocab_size = 3, 4

    def token_bytes(self, token):
        return (b"a", b"ab", b"b")[token]


@pytest.mark.parametrize(("name", "times"), [("record", 1), ("gpt2", 0)])
def test_the_prefix_table_is_built_once_and_where_it_is_wanted(name, times):
    tables = []
    loop = object.__new__(Loop)
    loop._has_prefixes = False
    loop.run = SimpleNamespace(
        recipe=load_recipe(name),
        data=SimpleNamespace(tokenizer=Tokens()),
        state=SimpleNamespace(model=SimpleNamespace(set_prefixes=tables.append)),
    )
    loop._set_prefixes()
    loop._set_prefixes()
    assert [table[:4].tolist() for table in tables] == [[-1, 0, -1, -1]] * times
