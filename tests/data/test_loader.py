import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanosprint.data.loader import TokenLoader, count_targets, validation_batches
from nanosprint.data.shards import ShardError, write_shard

LANES, SEQ_LEN = 8, 5
BATCH = LANES * SEQ_LEN * 2  # two rows a lane
RNG = np.random.default_rng(0)


@pytest.fixture
def shards(write):
    return [write(f"a_train_{i:06d}.bin", RNG.integers(0, 500, size)) for i, size in enumerate((303, 85, 60, 401), 1)]


def plan(step):
    return SimpleNamespace(batch_tokens=BATCH if step < 4 else 2 * BATCH, seq_len=SEQ_LEN)


def loader(shards, **changes):
    settings = {
        "num_steps": 6,
        "lanes": LANES,
        "lanes_per_microbatch": 1,
        "vocab_size": 500,
        "epochs": 10.0,
        "seed": 3,
    }
    return TokenLoader(shards, changes.pop("plan", plan), **{**settings, **changes})


def read(shards, **changes):
    with loader(shards, **changes) as steps:
        return list(steps)


def lanes_of(step_by_rank, k):
    """The step's lanes in order, put together from all ranks: a list of (tokens, targets)."""
    lanes = []
    for m in range(len(step_by_rank[0].micro_batches)):
        for data in step_by_rank:
            batch = data.micro_batches[m]
            for tokens, targets in zip(batch.tokens.chunk(k), batch.targets.chunk(k), strict=True):
                lanes.append((tokens.tolist(), targets.tolist()))
    return lanes


def test_sequential_against_a_plain_loop(shards):
    """The first lanes of every step, cut by hand from the files' bytes."""
    files = [np.frombuffer(p.read_bytes()[1024:], "<u2").tolist() for p in shards]
    expected, shard, at = [], 0, 0
    for step in range(6):
        batch = plan(step).batch_tokens
        while len(files[shard]) - at < batch + 1:
            shard, at = (shard + 1) % len(files), 0
        expected.append(files[shard][at : at + batch + 1])
        at += batch
    for data, run in zip(read(shards), expected, strict=True):
        tokens = torch.cat([b.tokens.flatten() for b in data.micro_batches]).tolist()
        targets = torch.cat([b.targets.flatten() for b in data.micro_batches]).tolist()
        assert (tokens, targets) == (run[:-1], run[1:])


