"""Orthogonalisations that share launches: the work that is dealt out, the kernel in threads on a CPU, and on a GPU."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from nanosprint.kernels import has_triton, tuning
from nanosprint.kernels.polar_jobs import PIECE, TILE, Bank, fits, plan
from nanosprint.ops import polar
from nanosprint.ops.polar import POLAR_EXPRESS, quintic_steps_reference
from tests.ops.gluon_in_threads import Threads
from tests.ops.gluon_on_cpu import load_module

RECORD = (Bank(60, 256, 768), Bank(20, 768, 768), Bank(22, 3072, 768))
SMALL = (Bank(2, 128, 256), Bank(1, 256, 256), Bank(1, 512, 256))  # a tile without a neighbour, two, and blocks
UNEVEN = (Bank(1, 384, 384), Bank(2, 128, 384))
WIDE = (Bank(2, 128, 512), Bank(1, 256, 512))  # A is narrower than X
SETS = (RECORD, SMALL, UNEVEN, WIDE, (Bank(3, 768, 256),))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tiles(work):
    """(row, column) of every tile as it is stored, once for each time, with the steps that it sums."""
    for job in work.jobs:
        for who in range(2):
            stores = job.stores >> 2 * who & 3
            if stores & 1:
                yield (job.row + who * TILE, job.col), job.steps
            if stores & 2:
                yield (job.turned_row, job.turned_col + who * TILE), job.steps


def blocks(banks, gram):
    """First row, rows and columns of each result: A of each matrix, or its part of X."""
    row = 0
    for bank in banks:
        for _ in range(bank.num):
            yield row, (bank.side if gram else bank.rows), (bank.side if gram else bank.cols), bank
            row += bank.side if gram else bank.rows


@pytest.mark.parametrize("banks", SETS)
@pytest.mark.parametrize("programs", [1, 7, 132])
def test_every_tile_of_every_result_is_stored_once(banks, programs):
    found = plan(banks, programs)
    for name in ("gram", "polynomial", "update", "last"):
        work, gram = getattr(found, name), name in ("gram", "polynomial")
        assert work.starts[0] == 0
        assert work.starts[-1] == len(work.jobs)
        assert len(work.starts) == programs + 1
        assert list(work.starts) == sorted(work.starts)
        stored = Counter(place for place, _ in tiles(work))
        wanted = [
            (row + m, n)
            for row, rows, cols, _ in blocks(banks, gram)
            for m in range(0, rows, TILE)
            for n in range(0, cols, TILE)
        ]
        assert stored == Counter(wanted)
        steps = dict(tiles(work))
        for row, _, _, bank in blocks(banks, gram):
            summed = max(bank.rows, bank.cols) if name == "gram" else bank.side
            assert steps[row, 0] * PIECE == summed


def test_the_records_work_is_dealt_evenly():
    found = plan(RECORD, 132)
    for work in (found.gram, found.polynomial, found.update, found.last):
        loads = [sum(job.cost for job in work.jobs[a:b]) for a, b in zip(work.starts, work.starts[1:], strict=False)]
        assert max(loads) < 1.05 * sum(loads) / len(loads)


def test_what_fits():
    assert all(fits(banks) for banks in SETS)
    assert not fits([])
    assert not fits([Bank(2, 128, 256), Bank(2, 128, 384)])
    assert not fits([Bank(2, 100, 256)])
    assert not fits([Bank(2, 640, 256)])  # blocks of 256 rows do not fill it
    assert not fits([Bank(0, 128, 256)])


def stacks_of(banks, device="cpu", dtype=torch.float32):
    return [torch.randn(bank, device=device).to(dtype) for bank in banks]


def norms_of(stacks):
    return [torch.linalg.vector_norm(G, dim=(1, 2), keepdim=True, dtype=torch.float32) for G in stacks]


@pytest.fixture
def grouped(monkeypatch):
    """The module, its kernel run by threads, a block after the other."""
    if not has_triton():
        pytest.skip("needs Triton")
    from nanosprint.kernels import polar_grouped

    machine = Threads()
    module = load_module(str(Path(polar_grouped.__file__)), machine)
    module.machine, module.when = machine, {}
    kernel = module._grouped_product_kernel

    class Launcher:
        def __getitem__(self, grid):
            def launch(*args, num_warps, **constants):
                assert num_warps == 4
                machine.launch(kernel, grid[0], *args, **module.when, **constants)

            return launch

    def divide(G, norm, margin, eps, out, turned):
        quotient = G / (norm * margin + eps)
        if turned:
            count, rows, cols = G.shape
            quotient = quotient.view(count, rows // cols, cols, cols).mT.reshape(G.shape)
        out.copy_(quotient)

    monkeypatch.setattr(module, "_grouped_product_kernel", Launcher())
    monkeypatch.setattr(module, "divide", divide)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return module


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("late_products", [False, True])
@pytest.mark.parametrize("banks", [SMALL, UNEVEN, WIDE])
def test_results_do_not_depend_on_when_things_are_done(grouped, banks, late_copies, late_products):
    grouped.when = {"late_copies": late_copies, "late_products": late_products}
    stacks = stacks_of(banks)
    before = [G.clone() for G in stacks]
    norms = norms_of(stacks)
    for steps in (1, 2):
        out = grouped.quintic_stacks(stacks, norms, 1.02, 1e-6, POLAR_EXPRESS[:steps])
        for G, norm, got in zip(stacks, norms, out, strict=True):
            truth = quintic_steps_reference((G / (1.02 * norm + 1e-6)).clone(), POLAR_EXPRESS[:steps])
            torch.testing.assert_close(got, truth, atol=1e-5, rtol=1e-4)
    assert all(torch.equal(G, old) for G, old in zip(stacks, before, strict=True))


def test_symmetric_results_are_symmetric_bit_for_bit(grouped):
    grouped.when = {"late_copies": False, "late_products": False}
    X = torch.randn(512, 256)
    tables = grouped._tables((Bank(2, 256, 256),), X.device)
    A = torch.full((512, 256), float("nan"))
    grouped.grouped_product(X, X, A, tables.gram, alpha=2.0)
    for x, a in zip(X.view(2, 256, 256), A.view(2, 256, 256), strict=True):
        assert torch.equal(a, a.mT)
        torch.testing.assert_close(a, 2 * x @ x.mT, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(polar.ORTHOGONALIZERS))
def test_one_by_one_where_no_launches_are_shared(name):
    function = polar.orthogonalizer(name)
    stacks = [torch.randn(2, 5, 7), torch.randn(1, 9, 3)]
    for got, G in zip(polar.orthogonalize_stacks(function, stacks, torch.float32), stacks, strict=True):
        assert torch.equal(got, function(G, dtype=torch.float32))
    assert polar.orthogonalize_stacks(function, [], torch.float32) == []


@pytest.fixture
def hopper(monkeypatch):
    """GPU tests of the kernel, whether or not `tuning` takes it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from nanosprint.kernels import has_gluon

    if not has_gluon():
        pytest.skip("needs the Triton whose Gluon the kernel is written for")
    monkeypatch.setattr(tuning, "GROUPED_POLAR", ((9, 0),))


