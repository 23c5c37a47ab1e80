"""The choice of a back end, and the calls into libraries that are not installed here, with stand-ins for both."""

import json
import logging
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from test_attention import inputs, kernel, kernel_backward

from nanosprint.ops.attention import (
    BACKENDS,
    Call,
    backend,
    check_documents,
    choose,
    needs_of,
    pack_documents,
    reference,
    require,
)
from nanosprint.ops.attention_backends import fa3, library, measure, outcome, probe, select
from nanosprint.ops.attention_backends.measure import sample_documents
from nanosprint.ops.attention_backends.table import Backend

CPU = torch.device("cpu")
CALL = Call(rows=1, seq_len=64, num_heads=2, head_dim=16, window=5, longest=30)


def wrong(q, k, v, scale, window, documents=None):
    """Forgets the window."""
    return reference(q, k, v, scale, None, documents)


def broken(q, k, v, scale, window, documents=None):
    raise RuntimeError("no kernel image is available")


def fail_to_load():
    raise ImportError("needs a library")


@pytest.fixture
def table(monkeypatch):
    """Back ends by name; the time of each is looked up instead of measured, and `add.timed` notes which was asked."""
    entries, times = {name: Backend(fail_to_load, lambda needs: None) for name in "abcde"}, {}

    def add(name, attend=reference, ms=1.0, refuses=None, **declared):
        entries[name] = Backend(lambda: attend, lambda needs: refuses, **declared)
        times[attend] = ms

    def look_up(attend, call, *_, **__):
        add.timed.append(attend)
        ms = times[attend]
        if ms is None:
            raise torch.OutOfMemoryError("too large")
        return ms(call) if callable(ms) else ms

    monkeypatch.setattr(select, "TABLE", entries)
    monkeypatch.setattr(outcome, "TABLE", entries)
    monkeypatch.setattr(select, "time_ms", look_up)
    monkeypatch.setattr(select, "ORDER", ("e",))
    monkeypatch.setattr(select, "FALLBACKS", ())
    monkeypatch.setattr(select, "ORDER_MASKED", ("a", "b", "c"))
    monkeypatch.setattr(select, "FALLBACKS_MASKED", ("d",))
    add.entries, add.timed = entries, []
    return add


def copy_of_reference():
    return lambda *arguments: reference(*arguments)


def pick(calls=(CALL,), **options):
    return select.fastest(needs_of(calls, CPU, torch.float32), calls, **options)


def summary(caplog):
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    return line


def test_the_fastest_that_is_right(table, caplog):
    caplog.set_level(logging.INFO)
    table("a", copy_of_reference(), ms=3.0)
    table("b", wrong, ms=1.0)
    table("c", copy_of_reference(), ms=2.0)
    assert pick([replace(CALL, rows=4)]) == "c"
    assert "b is installed but failed its check on cpu: wrong at window=0, documents" in caplog.text
    assert summary(caplog).startswith("attention c: 2.00 ms; a 3.00; b: wrong at window=0")
    assert "1 calls forward and backward on 4 x 64 tokens with windows 5; measured in" in summary(caplog)


def test_every_layer_counts(table):
    table("a", copy_of_reference(), ms=lambda call: 1.0 if call.window == 5 else 9.0)
    table("b", copy_of_reference(), ms=lambda call: 3.0)
    wide = replace(CALL, window=40)
    assert pick([CALL, wide]) == "b"  # 1 + 9 against 6
    assert pick([replace(CALL, count=4), wide]) == "a"  # 4 + 9 against 15


def test_of_equal_ones_the_first(table):
    for name in "abc":
        table(name, copy_of_reference(), ms=2.0)
    assert pick() == "a"


@pytest.mark.parametrize(("ms", "winner"), [(0.91, "b"), (0.89, "a")])
def test_graphs_for_every_window_must_be_worth_it(table, ms, winner):
    table("a", copy_of_reference(), ms=ms, bakes_limits=True)
    table("b", copy_of_reference(), ms=1.0)
    assert pick() == winner


def test_dense_rows_are_one_graph_anyway(table, monkeypatch):
    monkeypatch.setattr(select, "ORDER", ("a", "b"))
    table("a", copy_of_reference(), ms=0.99, bakes_limits=True)
    table("b", copy_of_reference(), ms=1.0)
    assert pick([replace(CALL, window=None, longest=None)]) == "a"