def test_shapes_and_dtypes(shards):
    data = read(shards, lanes_per_microbatch=4)[0]
    assert [tuple(b.tokens.shape) for b in data.micro_batches] == [(8, SEQ_LEN)] * 2
    assert data.micro_batches[0].tokens.dtype == torch.int32
    assert data.micro_batches[0].targets.dtype == torch.int64
    assert data.wait_s >= 0
    assert [d.step for d in read(shards)] == list(range(6))


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
@pytest.mark.parametrize(("world_size", "k"), [(1, 8), (1, 2), (2, 1), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_the_same_lanes_for_every_world_size(shards, order, world_size, k):
    reference = read(shards, order=order, plan=constant_plan)
    ranks = [
        read(shards, order=order, plan=constant_plan, rank=r, world_size=world_size, lanes_per_microbatch=k)
        for r in range(world_size)
    ]
    for step, alone in enumerate(reference):
        together = [rank[step] for rank in ranks]
        assert lanes_of(together, k) == lanes_of([alone], 1)
        assert all(data.state_after == alone.state_after for data in together)


def constant_plan(step):
    return SimpleNamespace(batch_tokens=BATCH, seq_len=SEQ_LEN)


@pytest.mark.parametrize("world_size", [1, 2])
def test_lanes_per_micro_batch_may_follow_the_plan(shards, world_size):
    """Four lanes at once while steps are small, then two: the same lanes, and a state that knows nothing of it."""

    def lanes_per_microbatch(batch_tokens):
        return 4 if batch_tokens == BATCH else 2

    ranks = [
        read(shards, rank=r, world_size=world_size, lanes_per_microbatch=lanes_per_microbatch)
        for r in range(world_size)
    ]
    for step, alone in enumerate(read(shards)):
        together, k = [rank[step] for rank in ranks], 4 if step < 4 else 2
        assert {len(data.micro_batches) for data in together} == {LANES // (world_size * k)}
        assert {b.tokens.shape[0] for data in together for b in data.micro_batches} == {2 * k if step < 4 else 4 * k}
        assert lanes_of(together, k) == lanes_of([alone], 1)
        assert all(data.state_after == alone.state_after for data in together)


def test_lanes_that_cannot_be_dealt_at_a_later_step_are_refused_at_once(shards):
    with pytest.raises(ValueError, match=r"lanes_per_microbatch=3 .* use 1, 2, 4 or 8"):
        loader(shards, lanes_per_microbatch=lambda batch_tokens: 1 if batch_tokens == BATCH else 3)


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resume_equals_uninterrupted(shards, order, stop):
    """Also at another world size, through JSON."""
    whole = read(shards, order=order)
    state = json.loads(json.dumps(whole[stop - 1].state_after))
    assert state["step"] == stop
    ranks = [read(shards, order=order, state=state, rank=r, world_size=2, lanes_per_microbatch=2) for r in range(2)]
    for i, data in enumerate(whole[stop:]):
        assert lanes_of([rank[i] for rank in ranks], 2) == lanes_of([data], 1)
        assert ranks[0][i].state_after == data.state_after
    by_number = read(shards, order=order, start_step=stop)
    assert [d.state_after for d in by_number] == [d.state_after for d in whole[stop:]]


def test_shuffled_reads_every_block_of_an_epoch_once(write):
    stream = np.arange(8 * 5 * 3 + 1)
    shard = write("a_train_000001.bin", stream)
    steps = read(
        [shard], order="shuffled", plan=lambda s: SimpleNamespace(batch_tokens=40, seq_len=5), num_steps=3, epochs=1.0
    )
    rows = torch.cat([b.tokens for d in steps for b in d.micro_batches])
    targets = torch.cat([b.targets for d in steps for b in d.micro_batches])
    assert sorted(rows[:, 0].tolist()) == list(range(0, 120, 5))
    assert rows[:, 0].tolist() != list(range(0, 120, 5))
    assert torch.equal(targets, rows.long() + 1)


def test_epochs_read(shards):
    with loader(shards) as steps:
        read_at = [steps.epochs_read(data.state_after) for data in steps]
    total = 303 + 85 + 60 + 401
    expected = [80, 160, 240, 303 + 80, (303 + 85 + 60) + 160, (303 + 85 + 60) + 320]
    assert read_at == [e / total for e in expected]


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_exactly_enough_tokens(write, order):
    """N targets need N + 1 tokens."""
    enough = write("a_train_000001.bin", range(2 * BATCH + 1))
    assert len(read([enough], order=order, plan=constant_plan, num_steps=2, epochs=1.0)) == 2
    short = write("b_train_000001.bin", range(2 * BATCH))
    with pytest.raises(ValueError, match="not enough training tokens") as error:
        read([short], order=order, plan=constant_plan, num_steps=2, epochs=1.0)
    for part in ("data.epochs=1 ", "160 targets", "161 tokens", "there are 160", "train.num_steps"):
        assert part in str(error.value), part
    # The epochs that the message names are enough.
    epochs = float(str(error.value).split("Set data.epochs=")[1].split(",")[0])
    assert len(read([short], order=order, plan=constant_plan, num_steps=2, epochs=epochs)) == 2


def test_no_shard_holds_a_step(write):
    shard = write("a_train_000001.bin", range(BATCH))
    for order in ("sequential", "shuffled"):
        with pytest.raises(ValueError, match=r"a step of 80 tokens needs .* lower train\.batch_tokens"):
            loader([shard], order=order, plan=constant_plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes_per_microbatch": 3}, "lanes_per_microbatch=3 .* use 1, 2, 4 or 8"),
        ({"lanes_per_microbatch": 4, "world_size": 4}, "lanes_per_microbatch=4 .* use 1 or 2"),
        ({"world_size": 3}, "8 lanes cannot be dealt to 3 processes: use 1, 2, 4 or 8"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"plan": lambda s: SimpleNamespace(batch_tokens=100, seq_len=5)}, "batch_tokens=100 .* 8 x 5: .* fits is 80"),
        ({"order": "random"}, r"data\.order='random'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(shards, changes, message):
    with pytest.raises(ValueError, match=message):
        loader(shards, **changes)


def test_shuffled_refuses_a_changing_length(shards):
    with pytest.raises(ValueError, match="seq_len changes from 5 to 10 at step 2"):
        loader(shards, order="shuffled", plan=lambda s: SimpleNamespace(batch_tokens=80, seq_len=5 if s < 2 else 10))


def test_sequential_allows_a_changing_length(shards):
    steps = read(shards, plan=lambda s: SimpleNamespace(batch_tokens=80, seq_len=5 if s < 2 else 10))
    assert [tuple(d.micro_batches[0].tokens.shape) for d in steps] == [(2, 5)] * 2 + [(1, 10)] * 4


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_an_id_outside_the_vocabulary_reaches_the_consumer(shards, write, order):
    bad = write("a_train_000009.bin", [1] * 200 + [500] + [1] * 200)
    with pytest.raises(ShardError, match=r"a_train_000009.bin: token id 500, but the model's vocabulary has 500"):
        read([bad], order=order, plan=constant_plan, num_steps=5)


def test_a_damaged_shard_is_found_before_training(write):
    with pytest.raises(ShardError, match="truncated"):
        loader([write("a_train_000001.bin", [1, 2], count=500)])
    with pytest.raises(ShardError, match="no shards"):
        loader([])


def test_state_of_other_data_is_refused(shards, write):
    state = read(shards)[0].state_after
    with pytest.raises(ValueError, match="shards="):
        loader([*shards, write("a_train_000005.bin", range(100))], state=state)
    with pytest.raises(ValueError, match="order='sequential'"):
        loader(shards, state=state, order="shuffled")
    with pytest.raises(ValueError, match="start_step=3"):
        loader(shards, state=state, start_step=3)
    shuffled = read(shards, order="shuffled")[0].state_after
    with pytest.raises(ValueError, match="seed=3"):
        loader(shards, state=shuffled, order="shuffled", seed=4)


def test_batches_are_never_overwritten(shards):
    with loader(shards, num_steps=20, epochs=50.0, plan=constant_plan) as steps:
        kept = list(steps)
    again = read(shards, num_steps=20, epochs=50.0, plan=constant_plan)
    for first, second in zip(kept, again, strict=True):
        for a, b in zip(first.micro_batches, second.micro_batches, strict=True):
            assert torch.equal(a.tokens, b.tokens)


def test_close_ends_the_thread(shards):
    before = threading.active_count()
    with loader(shards, num_steps=1000, epochs=1e6) as steps:
        next(iter(steps))
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_finished_loader_stays_finished(shards):
    with loader(shards) as steps:
        assert len(list(steps)) == 6
        assert list(steps) == []


def test_prefetch_works_while_the_consumer_is_busy(shards):
    with loader(shards) as steps:
        iterator = iter(steps)
        next(iterator)
        time.sleep(0.1)
        assert next(iterator).wait_s < 0.05


# --- validation ---


def scored(shards, world_size, **settings):
    """(position of the target, target, tokens before it in its row) of everything that any rank scores."""
    result, shapes, counts = [], set(), set()
    for rank in range(world_size):
        batches = list(validation_batches(shards, rank=rank, world_size=world_size, vocab_size=60_000, **settings))
        counts.add(len(batches))
        for batch in batches:
            shapes.add(tuple(batch.tokens.shape))
            for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
                result += [(targets[i], tokens[: i + 1]) for i in range(len(targets)) if targets[i] != -1]
    assert len(counts) == 1, "every rank must have as many batches"
    assert len(shapes) == 1
    return result


@pytest.mark.parametrize("seed", range(60))
def test_every_target_is_scored_once(write, seed):
    """Token i of the stream has the value i, so that a target says where it stands."""
    rng = np.random.default_rng(seed)
    total = int(rng.integers(2, 150))
    cut = int(rng.integers(0, total))
    shards = [write("a_val_000000.bin", range(cut)), write("a_val_000001.bin", range(cut, total))]
    seq_len = int(rng.integers(1, 17))
    stride = int(rng.integers(1, seq_len + 1)) if rng.random() < 0.7 else None
    tokens = int(rng.integers(1, total)) if rng.random() < 0.7 else None
    found = scored(
        shards,
        int(rng.choice([1, 2, 3, 8])),
        tokens=tokens,
        seq_len=seq_len,
        stride=stride,
        batch_tokens=seq_len * int(rng.integers(1, 6)),
    )
    assert sorted(target for target, _ in found) == list(range(1, (tokens or total - 1) + 1))
    for target, context in found:
        assert context == list(range(target - len(context), target))
        assert len(context) >= min(target, seq_len - (stride or seq_len) + 1)
    assert count_targets(shards, tokens) == len(found)


def test_padding(write):
    shard = write("a_val_000000.bin", range(10, 20))
    (batch,) = validation_batches([shard], tokens=5, seq_len=4, batch_tokens=8, vocab_size=99)
    assert batch.tokens.tolist() == [[10, 11, 12, 13], [14, 0, 0, 0]]
    assert batch.targets.tolist() == [[11, 12, 13, 14], [15, -1, -1, -1]]
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int32, torch.int64)


def test_stride(write):
    shard = write("a_val_000000.bin", range(10, 20))
    (batch,) = validation_batches([shard], tokens=8, seq_len=4, stride=2, batch_tokens=100, vocab_size=99)
    assert batch.targets.tolist() == [[11, 12, 13, 14], [-1, -1, 15, 16], [-1, -1, 17, 18]]
    assert batch.tokens[:, 0].tolist() == [10, 12, 14]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 10}, r"validation on 10 targets needs 11 tokens; .* have 10: set eval.tokens to 1 to 9"),
        ({"tokens": 0}, "validation on 0 targets"),
        ({"stride": 5}, r"eval.stride=5"),
        ({"batch_tokens": 3}, r"eval.batch_tokens=3"),
    ],
)
def test_validation_refuses_at_once(write, changes, message):
    shard = write("a_val_000000.bin", range(10))
    settings = {"tokens": 9, "seq_len": 4, "batch_tokens": 8, "vocab_size": 99, **changes}
    with pytest.raises(ValueError, match=message):
        validation_batches([shard], **settings)


