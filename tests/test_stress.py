"""The search for outcomes that change: what counts as different, what is put back, and who is not stopped; on a CPU."""

import argparse

import pytest
import torch

from benchmarks import stress
from benchmarks.company import company, work
from benchmarks.difference import copied, differs, strange, tensors_of
from benchmarks.inputs import tiny
from benchmarks.ops.__main__ import OPERATORS
from benchmarks.ops.case import Case, Cost, Operator
from benchmarks.poison import Block, poison, spoil, unused
from benchmarks.stress_more import OPERATORS as MORE
from tests.test_bench_step import ON_CPU, STAGED, words

CPU = torch.device("cpu")
NAN = float("nan")


def case(ours, **more):
    about = {"shape": "s", "check": lambda: 0.0, "tolerance": 0.0, "costs": [Cost()], "reference": "", "compiled": ""}
    return Case(ours=ours, **about, **more)


def arguments(**given):
    defaults = {
        "device": "cpu", "seconds": 0.0, "company": 0, "only": None, "tokens": 96, "tolerance": 0.0, "step": None,
        "stage": None, "in_a_row": None, "overrides": [],
    }  # fmt: skip
    return argparse.Namespace(**{**defaults, **given})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64])
def test_the_same_bits(dtype):
    before = torch.arange(35).view(5, 7).to(dtype)
    assert differs(before, before.clone()) is None
    assert differs(before, before.mT.contiguous().mT) is None
    assert strange(before) is None
    after = before.clone()
    after.view(torch.uint8)[3, 2 * dtype.itemsize] ^= 1
    text = differs(before, after)
    assert "1 of 35 differ" in text
    assert "rows 3 (1) and columns 2 (1)" in text


def test_what_is_said_of_a_difference():
    before, after = torch.zeros(6, 4), torch.zeros(6, 4)
    after[1:4, 2:] = 1.0
    after[5, 2] = NAN
    text = "(6, 4) float32: 7 of 24 differ, 1 not finite, in rows 1..3, 5 (4) and columns 2..3 (2); the first at [1, 2]"
    assert differs(before, after) == f"{text}, 0 -> 1"
    assert differs(torch.tensor(1.0), torch.tensor(2.0)).endswith("the first at [0, 0], 1 -> 2")
    assert differs(before, torch.zeros(3, 4)) == "(3, 4) float32, before (6, 4) float32"
    assert differs(torch.zeros(2), -torch.zeros(2)) is not None  # equal numbers, other bits
    assert differs(torch.full((2,), NAN), torch.full((2,), NAN)) is None


def test_a_tolerance_does_not_let_nan_pass():
    before = torch.ones(100)
    after = before.clone()
    after[3] = 1.01
    assert differs(before, after) is not None
    assert differs(before, after, 2e-3) is None
    assert "off by 1.0e-03" in differs(before, after, 5e-4)
    after[3] = NAN
    assert "off by nan" in differs(before, after, 2e-3)


@pytest.mark.parametrize(
    ("dtype", "codes"), [(torch.float8_e4m3fn, (0x7F, 0xFF)), (torch.float8_e5m2, (0x7C, 0xFC, 0x7F))]
)
def test_codes_that_are_no_numbers(dtype, codes):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert strange(every).startswith(f"{int((~every.float().isfinite()).sum())} of 256")
    for code in codes:
        assert strange(torch.tensor([0, code], dtype=torch.uint8).view(dtype)).startswith("1 of 2")


def test_tensors_and_copies():
    a, b = torch.ones(2, requires_grad=True), torch.zeros(3)
    found = list(tensors_of((a, None, [{"x": b}], 3)))
    assert [t.data_ptr() for t in found] == [a.data_ptr(), b.data_ptr()]
    kept = copied(found)
    b += 1
    assert kept[1].eq(0).all()


def test_an_operator_that_changes_its_mind_is_found():
    calls = []

    def ours():
        calls.append(0)
        return torch.zeros(3), torch.full((4,), float(len(calls) == 2))

    report = stress.repeat("r", stress.of_case(case(ours)), 0.0, CPU, 0.0)
    assert report.repeats == 1
    assert report.bad == ["repetition 1, result 1: (4,) float32: 4 of 4 differ, in rows 0 (1) and columns 0..3 (4); "
                          "the first at [0, 0], 0 -> 1"]  # fmt: skip
    assert "1 WRONG" in str(report)


def test_what_is_not_finite_at_once_is_found():
    report = stress.repeat("r", stress.of_case(case(lambda: torch.full((2,), NAN))), 0.0, CPU, 0.0)
    assert report.bad == ["at first, result 0: 2 of 2 numbers of (2,) float32 are not finite"]


