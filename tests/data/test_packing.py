"""Documents in lanes, against a plain loop over tokens that looks at one after the other."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanosprint.data import packing
from nanosprint.data.loader import TokenLoader
from nanosprint.data.order import Documents, NotEnoughTokens, Position, StepShape
from nanosprint.data.packing import DocumentStarts, pack
from nanosprint.data.shards import ShardError

START, VOCAB, LANES = 7, 500, 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a shard of a few hundred tokens is looked at piece by piece."""
    monkeypatch.setattr(packing, "_CHUNK", 37)


def text(rng, lengths, prefix=0):
    """Documents of these lengths, each START and then ids that grow, after `prefix` tokens of an earlier one."""
    documents = [[START, *rng.integers(8, VOCAB, n - 1).tolist()] for n in lengths]
    return rng.integers(8, VOCAB, prefix).tolist() + [token for document in documents for token in document]


def steps_by_hand(shards, shapes, lanes=LANES):
    """[(row of S + 1 tokens of every lane, passes over the tokens)] for shapes [(S, max_document)], token by token."""
    shard, at, epoch, total, steps = 0, 0, 0, sum(map(len, shards)), []
    for seq_len, longest in shapes:
        while True:
            tokens, place, rows = shards[shard], at, []
            for _ in range(lanes):
                row = []
                while len(row) < seq_len + 1:
                    while place < len(tokens) and tokens[place] != START:
                        place += 1
                    if place == len(tokens):
                        break
                    count = 0
                    while True:  # one document, as far as it may go
                        row.append(tokens[place])
                        place, count = place + 1, count + 1
                        ended = place == len(tokens) or tokens[place] == START
                        if ended or count == longest or len(row) == seq_len + 1:
                            break
                rows.append(row)
            if len(rows[-1]) == seq_len + 1:
                break
            shard, at = shard + 1, 0
            if shard == len(shards):
                shard, epoch = 0, epoch + 1
        at = place
        steps.append((rows, epoch + (sum(map(len, shards[:shard])) + at) / total))
    return steps


def read(paths, shapes, **changes):
    settings = {"lanes": LANES, "lanes_per_microbatch": 1, "vocab_size": VOCAB, "epochs": 100.0, **changes}
    lanes = settings["lanes"]

    def plan(step):
        seq_len, longest = shapes[step]
        return SimpleNamespace(batch_tokens=seq_len * lanes, seq_len=seq_len, max_document=longest)

    settings.setdefault("mean_document", 1)
    with TokenLoader(paths, plan, num_steps=len(shapes), order="documents", document_start=START, **settings) as loader:
        return list(loader)


def rows_of(step_by_rank, k=1):
    rows = []
    for m in range(len(step_by_rank[0].micro_batches)):
        for data in step_by_rank:
            batch = data.micro_batches[m]
            assert batch.tokens.shape == batch.targets.shape == (k, batch.tokens.shape[1])
            assert torch.equal(batch.tokens[:, 1:].long(), batch.targets[:, :-1])
            rows += [[*t, u[-1]] for t, u in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)]
    return rows


@pytest.mark.parametrize("seed", range(25))
def test_against_a_plain_loop(write, seed):
    rng = np.random.default_rng(seed)
    longest_text = int(rng.choice([3, 12, 60]))
    streams = [
        text(rng, rng.integers(1, longest_text + 1, int(rng.integers(5, 120))), prefix=int(rng.integers(0, 9)))
        for _ in range(int(rng.integers(1, 4)))
    ] + [text(rng, rng.integers(1, longest_text + 1, 300))]
    sizes = [(int(rng.integers(1, 20)), [None, 1, 4, 9][int(rng.integers(4))]) for _ in range(2)]
    sizes = [(s, longest if longest != 1 or s < 10 else 4) for s, longest in sizes]
    shapes = [sizes[0]] * 5 + [sizes[1]] * 5  # as at a border between stages
    paths = [write(f"a_train_{i:06d}.bin", stream) for i, stream in enumerate(streams)]
    for (rows, passes), data in zip(steps_by_hand(streams, shapes), read(paths, shapes), strict=True):
        assert rows_of([data]) == rows
        assert data.state_after["epochs_read"] == pytest.approx(passes)


SHAPES = [(16, 9)] * 6 + [(24, 12)] * 6 + [(40, 12)] * 6


@pytest.fixture
def shards(write):
    rng = np.random.default_rng(5)
    streams = [text(rng, rng.geometric(0.08, n), prefix=p) for n, p in ((120, 3), (40, 0), (200, 11), (300, 0))]
    return [write(f"a_train_{i:06d}.bin", stream) for i, stream in enumerate(streams)]