def test_validation_checks_ids(write):
    shard = write("a_val_000000.bin", [1, 2, 99])
    with pytest.raises(ShardError, match="token id 99"):
        list(validation_batches([shard], tokens=None, seq_len=4, batch_tokens=8, vocab_size=99))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_cuda_equals_cpu(shards, order):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    settings = {"order": order, "num_steps": 200, "epochs": 1e6, "plan": constant_plan, "lanes_per_microbatch": 4}
    on_cpu = read(shards, **settings)
    with loader(shards, device="cuda", **settings) as steps:
        for expected, data in zip(on_cpu, steps, strict=True):
            torch.cuda._sleep(100_000)  # the consumer's stream lags behind, as in training
            for a, b in zip(expected.micro_batches, data.micro_batches, strict=True):
                assert b.tokens.is_cuda
                assert torch.equal(a.tokens, b.tokens.cpu())
                assert torch.equal(a.targets, b.targets.cpu())


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_history_is_what_stands_before_each_row(order, tmp_path):
    stream = np.arange(1, 1001)  # every token is its own position, counted from 1
    path = tmp_path / "x_train_000001.bin"
    write_shard(path, stream.astype(np.uint16))
    options = {"num_steps": 5, "lanes": 2, "lanes_per_microbatch": 1, "vocab_size": 2000, "order": order, "history": 3}
    shape = SimpleNamespace(batch_tokens=64, seq_len=8)
    with TokenLoader([path], lambda step: shape, **options) as loader:
        for data in loader:
            for batch in data.micro_batches:
                assert batch.tokens.shape == (4, 3 + 8)
                assert batch.targets.shape == (4, 8)
                for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
                    first = row[3]
                    assert row[3:] == list(range(first, first + 8))
                    assert targets == list(range(first + 1, first + 9))
                    assert row[:3] == [max(0, first - back) for back in (3, 2, 1)]


@pytest.mark.parametrize("stride", [8, 3])
def test_validation_has_history_too(stride, tmp_path):
    path = tmp_path / "x_val_000000.bin"
    write_shard(path, np.arange(1, 102).astype(np.uint16))
    batches = validation_batches(
        [path], tokens=90, seq_len=8, stride=stride, batch_tokens=24, vocab_size=200, history=3
    )
    scored = []
    for batch in batches:
        for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            assert len(row) == 11
            for place, target in enumerate(targets):
                if target >= 0:
                    scored.append(target)
                    assert row[place : place + 4] == [max(0, target - back) for back in (4, 3, 2, 1)]
    assert sorted(scored) == list(range(2, 92))
