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
    start = torch.randn(size, 6 * len(grads), dtype=torch.float64)
    table = start.clone()
    torch.ops.nanosprint.add_rows(table, flat, parts, order, sorted_ids)
    torch.testing.assert_close(table, start + truth(ids, grads, size), rtol=1e-12, atol=1e-12)
    assert torch.equal(table[torch.bincount(ids, minlength=size) == 0], start[torch.bincount(ids, minlength=size) == 0])


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
    table = torch.randn(20, 12).to(dtype)
    torch.library.opcheck(torch.ops.nanosprint.add_rows.default, (table, grads, [0, 2], order, sorted_ids))


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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_hooks_see_the_whole_gradient(compiler, in_place):
    """Reductions between processes are launched by such hooks: once in a backward pass, behind its last look-up."""
    weight = torch.randn(5, 4, requires_grad=True)
    weight.grad = torch.ones(5, 4)
    kept, seen = weight.grad, []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def loss(weight, ids):
        one, other = (lookup(weight, sort_rows(i), in_place=in_place) for i in (ids, ids - 1))
        return (one + other).sum()

    torch._dynamo.reset()
    loss = loss if compiler == "eager" else torch.compile(loss, backend=compiler, fullgraph=True)
    for _ in range(2):
        loss(weight, torch.tensor([1, 1, 4])).backward()
    assert weight.grad is kept
    expected = [torch.tensor(row)[:, None].expand(5, 4) for row in ([3.0, 3, 1, 2, 2], [5.0, 5, 1, 3, 3])]
    assert len(seen) == 2
    assert all(map(torch.equal, seen, expected))


def a_step(device, dtype, **options):
    """A table, the ids of two micro-batches, and the loss of one of them; the same at every call.

    The loss looks the table up in three parts, so many `times`, with `options`; where it is `tied` it is a matrix, too.
    """
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(40, 12, generator=generator).to(device, dtype).requires_grad_()
    ids = [torch.randint(25, (3, 20), generator=generator).to(device) for _ in range(2)]

    def loss(table, ids, times, tied):
        total = 0.0
        for i in range(times):
            parts = lookup_chunks(table, sort_rows((ids + 7 * i) % 40), 3, **options)
            total = total + sum(((k + 1 + i) * part.double()).sin().sum() for k, part in enumerate(parts))
        return total + (table.double() @ table.double().mT).sum() / 100 if tied else total

    return table, ids, loss


def gradient(step, times, tied, start, compiler=None, splits=2):
    """What the table's gradient becomes after two micro-batches, from `start`, and whether it has stayed in place."""
    table, batches, loss = step
    table.grad = kept = start.to(table).clone()
    torch._dynamo.reset()
    compute = loss if compiler is None else torch.compile(loss, backend=compiler, fullgraph=True, dynamic=False)
    for ids in batches[:splits]:
        compute(table, ids, times, tied).backward()
    assert table.grad is kept
    return kept


CASES = [(1, False), (2, False), (1, True), (2, True)]  # look-ups of the table in a micro-batch; whether it is tied


@pytest.mark.parametrize(("times", "tied"), CASES)
@pytest.mark.parametrize("compiler", [None, "aot_eager", "inductor"])
def test_rows_added_in_place_against_float64(times, tied, compiler):
    start = torch.randn(40, 12)
    table, batches, loss = a_step("cpu", torch.float32, in_place=True)
    got = gradient((table, batches, loss), times, tied, start, compiler)
    exact = table.detach().double().requires_grad_()  # no kernel sums in fp64: autograd's own gradients
    sum(loss(exact, ids, times, tied) for ids in batches).backward(inputs=None if tied else [exact])
    torch.testing.assert_close(got.double(), start.double() + exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_rows_added_in_place_are_rounded_as_autograd_rounds(dtype, compiler):
    """Row sums to the table's dtype, and what they are added to again: the same bits after each micro-batch."""
    start = torch.randn(40, 12)
    for splits in (1, 2):
        dense, direct = (
            gradient(a_step("cpu", dtype, in_place=here), 1, False, start, compiler, splits) for here in (False, True)
        )
        assert torch.equal(dense, direct)


def test_compiled_code_adds_to_the_gradient_itself(monkeypatch):
    """Inductor hands the operator the gradient that the table has, not a copy; nothing comes back for autograd."""
    seen, add = [], ops._add_segments

    def spy(grads, order, sorted_ids, outs):
        seen.append((outs[0].data_ptr(), len(grads)))
        add(grads, order, sorted_ids, outs)

    monkeypatch.setattr(ops, "_add_segments", spy)
    step = a_step("cpu", torch.float32, in_place=True)
    from_autograd = []
    step[0].register_hook(from_autograd.append)
    kept = gradient(step, 2, False, torch.zeros(40, 12), "inductor")
    assert seen == [(kept.data_ptr(), 3)] * 4
    assert not any(g is not None for g in from_autograd)


def test_a_table_without_a_gradient_to_add_to():
    table, ids, loss = a_step("cpu", torch.float32, in_place=True)
    with pytest.raises(ValueError, match=r"shape \(40, 12\) has no gradient to add to in place"):
        loss(table, ids[0], 1, False)
    with torch.no_grad():
        lookup(table, rows_of(ids[0]), in_place=True)  # nothing to add without gradients
    lookup(table, Rows(ids[0]), in_place=True).sum().backward()  # nor without a sort, where autograd adds
    assert table.grad is not None


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
@pytest.mark.parametrize("compiler", [None, "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_added_in_place_on_a_gpu(dtype, compiler):
    """By the kernel, the same bits as a gradient of zeros that autograd adds; two micro-batches, one look-up each."""
    needs_kernel()
    start = torch.randn(40, 12)
    dense, direct = (
        gradient(a_step("cuda", dtype, in_place=here), 1, False, start, compiler) for here in (False, True)
    )
    assert torch.equal(dense, direct)
    assert not torch.equal(direct, start.to(direct))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_adds_the_bits_that_torch_adds(dtype):
    """To what the table has, in text-like ids whose segments cross runs, three parts wide; other rows stay."""
    needs_kernel()
    ids = zipf(40_000, 5000).cuda()
    grads = [torch.randn(40_000, 768, device="cuda").bfloat16() for _ in range(3)]
    start = torch.randn(9000, 4 * 768, device="cuda").to(dtype)
    tables = torch.zeros_like(start), start.clone()
    for table in tables:
        torch.ops.nanosprint.add_rows(table, grads, [0, 1, 3], *sort_rows(ids)[1:])
    assert torch.equal(start + tables[0], tables[1])
    untouched = torch.bincount(ids, minlength=9000) == 0
    assert torch.equal(tables[1][untouched], start[untouched])
    assert torch.equal(tables[1][:, 2 * 768 : 3 * 768], start[:, 2 * 768 : 3 * 768])


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
            kernels.add_segments([grads[k] for k in present], order, sorted_ids, outs)
            occurs = torch.bincount(ids, minlength=size) > 0
            expected = 7 + truth(ids, grads, size).view(table.shape).float()[:, present]
            torch.testing.assert_close(table[:, present], expected, rtol=1e-5, atol=1e-5, msg=case)
            assert table[~occurs].eq(7).all(), case
            assert table[:, 1].eq(7).all(), case


if __name__ == "__main__":
    interpreted()
