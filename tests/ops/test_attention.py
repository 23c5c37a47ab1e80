"""Every attention back end against a float64 form that loops over queries, forward and backward.

What a CPU cannot run is marked gpu and compared with `reference`, which is held to the loops here.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanosprint.ops.attention import (
    BACKENDS,
    Call,
    Documents,
    Needs,
    as_data,
    available,
    backend,
    check_documents,
    choose,
    pack_documents,
    reference,
    require,
    scale_as_data,
    sdpa,
    times,
)
from nanosprint.ops.attention_backends import flex as flex_module
from nanosprint.ops.attention_backends import probe, varlen
from nanosprint.ops.attention_backends.contract import first_key

CPU = torch.device("cpu")


def weights_of(q, k, cu_seqlens, max_seq_len, window, scale):
    """Softmax weights (H, T, T) and log-sum-exp (H, T) of documents laid end to end."""
    first = first_key(1, q.size(0), None if window < 0 else window, Documents(cu_seqlens, max_seq_len), q.device)[0]
    token = torch.arange(q.size(0))
    visible = (first[:, None] <= token) & (token <= token[:, None])
    scores = (torch.einsum("qhk,shk->hqs", q, k) * scale).masked_fill(~visible, -math.inf)
    return scores.softmax(-1), scores.logsumexp(-1).float()


def kernel(q, k, v, cu_seqlens, max_seq_len, window, scale):
    """What a variable-length library computes, on the CPU."""
    weights, lse = weights_of(q, k, cu_seqlens, max_seq_len, window, scale)
    return torch.einsum("hqs,shk->qhk", weights, v), lse


def kernel_backward(grad, q, k, v, out, lse, cu_seqlens, max_seq_len, window, scale):
    """Its gradients, by hand: below the dispatcher's autograd there is no autograd."""
    weights, again = weights_of(q, k, cu_seqlens, max_seq_len, window, scale)
    assert torch.equal(lse, again)
    d_weights = torch.einsum("qhk,shk->hqs", grad, v)
    d_scores = weights * (d_weights - torch.einsum("qhk,qhk->hq", grad, out)[..., None]) * scale
    return (
        torch.einsum("hqs,shk->qhk", d_scores, k),
        torch.einsum("hqs,qhk->shk", d_scores, q),
        torch.einsum("hqs,qhk->shk", weights, grad),
    )


ON_CPU = {"sdpa": sdpa, "reference": reference, "varlen": varlen.build("test", kernel, kernel_backward)}


def by_loops(q, k, v, scale, window, ends=()):
    """softmax(scale q k) v, one query at a time, in float64 and plain indexing; `ends` count over all rows."""
    B, S, H, _ = q.shape
    out = torch.empty_like(v)
    for b in range(B):
        for t in range(S):
            start = max([0, *(e - b * S for e in ends if e <= b * S + t)])
            first = start if window is None else max(start, t - window)
            for h in range(H):
                scores = [scale * float(q[b, t, h] @ k[b, j, h]) for j in range(first, t + 1)]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                mix = sum(w * v[b, j, h] for w, j in zip(weights, range(first, t + 1), strict=True))
                out[b, t, h] = mix / sum(weights)
    return out


def inputs(B, S, H, K, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, S, H, K, generator=generator, dtype=dtype) for _ in range(3)]


WINDOWS = [None, 0, 1, 4, 6, 100]
PACKED = {  # name: (rows, tokens of a row, lengths of documents)
    "odd lengths": (1, 13, [5, 7, 1]),
    "single tokens": (1, 5, [1, 1, 1, 1, 1]),
    "empty documents": (1, 9, [0, 4, 0, 0, 5, 0]),
    "one document": (1, 7, [7]),
    "ends at row ends": (2, 7, [3, 4, 7]),
    "many rows": (5, 4, [4, 1, 3, 2, 2, 1, 1, 1, 1, 4]),
}