def test_what_fails_is_passed_over_with_its_reason(table, caplog):
    caplog.set_level(logging.INFO)
    table("a", broken)
    table("b", refuses="takes bf16 only")
    table("c", copy_of_reference())
    assert pick() == "c"
    assert "RuntimeError at window=None, documents: no kernel image is available" in caplog.text
    assert "b: takes bf16 only" in caplog.text
    assert "too large" not in caplog.text


def test_a_library_that_does_not_load(table, caplog):
    caplog.set_level(logging.INFO)
    table("a", copy_of_reference())
    table.entries["b"] = Backend(fail_to_load, lambda needs: None)
    table("c", copy_of_reference(), ms=None)
    assert pick() == "a"
    assert "b: needs a library; c: OutOfMemoryError at the real shape: too large" in caplog.text


def test_no_time_left(table, caplog):
    caplog.set_level(logging.INFO)
    table("a", copy_of_reference(), ms=9.0)
    table("b", copy_of_reference(), ms=1.0)
    table("c", refuses="no")
    assert pick(budget_s=0.0) == "a"
    assert "b: not tried, " in caplog.text


def test_a_fallback_only_where_nothing_else_works(table, caplog):
    caplog.set_level(logging.INFO)
    for name in "abc":
        table(name, broken)
    table("d", copy_of_reference())
    assert pick() == "d"
    table("c", copy_of_reference(), ms=9.0)
    assert pick() == "c"
    assert "d: not tried, kept for where nothing else works" in caplog.text


def test_dense_rows_have_an_order_of_their_own(table):
    table("a", copy_of_reference(), ms=1.0)
    table("e", copy_of_reference(), ms=9.0)
    assert pick([replace(CALL, window=None, longest=None)]) == "e"


def test_every_order_names_back_ends():
    masked = {"cudnn", "flash"}  # which know neither documents nor windows
    assert {*select.ORDER, *select.ORDER_MASKED, *select.FALLBACKS, *select.FALLBACKS_MASKED} <= set(BACKENDS)
    assert masked.isdisjoint(select.ORDER_MASKED)
    assert "triton" in select.ORDER_MASKED


def test_nothing_works(table, tmp_path):
    for name in "abcd":
        table(name, broken)
    with pytest.raises(ValueError, match=r"no attention back end works on cpu: a: RuntimeError at"):
        pick(cache=tmp_path)
    assert not list(tmp_path.iterdir())  # the next start tries again


@pytest.fixture
def two(table):
    table("a", copy_of_reference(), ms=3.0)
    table("b", copy_of_reference(), ms=2.0)
    table("c", broken, packages=("pytest",))
    return table