ON_A_GPU = (
    *SETS[:-1],
    (Bank(48, 256, 768), Bank(16, 768, 768), Bank(18, 3072, 768)),
    (Bank(1, 768, 3072), Bank(2, 3072, 3072)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("banks", ON_A_GPU)
def test_products_on_a_gpu(hopper, banks):
    """Each of the three against float64, results filled with NaN first; symmetric ones bit for bit so."""
    from nanosprint.kernels import polar_grouped

    device = torch.device("cuda")
    tables = polar_grouped._tables(banks, device)
    sizes = tables.plan
    X = torch.randn(sizes.rows, sizes.width, device=device).bfloat16() / sizes.width**0.5

    def nan(*shape):
        return torch.full(shape, float("nan"), device=device, dtype=torch.bfloat16)

    A, B = (nan(sizes.gram_rows, sizes.gram_width) for _ in range(2))
    Y, Z = nan(sizes.rows, sizes.width), nan(sizes.rows, sizes.width)
    polar_grouped.grouped_product(X, X, A, tables.gram)
    polar_grouped.grouped_product(A, A, B, tables.polynomial, alpha=0.5, add=A, beta=-2.0)
    polar_grouped.grouped_product(B, X, Y, tables.update, upright=True, add=X, beta=1.5)
    polar_grouped.grouped_product(B, X, Z, tables.last, upright=True, add=X, beta=1.5)
    x = a = 0
    for bank in banks:
        side, across = bank.side, bank.rows // bank.side
        for _ in range(bank.num):
            rows, square = slice(x, x + bank.rows), (slice(a, a + side), slice(0, side))
            parts = X[rows].double().view(across, side, bank.cols)
            gram, poly = A[square], B[square]
            assert near(gram, (parts @ parts.mT).sum(0))
            assert near(poly, 0.5 * gram.double() @ gram.double() - 2 * gram.double())
            assert torch.equal(gram, gram.mT)
            assert torch.equal(poly, poly.mT)
            update = poly.double() @ parts + 1.5 * parts
            assert near(Y[rows], update.reshape(bank.rows, bank.cols))
            turned = update.mT.reshape(bank.rows, bank.cols) if bank.tall else update.reshape(bank.rows, bank.cols)
            assert near(Z[rows], turned)
            x, a = x + bank.rows, a + side


def near(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item() < 2.5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(polar.ORTHOGONALIZERS))
@pytest.mark.parametrize("banks", ON_A_GPU)
def test_stacks_on_a_gpu(hopper, banks, name):
    """As far from the formula in float64 as one stack after the other is, and the same bits every time."""
    function = polar.orthogonalizer(name)
    stacks = stacks_of(banks, "cuda", torch.bfloat16)
    before = [G.clone() for G in stacks]
    out = polar.orthogonalize_stacks(function, stacks)
    again = polar.orthogonalize_stacks(function, stacks)
    for G, old, got, same in zip(stacks, before, out, again, strict=True):
        assert torch.equal(got, same)
        assert torch.equal(G, old)
        assert (got.shape, got.dtype) == (G.shape, torch.bfloat16)
        first, alone = got[:2].double(), function(G[:2]).double()
        truth = function(G[:2], dtype=torch.float64)
        assert error(first, truth) < max(1.15 * error(alone, truth), 1.3e-2)
        assert error(got, function(G).double()) < 1.5e-2


def error(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


@pytest.mark.gpu
def test_what_does_not_fit_is_done_one_by_one_on_a_gpu(hopper, monkeypatch):
    """Odd sizes, other dtypes, stacks of several widths; and inside a recorded graph what fits is shared."""
    taken = []
    from nanosprint.kernels import polar_grouped

    kernel = polar_grouped.quintic_stacks
    monkeypatch.setattr(polar_grouped, "quintic_stacks", lambda *args: taken.append(1) or kernel(*args))
    for shapes in (((2, 333, 514), (1, 128, 514)), ((2, 128, 256), (2, 128, 384)), ((2, 640, 256), (1, 256, 256))):
        stacks = [torch.randn(shape, device="cuda") for shape in shapes]
        for dtype in (torch.bfloat16, torch.float32):
            out = polar.orthogonalize_stacks(polar.polar_express, stacks, dtype)
            for got, G in zip(out, stacks, strict=True):
                assert torch.equal(got, polar.polar_express(G, dtype=dtype))
    assert not taken
    stacks = stacks_of(SMALL, "cuda", torch.bfloat16)
    expected = polar.orthogonalize_stacks(polar.polar_express, stacks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = polar.orthogonalize_stacks(polar.polar_express, stacks)
    graph.replay()
    assert len(taken) == 2
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