@pytest.mark.parametrize("name", [*ON_CPU, "batched"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [(2, 7, 3, 8), (1, 1, 1, 4), (1, 13, 2, 16)])
def test_forward_on_rows(name, window, shape):
    q, k, v = inputs(*shape)
    attend = ON_CPU.get(name) or backend(name)
    torch.testing.assert_close(attend(q, k, v, 0.3, window), by_loops(q, k, v, 0.3, window))


@pytest.mark.parametrize("window", [None, 0, 2, 100])
@pytest.mark.parametrize("case", PACKED)
def test_forward_on_documents(case, window):
    rows, seq_len, lengths = PACKED[case]
    documents = check_documents(pack_documents(lengths, slots=len(lengths) + 4), rows, seq_len)
    q, k, v = inputs(rows, seq_len, 2, 8)
    truth = by_loops(q, k, v, 0.3, window, documents.cu_seqlens.tolist())
    for name, attend in ON_CPU.items():
        torch.testing.assert_close(attend(q, k, v, 0.3, window, documents), truth, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("seq_len", [129, 300, 512])
@pytest.mark.parametrize("window", [0, 5, 64, 100, None])
def test_sdpa_in_chunks(seq_len, window):
    """Rows long enough to be cut into several chunks, the last one incomplete."""
    lengths = [60, 1, 0, 64, seq_len - 125]
    documents = pack_documents([*lengths, *reversed(lengths)], slots=16)
    tensors = [*inputs(2, seq_len, 2, 8), *inputs(2, seq_len, 2, 8, seed=1)[:1]]
    for case in (documents, None):
        leaves = [t.clone().requires_grad_(i < 3) for i, t in enumerate(tensors)]
        assert max(probe.errors(sdpa, leaves, 0.3, window, case)) < 1e-12


def test_sdpa_needs_little_memory_for_a_long_row(monkeypatch):
    """The mask of a row of 4,096 tokens in documents of at most 100 is 4,096 x 256, not 4,096²."""
    masks = []
    original = torch.nn.functional.scaled_dot_product_attention
    spy = lambda *a, attn_mask, **kw: (masks.append(attn_mask.numel()), original(*a, attn_mask=attn_mask, **kw))[1]  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    sdpa(*inputs(1, 4096, 1, 8), 0.3, None, pack_documents([100] * 40 + [96]))
    assert masks == [4096 * 256]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize("lengths", [None, [1, 4, 0, 1, 6]])
def test_backward_by_finite_differences(name, window, lengths):
    q, k, v = (t.requires_grad_() for t in inputs(2, 6, 1, 2))
    documents = None if lengths is None else pack_documents(lengths, slots=8)
    assert torch.autograd.gradcheck(lambda *a: ON_CPU[name](*a, 0.5, window, documents), (q, k, v))


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_bf16_stays_near_the_truth(name):
    q, k, v = inputs(2, 33, 2, 16)
    out = backend(name)(*(t.bfloat16() for t in (q, k, v)), 0.25, None)
    truth = by_loops(q, k, v, 0.25, None)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - truth).norm() / truth.norm()) < 1e-2


def test_fewer_queries_than_keys_stand_at_the_end():
    q, k, v = inputs(1, 9, 2, 8)
    whole = by_loops(q, k, v, 0.3, 4)
    for attend in (sdpa, reference, backend("cudnn"), backend("flash")):
        torch.testing.assert_close(attend(q[:, -2:], k, v, 0.3, 4), whole[:, -2:])


@pytest.mark.parametrize("name", ON_CPU)
def test_a_row_never_sees_another(name):
    q, k, v = inputs(3, 5, 1, 4)
    before = ON_CPU[name](q, k, v, 0.3, None)
    k[1], v[1] = 7.0, 7.0
    after = ON_CPU[name](q, k, v, 0.3, None)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("documents", [None, pack_documents([3, 1, 0, 2, 6], slots=8)])
def test_compiles_without_graph_breaks(name, documents):
    leaves = [t.requires_grad_() for t in inputs(2, 6, 2, 8)]
    attend = ON_CPU[name]

    def work(q, k, v):
        return attend(q * 2, k, v, 0.3, 2, documents).sin()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*leaves), work(*leaves))
    got, want = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, work))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("window", [-1, 2])
