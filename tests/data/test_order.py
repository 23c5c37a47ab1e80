import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanosprint.data.order import NotEnoughTokens, Position, Sequential, Shuffled, StepShape, make_order


def steps_of(order, num_steps, batch_tokens, seq_len):
    """(start, rows) of consecutive steps from the beginning."""
    position = Position()
    for _ in range(num_steps):
        shape = StepShape(batch_tokens, seq_len)
        start = order.start(position, shape)
        yield start, order.rows(start, 0, batch_tokens // seq_len, shape)
        position = order.advance(start, shape)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=5), rows=st.integers(1, 4), seq_len=st.integers(1, 7))
def test_sequential_against_a_plain_loop(counts, rows, seq_len):
    batch = rows * seq_len
    order = Sequential(counts)
    if max(counts) < batch + 1:
        with pytest.raises(NotEnoughTokens, match=f"at least {batch + 1}"):
            order.start(Position(), StepShape(batch, seq_len))
        return
    expected = []  # (shard, offset) of the steps of two epochs
    for _ in range(2):
        for shard, count in enumerate(counts):
            expected += [(shard, at) for at in range(0, count - batch, batch)]
    found = list(steps_of(order, len(expected), batch, seq_len))
    assert [(start.shard, start.offset) for start, _ in found] == expected
    for start, step_rows in found:
        assert step_rows.offsets.tolist() == [start.offset + i * seq_len for i in range(rows)]
        assert set(step_rows.shards.tolist()) == {start.shard}
    assert found[-1][0].epoch == 1


def test_sequential_passes_count_dropped_tails():
    order = Sequential([10, 10])
    positions = [order.advance(start, StepShape(8, 4)) for start, _ in steps_of(order, 3, 8, 4)]
    assert [order.passes(p, StepShape(8, 4)) for p in positions] == [0.4, 0.9, 1.4]


def test_a_step_fits_exactly():
    """N targets need N + 1 tokens."""
    assert Sequential([9]).start(Position(), StepShape(8, 4)) == Position()
    assert Sequential([9]).start(Position(0, 0, 8), StepShape(8, 4)) == Position(1, 0, 0)
    with pytest.raises(NotEnoughTokens):
        Sequential([8]).start(Position(), StepShape(8, 4))
    assert Shuffled([9], 0).start(Position(), StepShape(8, 4)) == Position()
    with pytest.raises(NotEnoughTokens):
        Shuffled([8], 0).start(Position(), StepShape(8, 4))


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    seq_len=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_shuffled_deals_every_block_once(counts, seq_len, seed, epoch):
    order = Shuffled(counts, seed)
    shift = order.shift(epoch, seq_len)
    assert 0 <= shift < seq_len
    assert epoch or shift == 0
    expected = {(s, at) for s, n in enumerate(counts) for at in range(shift, n - seq_len, seq_len)}
    rows = order.rows(Position(epoch), 0, len(expected), StepShape(seq_len, seq_len))
    assert len(rows.offsets) == len(expected)
    assert set(zip(rows.shards.tolist(), rows.offsets.tolist(), strict=True)) == expected


def test_shuffled_drops_an_epochs_last_partial_step():
    order = Shuffled([7 * 4 + 1], 3)
    starts = [start for start, _ in steps_of(order, 6, 12, 4)]
    assert starts[:3] == [Position(0, 0, 0), Position(0, 0, 3), Position(1, 0, 0)]
    assert starts[-1].epoch >= 2


def test_shuffled_depends_on_seed_and_epoch_only():
    def offsets(seed, epoch):
        return Shuffled([1000], seed).rows(Position(epoch), 0, 100, StepShape(8, 8)).offsets.tolist()

    assert offsets(1, 0) == offsets(1, 0)
    assert offsets(1, 0) != offsets(2, 0)
    assert offsets(1, 0) != offsets(1, 1)
    assert offsets(1, 0) != sorted(offsets(1, 0))


def test_shuffled_order_is_the_documented_one():
    """PCG64 seeded by (seed, epoch): first draw the shift, then the sort order of one draw per block."""
    draws = np.random.PCG64([5, 2]).random_raw(1 + 12)
    shift = int(draws[0]) % 8
    blocks = (100 - 1 - shift) // 8
    expected = shift + 8 * np.argsort(draws[1 : 1 + blocks])
    assert Shuffled([100], 5).rows(Position(2), 0, blocks, StepShape(8, 8)).offsets.tolist() == expected.tolist()


def test_bad_orders():
    with pytest.raises(ValueError, match=r"data\.order='random'"):
        make_order("random", [np.arange(10)], 0)
    with pytest.raises(ValueError, match="seed=-1"):
        make_order("shuffled", [np.arange(10)], -1)
    with pytest.raises(ValueError, match=r"needs model\.document_start"):
        make_order("documents", [np.arange(10)], 0)
