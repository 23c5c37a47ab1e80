"""Rotary tables: the frequencies of the record as its windows grow, and what becomes of tables on their way."""

import math

import pytest
import torch

from nanosprint.config.model import RotarySpec
from nanosprint.model.rotary import Rotary, extended, frequencies

RECORD = RotarySpec(base=1024.0, fraction=0.5, pairs="neighbours", yarn=True)


@pytest.mark.parametrize(
    ("blocks", "scale", "omega"),
    [
        ((3,), 0.1, (0.51131, 0.32694, 0.10689, 9.7656e-4)),
        ((3, 7), 0.116946, (0.504225, 0.254507, 0.056711, 4.1853e-4)),
        ((3, 7, 11), 0.127518, (0.504225, 0.254507, 0.040803, 2.6634e-4)),
        ((3, 7, 11, 13), 0.131778, (0.504225, 0.254507, 0.036175, 2.2536e-4)),
    ],
)
def test_the_table_of_the_record(blocks, scale, omega):
    frequency, factor = extended(frequencies(RECORD, 128), tuple(128 * block for block in blocks))
    assert 0.1 * factor == pytest.approx(scale, abs=5e-7)
    assert [float(frequency[i]) for i in (3, 5, 10, 31)] == pytest.approx(omega, rel=2e-5)
    assert not frequency[32:].any()


def test_windows_rewrite_the_tables_where_they_stand():
    rotary = Rotary(RECORD, 16, 20).double()
    before = rotary.cos_SP, rotary.sin_SP
    first = rotary.cos_SP.clone()
    factor = rotary.set_windows((16, 64, 128))
    assert factor == pytest.approx((1 + 0.2 * math.log(4)) * (1 + 0.2 * math.log(2)))
    assert (rotary.cos_SP, rotary.sin_SP) == before  # the same objects
    frequency, _ = extended(frequencies(RECORD, 16), (16, 64, 128))
    for t in range(20):
        for i in range(8):
            assert float(rotary.cos_SP[t, i]) == pytest.approx(math.cos(t * float(frequency[i])), abs=1e-14)
            assert float(rotary.sin_SP[t, i]) == pytest.approx(math.sin(t * float(frequency[i])), abs=1e-14)
    rotary.extend(25)
    assert float(rotary.sin_SP[24, 1]) == pytest.approx(math.sin(24 * float(frequency[1])), abs=1e-14)
    assert rotary.set_windows((16,)) == 1.0
    assert torch.equal(rotary.cos_SP[:20], first)


def test_compiled_code_sees_new_windows():
    rotary = Rotary(RECORD, 8, 6)
    x = torch.randn(1, 6, 2, 8)
    compiled = torch.compile(rotary, fullgraph=True, dynamic=False, backend="aot_eager")
    before = compiled(x)
    rotary.set_windows((4, 32))
    torch.testing.assert_close(compiled(x), rotary(x))
    assert not torch.allclose(compiled(x), before)


def test_tables_are_as_exact_as_their_dtype():
    narrow = Rotary(RotarySpec(), 16, 30)
    wide = Rotary(RotarySpec(), 16, 30).double()
    assert float(wide.sin_SP[29, 3]) == pytest.approx(math.sin(29 * 10_000 ** (-3 / 8)), abs=1e-15)
    assert torch.equal(wide.float().sin_SP, narrow.sin_SP)
    assert Rotary(RotarySpec(), 16, 30).bfloat16().sin_SP.dtype == torch.float32
    with torch.device("meta"):
        late = Rotary(RotarySpec(), 16, 30)
    assert torch.equal(late.to_empty(device="cpu").cos_SP, narrow.cos_SP)


def test_two_places_a_token_stand_side_by_side():
    one, two = Rotary(RotarySpec(), 8, 20), Rotary(RotarySpec(), 8, 10, places=2)
    for single, double in zip(one.tables(0, 20), two.tables(3, 5, places=2), strict=True):
        assert torch.equal(double, single[6:16].view(5, 8))
    assert two.tables(3, 5)[0].shape == (5, 4)


def test_tokens_beyond_the_tables_are_refused():
    tables = Rotary(RotarySpec(), 8, 10, places=2)
    for start, length, places in ((0, 20, 2), (7, 4, 2), (0, 21, 1)):
        with pytest.raises(ValueError, match="rotary positions end at 20"):
            tables.tables(start, length, places)
    tables.extend(20)
    assert tables.tables(0, 20, 2)[0].shape == (20, 8)


def test_windows_that_make_no_sense():
    with pytest.raises(ValueError, match="yarn=true only"):
        Rotary(RotarySpec(), 8, 4).set_windows((1, 2))
    with pytest.raises(ValueError, match="at least 1 token"):
        extended(frequencies(RECORD, 8), (0, 3))
    assert Rotary(RotarySpec(), 8, 4).set_windows((7,)) == 1.0