def test_operators_pass_opcheck(window):
    q, k, v = (t[0].requires_grad_() for t in inputs(1, 12, 2, 8))
    cu_seqlens = pack_documents([3, 1, 0, 2, 6], slots=8).cu_seqlens
    torch.library.opcheck(torch.ops.nanosprint.attend_test.default, (q, k, v, cu_seqlens, 0.3, 6, window, None, None))


def test_operators_pass_opcheck_with_limits_as_data():
    q, k, v = (t[0].requires_grad_() for t in inputs(1, 12, 2, 8))
    cu_seqlens = pack_documents([3, 1, 0, 2, 6], slots=8).cu_seqlens
    arguments = (q, k, v, cu_seqlens, 0.0, 12, -1, as_data(6), as_data(2), scale_as_data(0.3))
    torch.library.opcheck(torch.ops.nanosprint.attend_test.default, arguments)
    torch.library.opcheck(torch.ops.nanosprint.times_limit.default, (as_data(6), 2))


# Limits as data


@pytest.mark.parametrize("name", [*ON_CPU, "batched"])
@pytest.mark.parametrize("window", [0, 2, 100])
def test_limits_and_scale_as_data_are_the_same(name, window):
    q, k, v = inputs(2, 6, 2, 8)
    attend = ON_CPU.get(name) or backend(name)
    for documents in (None, pack_documents([3, 1, 0, 2, 6], slots=8)):
        if documents is not None and name == "batched":
            continue
        as_tensors = documents and documents._replace(max_seq_len=as_data(documents.max_seq_len))
        got = attend(q, k, v, scale_as_data(0.25), as_data(window), as_tensors)
        torch.testing.assert_close(got, attend(q, k, v, 0.25, window, documents), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["varlen", "reference", "flex"])
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_for_all_limits(name, packed):
    """Windows, longest documents and scales that differ: one compiled graph, and the numbers of eager ints."""
    attend = ON_CPU.get(name) or backend(name)
    leaves = [t.requires_grad_(name != "flex") for t in inputs(2, 12, 2, 16, torch.float32)]
    graphs = []

    def work(q, k, v, scale, window, documents):
        wider = None if window is None else times(window, 2)
        return attend(q * 2, k, v, scale, window, documents) + attend(q, k, v, scale, wider, documents)

    def count(graph_module, example):
        graphs.append(graph_module)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, example)

    torch._dynamo.reset()
    compiled = torch.compile(work, backend=count, fullgraph=True, dynamic=False)
    cases = ((0.3, 0, [12, 12]), (0.3, 3, [3, 1, 8, 6, 6]), (0.31, 7, [5, 7, 1, 11]), (0.5, 40, [12, 2, 10]))
    for scale, window, lengths in cases:
        documents = pack_documents(lengths, slots=8) if packed else None
        as_tensors = documents and documents._replace(max_seq_len=as_data(documents.max_seq_len))
        got = compiled(*leaves, scale_as_data(scale), as_data(window), as_tensors)
        plain = ON_CPU["varlen"] if name == "varlen" else reference
        want = sum(
            plain(q, *leaves[1:], scale, w, documents) for q, w in ((leaves[0] * 2, window), (leaves[0], 2 * window))
        )
        torch.testing.assert_close(got, want)
        if name != "flex":  # which has no backward pass on a CPU
            pairs = (torch.autograd.grad(y.square().sum(), leaves) for y in (got, want))
            torch.testing.assert_close(*pairs)
    assert len(graphs) == 1


def test_a_chunked_back_end_says_that_its_limits_are_baked():
    assert {name for name, entry in BACKENDS.items() if entry.bakes_limits} == {"sdpa", "batched", "cudnn", "flash"}


