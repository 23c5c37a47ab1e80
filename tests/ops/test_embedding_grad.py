"""The gradient of look-ups, by the operator and by its kernel, against float64 sums token by token."""

import logging

import pytest
import torch
import torch.nn.functional as F

from nanosprint.kernels import has_triton
from nanosprint.ops import embedding as ops
from nanosprint.ops.embedding import Rows, lookup, lookup_chunks, rows_of, sort_rows


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def truth(ids, grads, size):
    """(size, count D): each token's gradient added to its row; a part without one stays zero."""
    D = next(g for g in grads if g is not None).size(-1)
    table = torch.zeros(size, len(grads), D, dtype=torch.float64)
    for k, g in enumerate(grads):
        if g is not None:
            for row, i in zip(g.double().cpu().reshape(-1, D), ids.flatten().tolist(), strict=True):
                table[i, k] += row
    return table.flatten(1)


def zipf(num, size):
    """Ids as in a text: the r-th most frequent has a share of 1/r, the first some 10 %."""
    ranks = torch.multinomial(1 / torch.arange(1.0, size + 1), num, replacement=True)
    return torch.randperm(size)[ranks]


ID_CASES = {  # ids, rows of the table
    "mixed": (lambda: torch.randint(40, (103,)), 40),
    "text": (lambda: zipf(151, 30), 30),
    "one id, the first": (lambda: torch.zeros(77, dtype=torch.int64), 5),
    "one id, the last": (lambda: torch.full((77,), 4), 5),
    "all different": (lambda: torch.randperm(80)[:45], 80),
    "both ends": (lambda: torch.tensor([0, 9, 9, 0] * 11), 10),
    "one token": (lambda: torch.tensor([3]), 7),
    "no token": (lambda: torch.zeros(0, dtype=torch.int64), 7),
    "borders": (lambda: torch.arange(6).repeat_interleave(16), 6),  # segments as long as runs
}


def test_rows_are_sorted_stably():
    ids = torch.tensor([[3, 1, 3], [0, 1, 3]], dtype=torch.int32)
    rows = sort_rows(ids)
    assert rows.order.tolist() == [3, 1, 4, 0, 2, 5]
    assert rows.sorted_ids.tolist() == [0, 1, 1, 3, 3, 3]
    assert (rows.order.dtype, rows.sorted_ids.dtype) == (torch.int64, torch.int32)


def test_no_sort_where_no_kernel_wants_one():
    ids = torch.arange(4)
    assert rows_of(ids) == Rows(ids, None, None)
    assert torch.compile(rows_of, backend="eager", fullgraph=True)(ids).order is None


@pytest.mark.parametrize("case", ID_CASES)
@pytest.mark.parametrize("present", [(True,), (True, True, True), (False, True, False), (True, False, False)])
def test_operator_in_float64(case, present):
    draw, size = ID_CASES[case]
    ids = draw()
    grads = [torch.randn(len(ids), 6, dtype=torch.float64) if there else None for there in present]
    _, order, sorted_ids = sort_rows(ids)
    parts = [k for k, g in enumerate(grads) if g is not None]
    flat = [grads[k] for k in parts]
    got = torch.ops.nanosprint.embedding_grad(flat, parts, order, sorted_ids, size, len(grads), torch.float64)
    torch.testing.assert_close(got, truth(ids, grads, size), rtol=1e-12, atol=1e-12)


def run(function, weight, rows, used, dtype):
    """Values and gradient of a look-up in three parts, of which `used` count, with weights of their own."""
    weight = weight.detach().clone().requires_grad_()
    parts = function(weight, rows, 3, dtype)
    loss = sum(
        (part.double() * (k + 1 + torch.arange(4)).sin()).square().sum() for k, part in enumerate(parts) if k in used
    )
    return parts, torch.autograd.grad(loss, weight)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,)])