def test_state_is_put_back_and_what_is_filled_is_spoilt():
    state, out = torch.zeros(2), torch.zeros(4)

    def ours():
        state.add_(1)
        out[:3] = 5.0  # and leaves one number as it was

    report = stress.repeat("r", stress.of_case(case(ours, changes=lambda: {"s": state})), 0.02, CPU, 0.0)
    assert report.repeats > 1
    assert not report.bad
    assert state.tolist() == [2.0, 2.0]  # the call that made the state, and the last
    report = stress.repeat("r", stress.of_case(case(ours, fills=(out,))), 0.0, CPU, 0.0)
    assert report.bad == ["at first, filled 0: 1 of 4 numbers of (4,) float32 are not finite"]


def test_failures_stop_nobody(monkeypatch, capsys):
    def fails():
        raise RuntimeError("no such thing")

    def make(*cases):
        return lambda sizes: cases

    fine = case(lambda: torch.ones(2))
    operators = [
        Operator("cannot be made", lambda sizes: fails()),
        Operator("fails", make(case(fails), case(fails, changes=lambda: ()), fine)),
        Operator("is fine", make(fine)),
    ]
    monkeypatch.setattr(stress, "chosen", lambda only, among: operators)
    assert stress.check(arguments()) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [("WRONG" in line, "RuntimeError: no such thing" in line) for line in lines[:5]] == [
        (True, True), (True, True), (True, True), (False, False), (False, False)
    ]  # fmt: skip
    assert lines[5].startswith("3 wrong")
    monkeypatch.setattr(stress, "chosen", lambda only, among: operators[2:])
    assert stress.check(arguments()) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("nothing wrong")


@pytest.mark.parametrize("operator", [*OPERATORS, *MORE], ids=lambda operator: operator.name)
def test_every_operator_repeats_itself(operator):
    for report in stress.of_operators([operator], tiny(), 0.0, 0.0):
        assert report.repeats == 1, report
        assert not report.bad, report


def test_a_step_repeats_itself_and_a_gradient_that_does_not_is_named(monkeypatch, capsys):
    given = arguments(step="record", overrides=words({**STAGED, **ON_CPU}), stage=0)
    assert stress.check(given) == 0
    text = capsys.readouterr().out
    assert "2 steps a repetition, 0 recordings" in text
    assert "record, stage 0" in text
    train, calls = stress.train_step, []

    def disturbed(backward, state, *rest):
        loss = train(backward, state, *rest)
        calls.append(loss)
        if len(calls) == 7:  # after two that compile, two from the new start, two of the first outcome
            state.model.bigram.weight.data[:] = NAN
        return loss

    monkeypatch.setattr(stress, "train_step", disturbed)
    assert stress.check(given) == 1
    text = capsys.readouterr().out
    assert "repetition 1, step 1, gradient of" in text
    assert "not finite" in text


def segment(**more):
    blocks = [
        {"state": "inactive", "size": 64}, {"state": "active_allocated", "size": 128},
        {"state": "active_pending_free", "size": 256}, {"state": "inactive", "size": 512},
    ]  # fmt: skip
    return {"device": 0, "address": 4096, "stream": 7, "segment_pool_id": (0, 0), "blocks": blocks, **more}


def test_unused_memory_of_our_stream_and_of_recordings():
    mine = [Block(4096, 64), Block(4096 + 64 + 128 + 256, 512)]
    assert list(unused([segment()], 0, 7)) == mine
    assert list(unused([segment(stream=8), segment(device=1)], 0, 7)) == []
    assert list(unused([segment(stream=8, segment_pool_id=[0, 1])], 0, 7)) == mine


def test_spoilt():
    tensor = torch.zeros(3, 2, dtype=torch.bfloat16)
    spoil(tensor)
    assert tensor.isnan().all()
    assert poison(CPU) == 0


def test_company_works_until_it_is_no_longer_wanted(capsys):
    wanted = iter((True, True, False))
    assert work(CPU, 0, lambda: next(wanted)) == 2
    assert capsys.readouterr().out == "ready\n"
    with company(2, CPU):
        pass
    with pytest.raises(RuntimeError, match="no company"), company(1, torch.device("meta")):
        pass


@pytest.mark.gpu
def test_poison_reaches_free_memory_and_leaves_the_rest_alone():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    kept, freed = torch.zeros(2**20, device=device), torch.zeros(2**20, device=device)
    del freed
    assert poison(device) >= 2**22
    assert torch.empty(2**20, device=device).isnan().all()
    assert kept.eq(0).all()
