"""The hashed table with orders beyond pairs, against Python's integers one token at a time."""

from dataclasses import replace

import pytest
import torch

from nanosprint.config import BigramSpec, Execution
from nanosprint.generate import generate
from nanosprint.model import gpt
from nanosprint.model.gpt import GPT
from nanosprint.model.techniques import bigram
from nanosprint.model.techniques.bigram import BigramTable, bigram_rows, ngram_places, sign_rows
from nanosprint.ops.embedding import sort_rows
from nanosprint.recipes import load_recipe
from nanosprint.training.batch import random_input
from nanosprint.training.distributed import World
from nanosprint.training.resolve import resolve
from nanosprint.training.setup import build_state
from nanosprint.training.step import backward_of, train_step
from tests.recipes.test_ladder import small

SPEC = BigramSpec(rows=50, signs=8, orders=(2, 3, 5), longer_rows=37)


def signed(x):
    """An integer of any size as 64-bit arithmetic leaves it."""
    return (x + 2**63) % 2**64 - 2**63


def scrambled(x):
    return signed((x ^ (x >> 29)) * 0x9E3779B97F4A7C15)


def highest(x, rows):
    return (x % 2**64 >> 33) * rows // 2**31


def slow_places(row, order, rows, signs):
    out = []
    for t in range(len(row)):
        if t < order - 1:
            out.append((rows - 1, 0))
            continue
        hashed = 0
        for token in reversed(row[t - order + 1 : t + 1]):
            hashed = signed(hashed * 0x2545F4914F6CDD1D + token + 1)
        mixed = scrambled(hashed)
        out.append((highest(mixed, rows - 1), highest(scrambled(mixed), signs)))
    return out


def drawn(*shape, vocab_size=50_257, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def filled(spec=SPEC, dim=6, dtype=torch.float64):
    table = BigramTable(spec, dim).to(dtype)
    table.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(1))
    return table


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint16])
@pytest.mark.parametrize(("order", "length"), [(3, 33), (5, 33), (3, 1), (3, 2), (5, 3), (4, 4)])
def test_places_by_brute_force(order, length, dtype):
    tokens = drawn(3, length)
    tokens[0, 0] = 50_256
    for rows in (2, 1000, 377_279, 2**31):
        got, signs = ngram_places(tokens.to(dtype), order, rows, 8192)
        expected = [slow_places(row, order, rows, 8192) for row in tokens.tolist()]
        assert torch.stack([got, signs], dim=-1).tolist() == [[list(pair) for pair in row] for row in expected]
    assert ngram_places(tokens.to(dtype), order, 50, 0)[1] is None


@pytest.mark.parametrize("signs", [0, 8])
def test_sum_over_orders(signs):
    spec = replace(SPEC, signs=signs)
    table, tokens = filled(spec), drawn(3, 9)
    got = table(tokens, torch.float64)
    assert table.weight.shape == (50 + 2 * 37, 6)
    pairs, pair_signs = bigram_rows(tokens, 50), sign_rows(tokens, signs) if signs else None
    for b, row in enumerate(tokens.tolist()):
        triples, fives = (slow_places(row, order, 37, max(signs, 1)) for order in (3, 5))
        for t in range(9):
            places = [(int(pairs[b, t]), int(pair_signs[b, t]) if signs else 0)]
            places += [(50 + triples[t][0], triples[t][1]), (50 + 37 + fives[t][0], fives[t][1])]
            expected = sum(table.weight[place] * (table.signs[sign] if signs else 1) for place, sign in places)
            torch.testing.assert_close(got[b, t], expected)