def test_a_kept_outcome_is_taken_without_measuring(two, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = tmp_path / "made" / "if need be"
    assert pick(cache=folder) == "b"
    measured = summary(caplog)
    caplog.clear()
    two.timed.clear()
    two("a", copy_of_reference(), ms=1.0)  # would win now
    assert pick(cache=folder) == "b"
    assert not two.timed
    (path,) = folder.iterdir()  # and no temporary file
    assert summary(caplog) == measured.split("; measured")[0] + f"; measured before, {path}"


def test_without_a_folder_every_start_measures(two):
    assert [pick(), pick()] == ["b", "b"]
    assert len(two.timed) == 4


def test_runs_that_start_side_by_side_agree(table, tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def meanwhile(call):
        """While this run measures, another one is ready and has found otherwise."""
        table("a", copy_of_reference(), ms=1.0)
        table("b", refuses="is not needed here")
        assert pick(cache=tmp_path) == "a"
        return 1.0

    table("a", copy_of_reference(), ms=5.0)
    table("b", copy_of_reference(), ms=meanwhile)
    assert pick(cache=tmp_path) == "a"
    assert "measured by another run just now" in caplog.messages[-1]


CHANGES = {
    "calls": lambda monkeypatch: None,
    "gpu": lambda monkeypatch: monkeypatch.setattr(outcome, "_gpu", lambda device: "another"),
    "torch": lambda monkeypatch: monkeypatch.setattr(torch, "__version__", "9.9"),
    "packages": lambda monkeypatch: monkeypatch.setattr(outcome.metadata, "version", lambda name: "9.9"),
    "ours": lambda monkeypatch: monkeypatch.setattr(outcome, "_sources", list),
}


@pytest.mark.parametrize("what", CHANGES)
def test_under_other_circumstances_it_is_measured_anew(what, two, tmp_path, monkeypatch):
    pick(cache=tmp_path)
    two.timed.clear()
    CHANGES[what](monkeypatch)
    pick([replace(CALL, window=6)] if what == "calls" else [CALL], cache=tmp_path)
    assert len(two.timed) == 2
    assert len(list(tmp_path.iterdir())) == 2
    two.timed.clear()
    pick([replace(CALL, window=6)] if what == "calls" else [CALL], cache=tmp_path)
    assert not two.timed


def test_circumstances_are_named(two):
    about = outcome.circumstances(needs_of([CALL], CPU, torch.float32), [CALL])
    assert set(about) == {*CHANGES, "dtype"}
    assert about["packages"] == {"pytest": pytest.__version__}
    assert len(outcome._sources()) > 10
    assert all(path.is_file() for path in outcome._sources())


def spoil(change):
    def write(path):
        kept = json.loads(path.read_text())
        change(kept)
        path.write_text(json.dumps(kept))

    return write


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(path.read_text()[:40]),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text("[]"),
        spoil(lambda kept: kept.pop("left_out")),
        spoil(lambda kept: kept.update(times_ms={})),
        spoil(lambda kept: kept.update(times_ms={"b": -1.0})),
        spoil(lambda kept: kept.update(times_ms={"b": "fast"})),
        spoil(lambda kept: kept.update(times_ms={"unheard of": 1.0})),
        spoil(lambda kept: kept["circumstances"].update(gpu="another")),
    ],
)
def test_a_damaged_file_is_measured_anew_and_replaced(damage, two, tmp_path, caplog):
    pick(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    damage(path)
    two.timed.clear()
    assert pick(cache=tmp_path) == "b"
    assert len(two.timed) == 2
    (line,) = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
    assert line.startswith(f"attention: {path} cannot be used, measuring anew: ")
    assert path.read_text() == good


def test_a_folder_that_cannot_be_written(two, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert pick(cache=tmp_path / "file" / "folder") == "b"
    assert "the choice cannot be kept, the next start measures again" in caplog.text


def test_off_a_gpu_it_is_sdpa():
    cuda = torch.device("cuda")
    assert choose(CPU, torch.bfloat16, [CALL]) == "sdpa"
    assert choose(cuda, torch.float64, [CALL]) == "sdpa"  # decided without looking for one
    assert choose(cuda, torch.bfloat16, []) == "sdpa"
    require("sdpa", needs_of([CALL], cuda, torch.float64))


def test_paired_heads_are_more_positions_of_fewer_heads():
    call = replace(CALL, num_heads=6, rows=3, seq_len=500, longest=90, places=2)
    single, double = replace(call, places=1).documents(CPU), call.documents(CPU)
    assert call.shape == (3, 1000, 3, 16)
    assert double.cu_seqlens.tolist() == [2 * end for end in single.cu_seqlens.tolist()]
    assert (single.max_seq_len, double.max_seq_len) == (90, 180)
    check_documents(double, *call.shape[:2])


@pytest.mark.parametrize("as_data", [False, True])
@pytest.mark.parametrize(("pass_ms", "counted"), [(1.0, 10), (4.0, 5), (400.0, 1)])
def test_timing_asks_for_what_training_asks(as_data, pass_ms, counted, monkeypatch):
    asked = []

    def attend(q, k, v, scale, window, documents):
        asked.append((q.shape, window, documents.max_seq_len))
        return reference(q, k, v, scale, window, documents)

    def passes_ms(work, repeats):
        for _ in range(repeats):
            work()
        return [pass_ms] * repeats

    monkeypatch.setattr(measure, "_passes_ms", passes_ms)
    call = replace(CALL, places=2)
    ms = measure.time_ms(attend, call, torch.float32, CPU, limits_as_data=as_data, at_most_ms=20.0)
    assert (ms, len(asked)) == (pass_ms, 2 + counted)
    assert {(shape, int(window), int(longest)) for shape, window, longest in asked} == {((1, 128, 1, 16), 5, 60)}
    assert all(isinstance(limit, torch.Tensor if as_data else int) for _, *limits in asked for limit in limits)


def test_needs_are_those_of_all_layers():
    dense = replace(CALL, window=None, longest=None)
    for calls, documents, window in [
        ([dense], False, False),
        ([dense, replace(CALL, longest=None)], False, True),
        ([replace(CALL, window=None), dense], True, False),
    ]:
        needs = needs_of(calls, CPU, torch.bfloat16)
        assert (needs.documents, needs.window, needs.head_dim) == (documents, window, 16)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_the_check_passes_what_is_right(name):
    for documents in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            assert probe.failure(backend(name), dtype, 16, CPU, documents=documents, window=True) is None


def test_the_check_finds_nan():
    spoilt = lambda *arguments: reference(*arguments) * float("nan")  # noqa: E731
    assert "wrong at window=None" in probe.failure(spoilt, torch.float32, 16, CPU, documents=True, window=True)


def test_sampled_documents_fill_the_rows():
    documents = sample_documents(3, 5000, 896, CPU)
    ends = documents.cu_seqlens
    assert {5000, 10_000, 15_000} <= set(ends.tolist())
    assert int(ends[-1]) == 15_000
    assert int(ends.diff().max()) <= documents.max_seq_len == 896


# Libraries: two spellings that their releases have had


def window_of(left):
    return -1 if left in (-1, None) else left


def forward_pair(
    q, k, v, must, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
):
    assert must is None
    assert causal
    assert window_size in ((-1, 0), (2, 0))
    return *kernel(q, k, v, cu_seqlens_q, max_seqlen_q, window_of(window_size[0]), softmax_scale), None


def backward_pair(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
    softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    window = window_of(window_size[0])
    grads = kernel_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, max_seqlen_q, window, softmax_scale)
    for to, grad in zip((dq, dk, dv), grads, strict=True):
        to.copy_(grad)


def forward_apart(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size_left=None, window_size_right=None, return_lse=False,
):  # fmt: skip
    assert causal
    assert return_lse
    assert (window_size_left, window_size_right) in ((None, None), (2, 0))
    return *kernel(q, k, v, cu_seqlens_q, max_seqlen_q, window_of(window_size_left), softmax_scale), None, None


def backward_apart(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, window_size_left=None, window_size_right=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
):  # fmt: skip
    window = (window_size_left, window_size_right)
    backward_pair(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
        softmax_scale, causal, window,
    )  # fmt: skip
    return dq, dk, dv


SPELLINGS = {
    "pair": library.build("pair", forward_pair, backward_pair, no_limit=-1),
    "apart": library.build("apart", forward_apart, backward_apart, no_limit=None),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("window", [None, 2])
def test_library_calls(spelling, window):
    leaves = [*(t.requires_grad_() for t in inputs(2, 6, 2, 8)), torch.randn(2, 6, 2, 8, dtype=torch.float64)]
    documents = pack_documents([3, 1, 0, 2, 6], slots=8)
    assert max(probe.errors(SPELLINGS[spelling], leaves, 0.3, window, documents)) < 1e-12


def test_a_library_without_windows_is_refused():
    with pytest.raises(ImportError, match=r"the installed old takes no causal, cu_seqlens_k, .*window_size: install"):
        library.build("old", lambda q, k, v, cu_seqlens_q: None, backward_pair, no_limit=-1)


def test_fa3_from_an_installed_module(monkeypatch):
    module = ModuleType("flash_attn_interface")
    module.__spec__ = object()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    fa3.load.cache_clear()
    assert fa3.missing() is None
    with pytest.raises(ValueError, match=r"fa3 cannot be had: flash_attn_interface has no forward"):
        backend("fa3")
    module._flash_attn_forward, module._flash_attn_backward = forward_pair, backward_pair
    attend = backend("fa3")
    fa3.load.cache_clear()
    q, k, v = inputs(1, 6, 2, 8)
    torch.testing.assert_close(attend(q, k, v, 0.3, 2), reference(q, k, v, 0.3, 2))


def test_fa3_without_anything():
    if fa3.missing() is None:
        pytest.skip("flash_attn_interface or kernels is installed")
    with pytest.raises(ValueError, match="cannot be had: needs the module flash_attn_interface or the package kernels"):
        backend("fa3")