def test_sorted_look_up_equals_torch(used, dtype):
    weight, ids = torch.randn(30, 12), zipf(60, 30).view(3, 20)
    theirs, expected = run(lookup_chunks, weight, Rows(ids), used, dtype)
    ours, got = run(lookup_chunks, weight, sort_rows(ids), used, dtype)
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(ours, theirs, strict=True))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_without_a_sort_it_is_torch_bit_for_bit():
    weight, ids = torch.randn(30, 12).bfloat16(), zipf(60, 30).view(3, 20)

    def plain(weight, rows, count, dtype):
        return F.embedding(rows.ids, weight).to(dtype).chunk(count, dim=-1)

    (_, expected), (_, got) = (run(f, weight, rows_of(ids), (0, 1, 2), torch.float32) for f in (plain, lookup_chunks))
    assert torch.equal(got, expected)


class Swallow(torch.autograd.Function):
    """Values pass, gradients do not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


def test_no_gradient_wide_tables_and_mistakes():
    ids = torch.tensor([0, 2, 2])
    weight = torch.randn(3, 4, requires_grad=True)
    Swallow.apply(lookup(weight, sort_rows(ids))).sum().backward()
    assert weight.grad is None
    wide = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)  # no kernel sums in fp64
    assert torch.autograd.gradcheck(lambda w: lookup(w, sort_rows(ids)), wide)
    with pytest.raises(ValueError, match=r"\(3, 4\) has no 3 parts"):
        lookup_chunks(weight, Rows(ids), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    _, order, sorted_ids = sort_rows(zipf(50, 20))
    grads = [torch.randn(50, 4).to(dtype) for _ in range(2)]
    op = torch.ops.nanosprint.embedding_grad.default
    torch.library.opcheck(op, (grads, [0, 2], order, sorted_ids, 20, 3, dtype))


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2)])
def test_compiled_in_one_graph(used):
    """The sort included, and shared by two tables."""

    def loss(words, tables, ids):
        assert ops._has_kernel() == expected  # asked while tracing
        rows = sort_rows(ids)
        x = lookup(words, rows, torch.bfloat16)
        parts = lookup_chunks(tables, rows, 3)
        return x.float().square().sum() + sum((k + parts[k]).square().sum() for k in used)

    expected = ops._has_kernel()
    words, tables, ids = torch.randn(30, 8), torch.randn(30, 12), zipf(60, 30).view(3, 20)
    torch._dynamo.reset()
    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (words, tables)]
        value = function(*leaves, ids)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_see_the_gradient():
    """Reductions between processes are launched by such hooks."""
    weight = torch.randn(5, 4, requires_grad=True)
    weight.grad = torch.ones(5, 4)
    kept, seen = weight.grad, []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        lookup(weight, sort_rows(torch.tensor([1, 1, 4]))).sum().backward()
    assert weight.grad is kept
    expected = torch.tensor([1.0, 5.0, 1.0, 1.0, 3.0])[:, None].expand(5, 4)
    assert torch.equal(seen[-1], expected)
    assert len(seen) == 2


def test_a_gpu_without_triton_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(ops, "has_triton", lambda: False)
    ops._without_triton.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not ops._has_kernel()
        assert not ops._has_kernel()
    assert caplog.text.count("gradients of look-ups are summed by torch") == 1


def needs_kernel():
    if not (torch.cuda.is_available() and has_triton()):
        pytest.skip("needs a CUDA device and Triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("num", "size", "D", "count"), [(40_000, 5000, 768, 1), (9_999, 3000, 100, 3), (1, 4, 8, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_on_a_gpu(num, size, D, count, dtype):
    """Ids as in a text, tens of runs for the first of them, and one part without a gradient."""
    needs_kernel()
    ids = zipf(num, size).cuda()
    weight = torch.randn(size, count * D, device="cuda", dtype=dtype, requires_grad=True)
    rows = rows_of(ids)
    assert rows.order is not None
    parts = lookup_chunks(weight, rows, count)
    used = parts[:1] if count == 1 else parts[1:]
    upstream = [torch.randn_like(part) for part in used]
    got, again = (torch.autograd.grad(used, weight, upstream, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(got, again)
    assert got.dtype == dtype
    double = torch.zeros(size, count * D, device="cuda", dtype=torch.float64)
    for k, g in enumerate(upstream, start=count - len(used)):
        double[:, k * D : (k + 1) * D].index_add_(0, ids, g.double())
    assert (got.double() - double).norm() / double.norm() < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(got.any(-1), torch.bincount(ids, minlength=size) > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ID_CASES)
def test_kernel_on_odd_ids(case):
    needs_kernel()
    draw, size = ID_CASES[case]
    ids = draw()
    grads = [torch.randn(len(ids), 33).bfloat16(), None, torch.randn(len(ids), 33).bfloat16()]
    weight = torch.randn(size, 99, device="cuda", requires_grad=True)
    parts = lookup_chunks(weight, rows_of(ids.cuda()), 3, torch.bfloat16)
    (got,) = torch.autograd.grad(parts[::2], weight, [g.cuda() for g in grads[::2]])
    torch.testing.assert_close(got.cpu().double(), truth(ids, grads, size), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_compiled_on_a_gpu():
    needs_kernel()

    @torch.compile(fullgraph=True, dynamic=False)
    def loss(words, tables, ids):
        rows = rows_of(ids)
        x = F.rms_norm(lookup(words, rows), (64,), eps=1e-6)
        parts = lookup_chunks(tables, rows, 3)
        return sum((x + (k + 1) * part).float().square().sum() for k, part in enumerate(parts))

    ids = zipf(3000, 500).view(3, 1000).cuda()
    leaves = [torch.randn(500, n, device="cuda").bfloat16().requires_grad_() for n in (64, 192)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    x = F.rms_norm(F.embedding(ids, wide[0]), (64,), eps=1e-6)
    parts = F.embedding(ids, wide[1]).chunk(3, dim=-1)
    expected = torch.autograd.grad(sum((x + (k + 1) * p).square().sum() for k, p in enumerate(parts)), wide)
    got, again = (torch.autograd.grad(loss(*leaves, ids), leaves) for _ in range(2))
    for a, b, c in zip(got, expected, again, strict=True):
        assert (a.double() - b).norm() / b.norm() < 1e-2  # gradients of tokens are rounded to bf16, too
        assert torch.equal(a, c)


@pytest.mark.gpu
def test_offsets_beyond_31_bits():
    needs_kernel()
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    N, D = 600_000, 3840
    ids = torch.randint(N, (N,), device="cuda")
    g = torch.randn(N, D, device="cuda", dtype=torch.bfloat16)
    weight = torch.empty(N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (got,) = torch.autograd.grad(lookup(weight, rows_of(ids)), weight, g)
    for row in (int(ids.max()), int(ids[-1])):
        torch.testing.assert_close(got[row].float(), g[ids == row].float().sum(0), rtol=8e-3, atol=1e-2)


def test_kernel_logic_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def interpreted():
    from nanosprint.kernels import embedding as kernels

    kernels._PARTS, kernels._COLUMNS = 2, 8  # several rounds of the second pass
    for case, (draw, size) in ID_CASES.items():
        for tuning, D, present in (((4, 4, 1), 1, [0]), ((8, 16, 1), 20, [0, 2])):
            kernels.EMBEDDING = tuning
            torch.manual_seed(0)
            ids = draw()
            grads = [torch.randn(len(ids), D) if k in present else None for k in range(3)]
            table = torch.full((size, 3, D), 7.0)
            outs, (_, order, sorted_ids) = [table[:, k] for k in present], sort_rows(ids)
            kernels.sum_segments([grads[k] for k in present], order, sorted_ids, outs)
            occurs = torch.bincount(ids, minlength=size) > 0
            expected = truth(ids, grads, size).view(table.shape).float()[occurs][:, present]
            torch.testing.assert_close(table[occurs][:, present], expected, rtol=1e-5, atol=1e-5, msg=case)
            assert table[~occurs].eq(7).all(), case
            assert table[:, 1].eq(7).all(), case


if __name__ == "__main__":
    interpreted()