@pytest.mark.parametrize("sort", [False, True])
def test_gradient_is_that_of_a_dense_sum(sort, monkeypatch):
    """By torch's gradient, and by the operator that a GPU has, which is for fp32 and narrower."""
    if sort:
        monkeypatch.setattr(bigram, "rows_of", sort_rows)
    table, tokens = filled(dtype=torch.float32 if sort else torch.float64), drawn(2, 40, vocab_size=5)
    weight = torch.randn(2, 40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (table(tokens, table.weight.dtype) * weight.to(table.weight.dtype)).sum().backward()
    rows, signs = table.places(tokens)
    expected = torch.zeros(SPEC.size, 6, dtype=torch.float64)
    for k in range(3):
        for b in range(2):
            expected.index_add_(0, rows[k, b], weight[b] * table.signs[signs[k, b]])
    torch.testing.assert_close(table.weight.grad.double(), expected, rtol=1e-5 if sort else 1e-12, atol=1e-5 * sort)
    assert (expected[:50].any(), expected[50:87].any(), expected[87:].any()) == (True, True, True)


def test_only_a_rows_own_tokens_count_and_none_that_come_later():
    table, tokens = filled(), drawn(2, 12)
    before = table(tokens, torch.float64)
    for at, expected in ((0, [1, 2, 4]), (6, [6, 7, 8, 9, 10]), (11, [11])):
        changed = tokens.clone()
        changed[0, at] = (changed[0, at] + 1) % 50_257
        moved = (table(changed, torch.float64) - before).abs().amax(-1)
        assert not moved[1].any()
        # The first token is seen by the sign of the pair behind it, by the first triple and by the first five.
        assert moved[0].nonzero().flatten().tolist() == expected


def test_places_are_spread_and_signs_tell_apart():
    """Over 20,000 sequences of neighbouring ids, the least random there are, in as many rows.

    Random places would fill 1 - 1/e of the rows, with a standard error of 0.0022; of pairs that share a row, one in 64
    would share a sign.
    """
    tokens = torch.stack([a + torch.arange(20_003) // b for a in (0, 40_000) for b in (1, 7)]) % 50_257
    rows, signs = ngram_places(tokens[:1], 3, 20_001, 64)
    assert abs(rows[0, 2:].unique().numel() / 20_000 - (1 - 2.718281828**-1)) < 4 * 0.0022
    both = torch.stack([rows[0, 2:], signs[0, 2:]], dim=-1)
    filled_rows, counts = rows[0, 2:].unique(return_counts=True)
    assert filled_rows.max() < 20_000
    sharing = int((counts * (counts - 1) // 2).sum())
    _, counts = both.unique(dim=0, return_counts=True)
    same = int((counts * (counts - 1) // 2).sum())
    assert abs(same - sharing / 64) < 4 * (sharing / 64) ** 0.5


def test_pairs_alone_are_what_they_were():
    spec = replace(SPEC, orders=(2,), longer_rows=0)
    table, tokens = filled(spec), drawn(3, 9)
    rows, signs = table.places(tokens)
    assert torch.equal(rows, bigram_rows(tokens, 50))
    assert torch.equal(signs, sign_rows(tokens, 8))
    assert table.weight.shape == (50, 6)
    longer = filled()
    with torch.no_grad():
        longer.weight[:50], longer.signs[:] = table.weight, table.signs
        longer.weight[50:] = 0
    assert torch.equal(longer(tokens, torch.float64), table(tokens, torch.float64))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"orders": []}, r"orders=\[\]: expected numbers of tokens that ascend from 2"),
        ({"orders": [3], "longer_rows": 9}, "ascend from 2"),
        ({"orders": [1, 2], "longer_rows": 9}, "ascend from 2"),
        ({"orders": [2, 2], "longer_rows": 9}, "ascend from 2"),
        ({"orders": [2, 4, 3], "longer_rows": 9}, "ascend from 2"),
        ({"orders": [2, 3]}, r"longer_rows=0: orders \[3\] want 2 rows or more each, for example 50"),
        ({"orders": [2, 3], "longer_rows": 1}, "longer_rows=1: orders"),
        ({"orders": [2, 3], "longer_rows": -5}, "longer_rows=-5: orders"),
        ({"longer_rows": 9}, r"longer_rows=9, but orders=\[2\] has none beyond 2: set it to 0"),
        ({"orders": [2, 3, 4], "longer_rows": 2**30}, "2147483698 rows: fewer than 2"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError, match=f"model.bigram.*{message}"):
        load_recipe("tiny", {"model.bigram": {"rows": 50, **spec}})


def test_the_record_with_triples_is_one_graph_and_trains(monkeypatch):
    """Reduced; sorted look-ups as on a GPU in one graph, against eager calls over two steps with their updates."""
    overrides = {"model.bigram.orders": [2, 3], "model.bigram.longer_rows": 500}
    recipe = load_recipe("record-third", {**small("record-third"), **overrides})
    recipe = replace(recipe, groups=tuple(replace(group, storage="fp32") for group in recipe.groups))
    cpu, graphs, losses, tables = torch.device("cpu"), [], [], []
    execution = resolve(Execution(device="cpu", compile="off"), recipe, World(0, 1, cpu))

    def count(graph_module, inputs):
        graphs.append(sum(node.target is torch.sort for node in graph_module.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)

    for compiled in (False, True):
        state = build_state(recipe, execution, 0, cpu)
        loss_sum = state.model.loss_sum
        if compiled:
            for module in (gpt, bigram):
                monkeypatch.setattr(module, "rows_of", sort_rows)
            torch._dynamo.reset()
            loss_sum = torch.compile(loss_sum, dynamic=False, fullgraph=True, backend=count)
        for step in range(2):
            plan = recipe.plan(step)
            inputs = random_input(recipe, plan, 2, cpu)
            losses.append(train_step(backward_of(loss_sum), state, [inputs], plan, recipe.train))
        tables.append(state.model.bigram.weight.detach().clone())
    assert graphs == [2]  # one, with a sort of the tokens and one of all their n-grams
    torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-5, atol=0)
    assert tables[0][: recipe.model.bigram.rows].any()
    assert tables[0][recipe.model.bigram.rows :].any()
    scale = float(tables[0].abs().max())
    assert ((tables[1] - tables[0]).abs() > 1e-3 * scale).sum() == 0


def test_text_goes_on_as_the_whole_row_says():
    source = {"model.bigram": {"rows": 50, "signs": 4, "orders": [2, 3, 4], "longer_rows": 40}}
    output = {"model.output": [{"source": "x"}, {"source": "bigram"}]}
    model = GPT(load_recipe("tiny", source | output).model)
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(p.numel()))
    ids = [5]
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert list(generate(model, [5], 12, vocab_size=257, temperature=0)) == ids[1:]