@pytest.mark.parametrize(("world_size", "k"), [(1, 8), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_the_same_lanes_for_every_world_size(shards, world_size, k):
    reference = read(shards, SHAPES)
    ranks = [read(shards, SHAPES, rank=r, world_size=world_size, lanes_per_microbatch=k) for r in range(world_size)]
    for step, alone in enumerate(reference):
        together = [rank[step] for rank in ranks]
        assert rows_of(together, k) == rows_of([alone])
        assert all(data.state_after == alone.state_after for data in together)


def test_lanes_per_micro_batch_may_follow_the_stage(shards):
    """Micro-batches of about the same size in all stages; where documents end is counted over all their rows."""
    lanes = {16 * LANES: 8, 24 * LANES: 4, 40 * LANES: 2}
    followed = read(shards, SHAPES, lanes_per_microbatch=lanes.get)
    for (seq_len, _), data, alone in zip(SHAPES, followed, read(shards, SHAPES), strict=True):
        k = lanes[seq_len * LANES]
        assert len(data.micro_batches) == LANES // k
        assert rows_of([data], k) == rows_of([alone])
        assert data.state_after == alone.state_after
        ends = [b.documents.ends for b in data.micro_batches]
        singly = [b.documents.ends for b in alone.micro_batches]
        for m, together in enumerate(ends):
            rows = singly[m * k : (m + 1) * k]
            apart = {i * seq_len + end for i, row in enumerate(rows) for end in row.tolist()}
            assert set(together.tolist()) == apart


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 11, 17])
def test_resume_equals_uninterrupted(shards, stop):
    whole = read(shards, SHAPES)
    state = json.loads(json.dumps(whole[stop - 1].state_after))
    ranks = [read(shards, SHAPES, state=state, rank=r, world_size=2, lanes_per_microbatch=4) for r in range(2)]
    for i, data in enumerate(whole[stop:]):
        assert rows_of([rank[i] for rank in ranks], 4) == rows_of([data])
        assert ranks[0][i].state_after == data.state_after
    by_number = read(shards, SHAPES, start_step=stop)
    assert [d.state_after for d in by_number] == [d.state_after for d in whole[stop:]]


def test_the_size_of_a_chunk_changes_nothing(shards, monkeypatch):
    piecewise = [data.state_after for data in read(shards, SHAPES)]
    monkeypatch.setattr(packing, "_CHUNK", 1 << 20)
    assert [data.state_after for data in read(shards, SHAPES)] == piecewise


def test_a_partial_index_packs_as_the_full_one(monkeypatch):
    """Also where the last start that is known belongs to a document whose end is not."""
    monkeypatch.setattr(packing, "_CHUNK", 5)
    for seed in range(300):
        rng = np.random.default_rng(seed)
        tokens = np.array(text(rng, rng.geometric(0.15, 60)))
        full, partial = DocumentStarts(tokens, START), DocumentStarts(tokens, START)
        full.scan(len(tokens))
        found, expected = (pack(starts, 0, 3, 17, 12) for starts in (partial, full))
        assert not partial.complete
        assert (found.offsets.tolist(), found.lengths.tolist()) == (
            expected.offsets.tolist(),
            expected.lengths.tolist(),
        )


def one_step(write, tokens, seq_len, longest, lanes=1, **options):
    (data,) = read([write("a_train_000001.bin", tokens)], [(seq_len, longest)], lanes=lanes, **options)
    return data


def test_the_label_of_a_cut_documents_last_token_is_the_next_start(write):
    data = one_step(write, [START, 11, 12, 13, 14, START, 21, 22, START, 31], 6, 3)
    (batch,) = data.micro_batches
    assert batch.tokens.tolist() == [[START, 11, 12, START, 21, 22]]
    assert batch.targets.tolist() == [[11, 12, START, 21, 22, START]]
    assert batch.documents.ends.tolist() == [0, 3, 6, *[6] * (len(batch.documents.ends) - 3)]


def test_a_last_document_of_its_start_alone_is_empty(write):
    """The seventh token is a target only, so that the document it starts has nothing in the row."""
    data = one_step(write, [START, 11, 12, 13, 14, 15, START, 31], 6, None)
    (batch,) = data.micro_batches
    assert batch.targets[0, -1] == START
    assert set(batch.documents.ends.tolist()) == {0, 6}
    assert batch.documents.longest == 6


def test_the_rest_of_an_overflowing_document_is_skipped(write):
    stream = [START, 11, 12, 13, 14, 15, START, 21, 22, 23, 24, 25, 26, START, 31]
    data = one_step(write, stream, 3, None, lanes=2)
    assert rows_of([data]) == [[START, 11, 12, 13], [START, 21, 22, 23]]
    assert data.state_after["position"] == {"epoch": 0, "shard": 0, "offset": 10}


