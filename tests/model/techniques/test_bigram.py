"""Hashed pairs against the hash spelled out for one token at a time."""

import numpy as np
import pytest
import torch

from nanosprint.model.gpt import GPT
from nanosprint.model.techniques.bigram import bigram_rows, sign_rows
from nanosprint.recipes import load_recipe

GPT2_ROWS = 50_304 * 15 // 2


def slow_rows(row, rows):
    """In 32-bit arithmetic of numpy, which wraps; the first token is overwritten before it is multiplied."""
    x = np.array(row, dtype=np.int32)
    x[0] = rows - 1
    out = [rows - 1]
    with np.errstate(over="ignore"):
        for t in range(1, len(x)):
            mixed = np.bitwise_xor(np.int32(36313) * x[t], np.int32(27191) * x[t - 1])
            out.append(int(mixed) % (rows - 1))
    return out


def test_published_values():
    tokens = torch.tensor([[50256, 464, 50000, 11]], dtype=torch.int32)
    assert bigram_rows(tokens, GPT2_ROWS).tolist() == [[377279, 86771, 283021, 227703]]
    assert 27191 * 377279 - 2**33 == 1_668_658_697  # the one product that wraps


@pytest.mark.parametrize("rows", [GPT2_ROWS, 2, 1000, 2**20])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint16])
def test_rows_by_brute_force(rows, dtype):
    tokens = torch.randint(50_257, (3, 33), generator=torch.Generator().manual_seed(rows))
    tokens[0, 3:5] = 50_256
    got = bigram_rows(tokens.to(dtype), rows)
    assert got.tolist() == [slow_rows(row, rows) for row in tokens.tolist()]
    assert int(got[:, 1:].max()) < rows - 1  # the last row is the first tokens' alone
    assert bigram_rows(tokens[:, :1], rows).tolist() == [[rows - 1]] * 3


def test_sign_rows():
    assert sign_rows(torch.tensor([[5, 3, 3, 9000]]), 8192).tolist() == [[0, 5 ^ 3, 0, (3 ^ 9000) % 8192]]


def model_of(signs):
    overrides = {"model.bigram": {"rows": 50, "signs": signs}, "model.output": [{"source": "bigram"}]}
    model = GPT(load_recipe("tiny", overrides).model, compute_dtype=torch.float64).double()
    model.init_weights(0)
    assert not model.bigram.weight.any()
    with torch.no_grad():
        model.bigram.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("signs", [0, 8])
def test_forward(signs):
    table = model_of(signs).bigram
    tokens = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(2))
    got = table(tokens, torch.float64)
    for b, row in enumerate(tokens.tolist()):
        for t, place in enumerate(slow_rows(row, 50)):
            sign = table.signs[(row[t] ^ row[t - 1]) % signs if t else 0] if signs else 1
            torch.testing.assert_close(got[b, t], table.weight[place] * sign)


def test_signs_are_drawn_from_the_seed_and_saved():
    a, b = model_of(64), model_of(64)
    assert torch.equal(a.bigram.signs, b.bigram.signs)
    assert set(a.bigram.signs.unique().tolist()) == {-1, 1}
    assert abs(float(a.bigram.signs.double().mean())) < 0.1
    b.init_weights(1)
    assert not torch.equal(a.bigram.signs, b.bigram.signs)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a.bigram.signs, b.bigram.signs)
