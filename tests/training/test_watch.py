"""Who tells what, and who ends: several watches at one store, in one process."""

import math
import threading
import time

import pytest
import torch
import torch.distributed as dist

from nanosprint.errors import LostProcess, UserError
from nanosprint.training import distributed, selfcheck, watch
from nanosprint.training.watch import Watch


class Watches:
    """As many as asked for, each with its own connection; `ended` has who would have ended, with which code."""

    def __init__(self, size, timeout_s):
        self.ended, self.arrived = {}, threading.Event()
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [dist.TCPStore("127.0.0.1", self.server.port, is_master=False) for _ in range(size)]
        self.all = [Watch(store, rank, size, timeout_s, end=self._ends(rank)) for rank, store in enumerate(stores)]

    def _ends(self, rank):
        def end(code):
            self.ended[rank] = code
            self.arrived.set()

        return end


@pytest.fixture
def watches(monkeypatch):
    made = []
    monkeypatch.setattr(watch, "GRACE_S", 0.1)

    def make(size, timeout_s=1.2):
        made.append(Watches(size, timeout_s))
        return made[-1]

    yield make
    for one in (w for each in made for w in each.all):
        one._stopped.set()
    watch._active = None


def test_the_first_to_claim_tells_and_the_others_end_with_its_code(watches):
    group = watches(3)
    for one in group.all:
        one.__enter__()
    assert group.all[1].claim(UserError("no such lane")) is None
    told = group.all[2].claim(OSError("disk"))
    assert (told.message, told.code, told.rank) == ("no such lane", 2, 1)
    assert group.all[1].claim(UserError("no such lane")) is not None  # once only
    deadline = time.monotonic() + 10
    while len(group.ended) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert group.ended == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("gone", [0, 1])
def test_a_silent_process_is_named(gone, watches, capfd):
    group = watches(2)
    silent, other = group.all[gone], group.all[1 - gone]
    silent._beat()  # and never again
    other.step = lambda: 7
    other.__enter__()
    assert group.arrived.wait(15)
    assert group.ended == {1 - gone: 1}
    assert capfd.readouterr().err.count(f"lost process {gone} on ") == 1


def test_who_is_cut_off_ends_although_the_store_hangs(watches, monkeypatch, capfd):
    """As behind a link that is down: a call of the store neither returns nor fails."""
    group = watches(2)
    (cut, other), silence = group.all, threading.Event()
    other._beat()
    monkeypatch.setattr(cut, "_beats", lambda ranks: silence.wait(20) and {})
    cut.__enter__()
    assert group.arrived.wait(15)
    silence.set()
    assert group.ended[0] == 1
    assert "process 0 on " in (said := capfd.readouterr().err)
    assert "is cut off: no answer from where the processes met for " in said


def test_an_orderly_end_is_no_loss(watches):
    group = watches(2)
    with group.all[1]:
        group.all[0].__enter__()
    assert not group.arrived.wait(2.5)


def test_a_broken_connection_is_explained(watches):
    group = watches(2)
    for one in group.all:
        one._beat()
    error = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    assert "lost process 1 on " in str(group.all[0].explained(error))
    group.all[1].claim(OSError("its disk is broken"))
    explained = group.all[0].explained(error)
    assert isinstance(explained, LostProcess)
    assert str(explained) == "its disk is broken"
    own = ValueError("mine")
    assert group.all[0].explained(own) is own


def test_processes_that_do_not_agree_are_named(monkeypatch):
    everyone = [("a", {"torch": "2.11"}), ("a", {"torch": "2.11"}), ("b", {"torch": "2.10"}), ("b", {})]
    monkeypatch.setattr(selfcheck, "from_all", lambda _: everyone)
    world = distributed.World(0, 4, torch.device("cpu"))
    expected = (
        r"do not agree on torch: 2.11 on processes 0-1 \(a\); 2.10 on process 2 \(b\); missing on process 3 \(b\)"
    )
    with pytest.raises(UserError, match=expected):
        selfcheck.require_same({"torch": "2.11"}, world)


def test_a_sum_that_comes_out_wrong_is_found(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        selfcheck._check_collectives(torch.device("cpu"))
        plain = dist.all_reduce
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: (plain(tensor), tensor.add_(1)))
        with pytest.raises(RuntimeError, match="all-reduce of known numbers came out wrong on process 0"):
            selfcheck._check_collectives(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_weights_that_differ_in_a_bit_are_named(monkeypatch):
    """Another process's are those of a copy; NaN equals itself, and 0 is not -0."""
    one, other = (torch.nn.Module() for _ in range(2))
    for model in (one, other):
        for name, values in (("a", [1.0, math.nan]), ("b", 3.0), ("c", [[0.0, 5.0, 7.0], [1.0, 1.0, 1.0]])):
            model.register_parameter(name, torch.nn.Parameter(torch.tensor(values).t().bfloat16()))
    sent = []
    monkeypatch.setattr(selfcheck, "from_all", lambda mine: sent.append(mine) or [mine, *sent])
    assert selfcheck.differing_weights(other) == []
    assert selfcheck.differing_weights(one) == []
    with torch.no_grad():
        other.c[0, 0] = -0.0
    assert selfcheck.differing_weights(other) == ["c"]
    with torch.no_grad():
        other.c[0, 0] = 0.0
        other.b += 2**-6  # the last bit of 3 in bf16
    sent.clear()
    selfcheck.differing_weights(other)
    assert selfcheck.differing_weights(one) == ["b"]


def test_samples_of_a_shard_tell_other_data(tmp_path):
    from nanosprint.data.shards import write_shard

    tokens = torch.arange(40_000).numpy()
    write_shard(tmp_path / "a.bin", tokens)
    write_shard(tmp_path / "b.bin", tokens[::-1].copy())
    write_shard(tmp_path / "c.bin", tokens[:-1])
    assert len({selfcheck._shard_words(tmp_path / f"{name}.bin") for name in "abc"}) == 3