@pytest.mark.parametrize("name", [*ON_CPU, "flex"])
@pytest.mark.parametrize("wrong", [torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
def test_data_of_another_kind_is_refused(name, wrong):
    attend = ON_CPU.get(name) or backend(name)
    documents = pack_documents([2, 4])
    with pytest.raises(ValueError, match="window as data must be an int32 tensor of no axes on the CPU"):
        attend(*inputs(1, 6, 2, 16), 0.3, wrong, documents)
    with pytest.raises(ValueError, match="max_seq_len as data must be"):
        attend(*inputs(1, 6, 2, 16), 0.3, 3, documents._replace(max_seq_len=wrong))


def test_a_negative_window_as_data_is_refused():
    for name in ("varlen", "sdpa"):
        with pytest.raises(ValueError, match="window=-1 must be at least 0"):
            ON_CPU[name](*inputs(1, 6, 2, 8), 0.3, as_data(-1))


def test_varlen_takes_slices_of_a_merged_projection():
    qkv = torch.randn(2, 6, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    out = ON_CPU["varlen"](*qkv.unbind(2), 0.3, None)
    truth = reference(*qkv.unbind(2), 0.3, None)
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), qkv)[0] for y in (out, truth)))


# FlexAttention


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_rule_without_its_kernel(monkeypatch):
    """PyTorch's own dense form of FlexAttention looks at the rule of our block mask, not at the blocks."""
    monkeypatch.setattr(flex_module, "_compiled", lambda: flex_module._attend)
    for rows, seq_len, lengths in PACKED.values():
        documents = pack_documents(lengths)
        q, k, v = inputs(rows, seq_len, 2, 16, torch.float32)
        for window in (None, 0, 3):
            got = backend("flex")(q, k, v, 0.3, window, documents)
            torch.testing.assert_close(got, reference(q, k, v, 0.3, window, documents))


def assert_blocks_are_right(first_BS):
    """Every list of blocks against the visible pairs themselves."""
    mask = flex_module.block_mask(first_BS)
    B, S = first_BS.shape
    n = -(-S // 128)
    token = torch.arange(n * 128)
    for b in range(B):
        first = torch.cat((first_BS[b], token[S:] + 1))  # padding sees nothing
        pairs = (first[:, None] <= token) & (token <= token[:, None])
        blocks = pairs.view(n, 128, n, 128)
        some, inside = blocks.any(3).any(1), torch.arange(n * 128) < S
        every = (blocks | ~inside.view(n, 128, 1, 1)).all(3).all(1)
        # A diagonal block is masked even where a single token sees all of it, which costs nothing.
        every &= ~torch.eye(n, dtype=torch.bool)
        for count, index, expected in (
            (mask.kv_num_blocks, mask.kv_indices, some & ~every),
            (mask.full_kv_num_blocks, mask.full_kv_indices, every),
            (mask.q_num_blocks, mask.q_indices, (some & ~every).T),
            (mask.full_q_num_blocks, mask.full_q_indices, every.T),
        ):
            listed = [sorted(index[b, 0, i, : count[b, 0, i]].tolist()) for i in range(n)]
            assert listed == [expected[i].nonzero().flatten().tolist() for i in range(n)]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=12).filter(any),
    st.one_of(st.none(), st.integers(0, 600)),
)
def test_flex_block_lists(lengths, window):
    documents = pack_documents([*lengths, *reversed(lengths)])
    assert_blocks_are_right(first_key(2, sum(lengths), window, documents, CPU))
    assert_blocks_are_right(first_key(2, sum(lengths), window, None, CPU))


def test_flex_compiles_without_graph_breaks():
    q, k, v = inputs(2, 150, 2, 16, torch.float32)
    documents = pack_documents([149, 1, 0, 130, 20])
    compiled = torch.compile(backend("flex"), backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(
        compiled(q, k, v, 0.3, 20, documents), reference(q, k, v, 0.3, 20, documents), atol=1e-5, rtol=1e-5
    )


# What is wrong is said


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"exec.attention='fa9': known backends are sdpa"):
        backend("fa9")