def test_exact_ends(write):
    """S + 1 tokens are reached at a border of documents, and the shard ends with them; one token less is too few."""
    stream = [START, 11, START, 21, 22, START, 31, 32]
    assert rows_of([one_step(write, stream, 4, None)]) == [stream[:5]]
    assert rows_of([one_step(write, stream, 7, None)]) == [stream]
    with pytest.raises(NotEnoughTokens, match=r"a step of 8 tokens needs 1 rows of 8 \+ 1 tokens"):
        one_step(write, stream, 8, None)


def test_a_step_that_does_not_fit_begins_anew_in_the_next_shard(write):
    first = write("a_train_000001.bin", [START, 11, 12] * 5)
    second = write("a_train_000002.bin", [99, START, 21, 22] * 5)
    steps = read([first, second], [(5, None)] * 2, lanes=2)
    assert [{t for row in rows_of([s]) for t in row} for s in steps] == [{START, 11, 12}, {START, 21, 22, 99}]
    assert steps[1].state_after["position"]["shard"] == 1


@pytest.mark.parametrize("last", [[], [START]])
def test_ends_of_several_rows(write, last):
    stream = [START, 11, 12, START, 21, START, START, 41, 42, 43, START, *last]
    data = one_step(write, stream, 4, None, lanes=2, lanes_per_microbatch=2)
    (batch,) = data.micro_batches
    assert batch.tokens.tolist() == [[START, 11, 12, START], [START, START, 41, 42]]
    assert batch.targets[:, -1].tolist() == [21, 43]
    assert sorted(set(batch.documents.ends.tolist())) == [0, 3, 4, 5, 8]


def test_more_documents_than_slots_is_an_error(write):
    with pytest.raises(ValueError, match=r"40 documents in 1 rows of 40 tokens .* set data\.mean_document=1"):
        one_step(write, [START] * 50, 40, None, mean_document=2)
    assert one_step(write, [START] * 50, 40, None, mean_document=2, spare_documents=20).step == 0


def test_too_few_tokens_are_refused_before_the_first_step(write):
    rng = np.random.default_rng(1)
    paths = [write(f"a_train_{i:06d}.bin", text(rng, [20] * 20)) for i in range(2)]
    shapes = [(31, 10)] * 5  # half of every document is read, so that a row takes 4 of a shard's 20
    with pytest.raises(NotEnoughTokens):
        read(paths, shapes, epochs=1.0)
    with pytest.raises(ValueError, match=r"not enough training tokens.*and of long documents") as error:
        read(paths, shapes, epochs=1.0, lanes=4, lanes_per_microbatch=4)
    epochs = float(str(error.value).split("Set data.epochs=")[1].split(",")[0])
    assert len(read(paths, shapes, epochs=epochs, lanes=4)) == 5


def test_no_document_starts_anywhere(write):
    with pytest.raises(NotEnoughTokens, match="that start with token 7"):
        one_step(write, [9] * 500, 4, None)
    with pytest.raises(ValueError, match=r"needs model\.document_start"):
        TokenLoader(
            [write("a_train_000001.bin", [START] * 99)],
            lambda step: SimpleNamespace(batch_tokens=8, seq_len=8, max_document=4),
            num_steps=1, lanes=1, lanes_per_microbatch=1, vocab_size=9, order="documents",
        )  # fmt: skip


def test_ids_are_checked(write):
    with pytest.raises(ShardError, match="token id 500"):
        one_step(write, [START, 500, 8, 9, 10], 3, None)


def test_nothing_stands_before_a_packed_row(write):
    data = one_step(write, [9, 9, START, 11, 12, START, 21, 22, START], 2, None, lanes=2, history=2)
    assert [b.tokens.tolist() for b in data.micro_batches] == [[[0, 0, START, 11]], [[0, 0, START, 21]]]


def test_packing_looks_no_further_than_it_must():
    tokens = np.full(37 * 100, START, np.uint16)
    starts = DocumentStarts(tokens, START)
    pieces = pack(starts, 0, 2, 10, None)
    assert pieces.rows.tolist() == [0, 11, 22]
    assert starts.scanned == 37
    pack(starts, 30, 2, 10, None)
    assert starts.scanned == 37 * 2


def test_a_document_over_many_chunks():
    tokens = np.array([START, *[9] * 1000, START, 8, 8, 8])
    pieces = pack(DocumentStarts(tokens, START), 0, 1, 12, 10)
    assert (pieces.offsets.tolist(), pieces.lengths.tolist(), pieces.end) == ([0, 1001], [10, 3], 1004)


def test_going_back_finds_the_same():
    rng = np.random.default_rng(3)
    tokens = np.array(text(rng, rng.integers(1, 30, 200)))
    order, shape = Documents([tokens], START), StepShape(40, 10, 8)
    places, position = [], Position()
    for _ in range(20):
        places.append(position)
        position = order.advance(order.start(position, shape), shape)
    again = [order.advance(order.start(p, shape), shape) for p in reversed(places)]
    assert again == [position, *reversed(places[1:])]
