"""The choice of a back end, and the calls into libraries that are not installed here, with stand-ins for both."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from test_attention import inputs, kernel, kernel_backward

from nanosprint.ops.attention import BACKENDS, backend, choose, pack_documents, reference
from nanosprint.ops.attention_backends import fa3, library, probe, select
from nanosprint.ops.attention_backends.table import Backend, Needs

CPU = torch.device("cpu")
NEEDS = Needs(device=CPU, dtype=torch.float32, head_dim=16, documents=True, window=True)


def wrong(q, k, v, scale, window, documents=None):
    """Forgets the window."""
    return reference(q, k, v, scale, None, documents)


def broken(q, k, v, scale, window, documents=None):
    raise RuntimeError("no kernel image is available")


def fail_to_load():
    raise ImportError("needs a library")


@pytest.fixture
def table(monkeypatch):
    """Back ends by name; the time of each is looked up instead of measured."""
    entries, times = {"d": Backend(fail_to_load, lambda needs: None)}, {}

    def add(name, attend=reference, ms=1.0, refuses=None):
        entries[name] = Backend(lambda: attend, lambda needs: refuses)
        times[attend] = ms

    def look_up(attend, *shape):
        if times[attend] is None:
            raise torch.OutOfMemoryError("too large")
        return times[attend]

    monkeypatch.setattr(select, "TABLE", entries)
    monkeypatch.setattr(select, "time_ms", look_up)
    monkeypatch.setattr(select, "ORDER", ("e",))
    monkeypatch.setattr(select, "FALLBACKS", ())
    monkeypatch.setattr(select, "ORDER_MASKED", ("a", "b", "c"))
    monkeypatch.setattr(select, "FALLBACKS_MASKED", ("d",))
    add.entries = entries
    return add


def copy_of_reference():
    return lambda *arguments: reference(*arguments)


def pick(**options):
    return select.fastest(NEEDS, num_heads=2, seq_len=64, **options)


def test_the_fastest_that_is_right(table, caplog):
    caplog.set_level(logging.INFO)
    table("a", copy_of_reference(), ms=3.0)
    table("b", wrong, ms=1.0)
    table("c", copy_of_reference(), ms=2.0)
    assert pick(rows=4) == "c"
    assert "b is installed but failed its check on cpu: wrong at window=0, documents" in caplog.text
    (summary,) = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    assert summary.startswith("attention: c, forward and backward on 4 x 64 tokens: c 2.000 ms, a 3.000 ms. b: wrong")


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
    dense = Needs(device=CPU, dtype=torch.float32, head_dim=16)
    assert select.fastest(dense, num_heads=2, seq_len=64) == "e"


def test_every_order_names_back_ends():
    masked = {"cudnn", "flash"}  # which know neither documents nor windows
    assert {*select.ORDER, *select.ORDER_MASKED, *select.FALLBACKS, *select.FALLBACKS_MASKED} <= set(BACKENDS)
    assert masked.isdisjoint(select.ORDER_MASKED)
    assert "triton" in select.ORDER_MASKED


def test_nothing_works(table):
    for name in "abcd":
        table(name, broken)
    with pytest.raises(ValueError, match=r"no attention back end works on cpu: a: RuntimeError at"):
        pick()


def test_off_a_gpu_it_is_sdpa():
    sizes = {"num_heads": 2, "head_dim": 64, "seq_len": 64, "needs_documents": True, "needs_window": True}
    assert choose(CPU, torch.bfloat16, **sizes) == "sdpa"
    assert choose(torch.device("cuda"), torch.float64, **sizes) == "sdpa"  # decided without looking for one


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_the_check_passes_what_is_right(name):
    for documents in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            assert probe.failure(backend(name), dtype, 16, CPU, documents=documents, window=True) is None


def test_the_check_finds_nan():
    spoilt = lambda *arguments: reference(*arguments) * float("nan")  # noqa: E731
    assert "wrong at window=None" in probe.failure(spoilt, torch.float32, 16, CPU, documents=True, window=True)


def test_sampled_documents_fill_the_rows():
    documents = select.sample_documents(3, 5000, 896, CPU)
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