@pytest.mark.parametrize("name", [*ON_CPU, "flex"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(k=a["k"][:, :, :1]), "equal rows, heads and head sizes"),
        (lambda a: a.update(q=a["q"][0]), r"\(rows, tokens, heads, head size\)"),
        (lambda a: a.update(v=a["v"].float()), "one dtype"),
        (lambda a: a.update(k=a["k"][:, 1:], v=a["v"][:, 1:], documents=None), "no more queries than keys"),
        (lambda a: a.update(q=a["q"][:, 1:]), "with a cache, leave documents out"),
        (lambda a: a.update(window=-1), "window=-1 must be at least 0"),
        (lambda a: a.update(documents=Documents(torch.tensor([0, 6]), 6)), "must be int32"),
        (lambda a: a.update(documents=Documents(torch.tensor([0], dtype=torch.int32), 6)), "D >= 2"),
        (lambda a: a.update(documents=a["documents"]._replace(max_seq_len=0)), "max_seq_len=0"),
    ],
)
def test_bad_inputs(name, change, message):
    q, k, v = inputs(1, 6, 2, 8)
    arguments = {"q": q, "k": k, "v": v, "window": None, "documents": pack_documents([2, 4])}
    change(arguments)
    attend = ON_CPU.get(name) or backend(name)
    with pytest.raises(ValueError, match=message):
        attend(arguments["q"], arguments["k"], arguments["v"], 0.3, arguments["window"], arguments["documents"])


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_dense_kernels_refuse_what_they_lack(name):
    q, k, v = inputs(1, 6, 2, 8)
    for window, documents in ((2, None), (None, pack_documents([2, 4]))):
        with pytest.raises(ValueError, match=f"{name} has no documents and no window: use triton"):
            backend(name)(q, k, v, 0.3, window, documents)


@pytest.mark.parametrize(
    ("ends", "longest", "message"),
    [
        ([0, 4, 11], 9, "must run from 0 to rows x seq_len = 12"),
        ([0, 8, 6, 12], 9, "falls from 8 to 6 at entry 2"),
        ([0, 6, 12], 5, "6 tokens, more than max_seq_len=5"),
        ([0, 5, 7, 12], 9, "crosses the end of a row at token 6"),
    ],
)
def test_wrong_documents(ends, longest, message):
    with pytest.raises(ValueError, match=message):
        check_documents(Documents(torch.tensor(ends, dtype=torch.int32), longest), 2, 6)


def test_packing_pads_and_refuses_to_drop():
    documents = pack_documents([2, 3], slots=5)
    assert documents.cu_seqlens.tolist() == [0, 2, 5, 5, 5]
    assert documents.max_seq_len == 3
    with pytest.raises(ValueError, match="3 documents do not fit cu_seqlens of 3 entries: use at least 4"):
        pack_documents([1, 1, 1], slots=3)


def test_what_a_cpu_offers():
    reasons = available(CPU)
    assert list(reasons) == list(BACKENDS)
    assert [name for name, reason in reasons.items() if reason is None] == ["sdpa", "batched", "reference"]
    assert available(CPU, training=False)["flex"] is None
    require("sdpa", Needs(device=CPU, dtype=torch.float64, head_dim=64, documents=True, window=True))
    for name in ("cudnn", "flash", "fa2", "fa3", "fa4", "flex", "triton"):
        with pytest.raises(ValueError, match=f"exec.attention={name} cannot serve here: it "):
            require(name, Needs(device=CPU, dtype=torch.bfloat16, head_dim=64))


# On a GPU

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU_CASES = [(d, w) for d in (False, True) for w in (None, 0, 5, 140, 700)]
GPU_RUNS = [
    pytest.param(name, documents, window, marks=on_gpu, id=f"{name}-{'documents' if documents else 'rows'}-{window}")
    for name in BACKENDS
    for documents, window in GPU_CASES
    if name != "batched"  # bf16 throughout, for CPUs
    if name not in ("cudnn", "flash") or not (documents or window is not None)
    if name != "flex" or (documents, window) in ((False, None), (True, 0), (True, 140))  # each takes seconds to compile
]


def on_cuda(name, **needs):
    """The back end, or a skip with the reason why this machine cannot run it."""
    device = torch.device("cuda")
    try:
        require(name, Needs(device=device, dtype=torch.bfloat16, head_dim=64, **needs))
    except ValueError as error:
        pytest.skip(str(error))
    return backend(name), device


