"""N-gram tables against dictionaries and loops; sparse gradients against dense ones."""

import random

import pytest
import torch

from nanosprint.config import NgramSpec
from nanosprint.model.gpt import GPT
from nanosprint.model.techniques.ngram import NgramEmbedding
from nanosprint.recipes import load_recipe


def embedding(orders=(2, 3, 5), rows=64, vocab_size=7, dim=3):
    module = NgramEmbedding(NgramSpec(orders=orders, rows=rows), vocab_size, dim).double()
    with torch.no_grad():
        module.table.normal_(generator=torch.Generator().manual_seed(0))
    return module


def tokens(*shape, vocab_size=7, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def test_the_same_context_gives_the_same_row_and_small_tables_are_exact():
    module = embedding()
    assert module.sizes == [49, 64, 64]  # 7^2 fits into 64 rows, 7^3 does not
    ids = tokens(3, 200)
    rows = module.rows(ids)
    assert rows.shape == (3, 196, 3)
    for k, order in enumerate((2, 3, 5)):
        row_of = {}
        for b in range(3):
            for t in range(196):
                context = tuple(ids[b, t + 4 - order + 1 : t + 5].tolist())
                row = rows[b, t, k].item()
                assert row_of.setdefault(context, row) == row
        first, size = sum(module.sizes[:k]), module.sizes[k]
        assert all(first <= row < first + size for row in row_of.values())
        if order == 2:
            assert len(set(row_of.values())) == len(row_of)  # no two pairs share


def test_hashed_rows_are_spread():
    """Against what throwing contexts at random would give: the number of occupied rows within four standard errors."""
    module = embedding(orders=(4,), rows=1024, vocab_size=50)
    ids = tokens(1, 2000, vocab_size=50)
    rows = module.rows(ids)[0, :, 0].tolist()
    draw = random.Random(0)
    trials = [len({draw.randrange(1024) for _ in rows}) for _ in range(50)]
    mean = sum(trials) / 50
    spread = (sum((t - mean) ** 2 for t in trials) / 49) ** 0.5
    assert abs(len(set(rows)) - mean) < 4 * spread


def test_order_of_tokens_matters():
    module = embedding(orders=(3, 5), rows=8)
    a, b = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 2, 3, 5, 4]])
    assert not torch.equal(module.rows(a)[..., 0], module.rows(b)[..., 0])  # 7^3 contexts, 8 rows: these two differ
    exact = embedding(orders=(2,))
    assert not torch.equal(exact.rows(a), exact.rows(b))


def test_sum_of_rows_and_its_gradient():
    module = embedding()
    ids = tokens(2, 9)
    out = module(ids)
    rows = module.rows(ids)
    expected = torch.stack([torch.stack([module.table[rows[b, t]].sum(0) for t in range(5)]) for b in range(2)])
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    dense = torch.zeros_like(module.table)
    for b in range(2):
        for t in range(5):
            for row in rows[b, t].tolist():
                dense[row] += weight[b, t]
    assert module.table.grad.is_sparse
    torch.testing.assert_close(module.table.grad.to_dense(), dense)


def test_zero_tables_are_the_identity_and_history_reaches_before_the_row():
    plain = GPT(load_recipe("tiny").model, compute_dtype=torch.float64).double()
    fed = GPT(load_recipe("tiny", ['model.ngrams={"orders": [2, 3]}']).model, compute_dtype=torch.float64).double()
    plain.init_weights(1)
    fed.init_weights(1)
    ids = tokens(2, 2 + 8, vocab_size=257)
    torch.testing.assert_close(fed(ids), plain(ids[:, 2:]))
    with torch.no_grad():
        fed.embed.ngrams.table.normal_()
    changed = ids.clone()
    changed[:, 0] += 1
    difference = (fed.hidden(ids) - fed.hidden(changed)).abs().amax(-1)
    assert difference[:, 0].min() > 0  # its three tokens changed; nothing else looks that far back
    assert difference[:, 1:].max() == 0
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 257
    assert (fed.hidden(ids) - fed.hidden(changed)).abs().amax(-1)[:, :-1].max() == 0  # the future stays unseen


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('{"orders": []}', "expected different numbers of tokens"),
        ('{"orders": [1, 2]}', "2 or more"),
        ('{"orders": [3, 3]}', "different"),
        ('{"rows": 1000}', "model.ngrams.rows=1000 is not a power of two: try 1024"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("shakespeare", [f"model.ngrams={spec}"])