@pytest.mark.parametrize(("name", "documents", "window"), GPU_RUNS)
def test_gpu_backends(name, documents, window):
    attend, device = on_cuda(name)
    lengths = [1, 130, 0, 1, 7, 194, 1, 0, 0, 332, 333]
    packed = check_documents(pack_documents(lengths, slots=16, device=device), 3, 333) if documents else None
    leaves = probe.random_inputs((3, 333, 3, 64), torch.bfloat16, device)
    forward, *gradients = probe.errors(attend, leaves, 0.12, window, packed)
    assert forward <= 5e-3
    assert max(gradients) <= 1e-2


@pytest.mark.parametrize("name", [pytest.param(n, marks=on_gpu) for n in ("fa2", "fa3", "fa4", "triton")])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_operators(name, head_dim):
    _, device = on_cuda(name)
    q, k, v = (
        t[0].detach().requires_grad_() for t in probe.random_inputs((1, 60, 2, head_dim), torch.bfloat16, device)[:3]
    )
    cu_seqlens = pack_documents([30, 1, 0, 29], slots=8, device=device).cu_seqlens
    operator = getattr(torch.ops.nanosprint, f"attend_{name}").default
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for limits in ((30, 7, None, None, None), (60, -1, as_data(30), as_data(7), scale_as_data(0.3))):
        torch.library.opcheck(operator, (q, k, v, cu_seqlens, 0.1, *limits), test_utils=utilities)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=on_gpu) for n in ("sdpa", "flex", "fa2", "fa3", "fa4", "triton")]
)
def test_gpu_compiled(name):
    """Inside torch.compile without a graph break, on slices of one projection as the model has them.

    One graph serves two windows and scales where they are data.
    """
    attend, device = on_cuda(name)
    baked = BACKENDS[name].bakes_limits
    packed = pack_documents([1, 130, 0, 202], slots=16, device=device)
    qkv, weight = (torch.randn(1, 333, n * 2 * 64, device=device, dtype=torch.bfloat16) for n in (3, 1))
    qkv.requires_grad_()

    def work(qkv, scale, window, documents):
        q, k, v = (t.view(1, 333, 2, 64) for t in qkv.split(128, dim=-1))
        return attend(q, k, v, scale, window, documents).flatten(2) * 2

    def exact(qkv, scale, window):
        q, k, v = (t.view(1, 333, 2, 64) for t in qkv.split(128, dim=-1))
        return reference(q, k, v, scale, window, packed).flatten(2) * 2

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(work, fullgraph=True, dynamic=False)
    for scale, window, longest in ((0.12, 50, 202), (0.15, 140, 333)):
        documents = packed if baked else packed._replace(max_seq_len=as_data(longest))
        limits = (scale, window) if baked else (scale_as_data(scale), as_data(window))
        out = compiled(qkv, *limits, documents)
        double = qkv.detach().double().requires_grad_()
        truth = exact(double, scale, window)
        assert probe.relative_error(out, truth) < 1e-2
        grad = torch.autograd.grad(out, qkv, weight)[0]
        true_grad = torch.autograd.grad(truth, double, weight.double())[0]
        assert probe.relative_error(grad, true_grad) < 1e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if baked else 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_choice(packed, caplog, tmp_path):
    caplog.set_level("INFO")
    call = Call(rows=8, seq_len=4096, num_heads=6, head_dim=64, places=2)
    call = replace(call, window=640, longest=2048) if packed else replace(call, places=1)
    name = choose(torch.device("cuda"), torch.bfloat16, [call], cache=tmp_path)
    assert name in BACKENDS
    assert caplog.messages[-1].startswith(f"attention {name}: ")
    assert "forward and backward on 8 x 4,096 tokens" in caplog.messages[-1]
    assert choose(torch.device("cuda"), torch.bfloat16, [call], cache=tmp_path) == name
    assert "measured before" in caplog.messages[-1]
    print(caplog.text)
