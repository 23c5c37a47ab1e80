"""The kernel that keeps a row in shared memory: its code on a CPU (`gluon_on_cpu`), itself on a GPU; who gets it."""

from pathlib import Path

import pytest
import torch

from nanosprint.config import SoftcapSpec
from nanosprint.kernels import has_gluon, has_triton, tuning
from nanosprint.kernels.tuning import HeldRow
from nanosprint.ops import fp8, softcap_xent
from nanosprint.ops.softcap_xent import Curve, Labels, curve_of, loss_and_grad
from tests.ops.gluon_on_cpu import Machine, load_module
from tests.ops.test_softcap_xent import case, textbook

CAPS = [
    SoftcapSpec(kind="tanh", cap=15.0),
    SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5),
    SoftcapSpec(kind="tanh", cap=40.0),
]
# Rows, columns, those that are valid, labels; chunks ahead, groups announced. On the CPU a chunk has 1024 columns, and
# there are eight blocks.
CASES = [
    (19, 5 * 1024 + 64, 5 * 1024 + 64, 4, (2, 1)),
    (9, 6 * 1024, 6 * 1024 - 3, 1, (2, 2)),
    (17, 7 * 1024 + 32, 7 * 1024 + 1, 3, (3, 5)),
    (9, 4 * 1024, 1024 + 5, 2, (1, 1)),  # chunks of nothing but padding
    (9, 5 * 1024, 2 * 1024, 2, (2, 0)),
    (10, 3 * 1024 - 32, 3 * 1024 - 40, 5, (3, 1)),  # all of a row is ahead
    (11, 4 * 1024, 4 * 1024, 2, (4, 3)),
    (3, 96, 70, 1, (4, 2)),
    (1, 2080, 2080, 2, (2, 2)),
]


@pytest.fixture
def on_cpu():
    """The launcher, its kernel on a CPU."""
    kernels = pytest.importorskip("nanosprint.kernels.softcap_xent_resident")
    machine = Machine()
    module = load_module(str(Path(kernels.__file__)), machine)

    class Launch:
        kernel = staticmethod(module._softcap_xent_resident_kernel)

        def __getitem__(self, grid):
            def launch(*args, num_warps, maxnreg, **constants):
                assert num_warps * 32 * maxnreg * 2 == 65_536
                machine.launch(self.kernel, grid[0], *args, late_copies=False, late_products=False, **constants)

            return launch

    module._softcap_xent_resident_kernel = Launch()
    return module.softcap_xent_resident


def close(got, expected, inverse):
    """Two roundings to bf16, or one to E5M2 behind one to bf16."""
    wrong = 2**-6.9 if got.element_size() == 2 else 2**-2.9
    error = (got.double() / inverse - expected).abs()
    return (error <= wrong * expected.abs() + 2e-6 / inverse + 1e-7).all()


@pytest.mark.parametrize("spec", CAPS)
@pytest.mark.parametrize("sizes", CASES)
def test_against_the_textbook(on_cpu, spec, sizes):
    torch.manual_seed(0)
    T, V, valid, m, (ahead, soon) = sizes
    logits, labels = case(T, V, m) if T > 1 else (torch.randn(1, V), Labels(torch.tensor([[V - 1, 3]]), *_ones(2, 1)))
    logits = logits.bfloat16()
    sure = valid if m < 4 else valid // 2  # the columns behind it count exp(0.75) times
    labels = labels._replace(ids=labels.ids.clamp(max=sure - 1))
    rest = torch.tensor([sure, 0.75]) if m > 1 else None
    losses, grad = textbook(logits[:, :valid].double(), labels, spec, sure)
    for out in (torch.full((T, V), 7.0).bfloat16(), torch.full((T, V), 7.0).to(fp8.E5M2), logits):
        inverse = 100.0 if out.dtype == fp8.E5M2 else 1.0
        got = torch.full((T,), float("nan"))
        options = {"curve": curve_of(spec), "valid": valid, "inverse": inverse, "rest": rest}
        on_cpu(logits, *labels[:3], got, out, HeldRow(4, ahead, soon), **options)
        torch.testing.assert_close(got.double(), losses, rtol=1e-5, atol=1e-5)
        assert close(out[:, :valid], grad, inverse)
        assert not out[:, valid:].float().any()


def _ones(*lengths):
    return (torch.ones(n) for n in lengths)


def test_what_is_not_a_number_or_too_large(on_cpu):
    logits, labels = case(10, 2048, 2)
    logits = logits.bfloat16()
    logits[4, 2000] = float("nan")
    losses, out = torch.zeros(10), torch.zeros(10, 2048, dtype=fp8.E5M2)
    on_cpu(logits, *labels[:3], losses, out, HeldRow(4, 1, 1), curve=curve_of(CAPS[1]), valid=2048, inverse=1e9)
    bad = torch.arange(10) == 4
    assert torch.equal(losses.isnan(), bad)
    assert torch.equal(out.float().isfinite().all(1), ~bad)
    assert out[~bad].float().abs().max() == torch.finfo(fp8.E5M2).max


def test_rows_that_fit():
    tile = HeldRow(8, 4, 2)
    assert tile.fits(50_304, (50_304, 50_304), 11.5)
    assert tile.fits(56 * 1024, (56 * 1024, 2**20), 40.0)
    assert not tile.fits(56 * 1024 + 32, (2**20, 2**20), 11.5)  # two blocks do not fit any more
    assert not tile.fits(50_304, (50_304, 50_304), 40.5)
    for odd in ((50_257, (50_304, 50_304)), (50_304, (50_304 + 16, 50_304)), (50_304, (50_304, 50_304 + 16))):
        assert not tile.fits(*odd, 11.5)


def test_a_row_that_does_not_fit_is_told_once(monkeypatch, caplog):
    pytest.importorskip("nanosprint.kernels.softcap_xent")
    monkeypatch.setattr(softcap_xent, "has_gluon", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    logits = torch.zeros(2, 60 * 1024).bfloat16()
    for _ in range(2):
        softcap_xent._kernel(logits, Curve(15.0, 1.0, 0.0), logits)
    assert [record.getMessage()[:21] for record in caplog.records] == ["rows of 61440 logits,"]


def test_who_gets_it(monkeypatch):
    kernels = pytest.importorskip("nanosprint.kernels.softcap_xent_resident")
    twice = pytest.importorskip("nanosprint.kernels.softcap_xent").softcap_xent
    monkeypatch.setattr(softcap_xent, "has_gluon", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    logits, curve = torch.zeros(4, 128).bfloat16(), Curve(15.0, 1.0, 0.0)
    chosen = softcap_xent._kernel(logits, curve, logits)
    assert chosen.func is kernels.softcap_xent_resident
    assert chosen.keywords == {"tile": tuning.SOFTCAP_XENT_HELD}
    assert softcap_xent._kernel(logits, curve, logits.to(fp8.E5M2)) != twice
    for other in (
        (logits, None, logits),
        (logits, Curve(90.0, 1.0, 0.0), logits),
        (logits.float(), curve, logits),
        (logits, curve, logits.float()),
        (logits[:, :100], curve, logits),
        (logits[:, 4:100], curve, logits[:, 4:100]),
    ):
        assert softcap_xent._kernel(*other) is twice
    for name, value in (("has_gluon", lambda: False), ("tuning.SOFTCAP_XENT_HELD", None)):
        with monkeypatch.context() as patch:
            patch.setattr(f"nanosprint.ops.softcap_xent.{name}", value)
            assert softcap_xent._kernel(logits, curve, logits) is twice
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert softcap_xent._kernel(logits, curve, logits) is twice


@pytest.fixture
def hopper():
    if not (torch.cuda.is_available() and has_triton() and has_gluon()):
        pytest.skip("needs a CUDA device and Triton 3.6")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def on_gpu(T, V, m, sure=None):
    """Logits in bf16 and labels; half of the columns from `sure` on count more than once."""
    torch.manual_seed(0)
    logits, labels = case(T, V, m)
    rest = None if sure is None else torch.tensor([sure, 0.75]).cuda()
    ids = labels.ids.clamp(max=(sure or V) - 1).cuda()
    return logits.bfloat16().cuda(), Labels(ids, *(t.cuda() for t in labels[1:3]), rest)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", CAPS)
@pytest.mark.parametrize(
    ("T", "V", "valid", "m", "sampled"),
    [
        (1000, 50_304, 50_304, 4, False),
        (700, 50_304, 50_257, 1, False),
        (300, 57_344, 57_344, 2, True),
        (300, 16_384 + 64, 10_001, 3, True),
        (2, 64, 50, 1, False),
        (529, 2048, 2048, 4, False),
    ],
)
def test_on_a_gpu(hopper, spec, T, V, valid, m, sampled):
    logits, labels = on_gpu(T, V, m, valid // 2 if sampled else None)
    labels = labels._replace(ids=labels.ids.clamp(max=valid - 1))
    curve = curve_of(spec)
    exact = torch.empty(T, V, dtype=torch.float64, device="cuda")
    losses = loss_and_grad(logits.double(), labels, curve, exact, valid=valid)
    few = T < 300  # one entry may be nearly all of a norm
    narrow = torch.empty_like(logits, dtype=fp8.E5M2)
    # The hardware's tanh errs by 2^-11, so exponentials of 20 by a percent; labels' columns hardly.
    for out, bound, rest_bound in ((torch.empty_like(logits), 2e-2 if few else 5e-3, 2e-2), (narrow, 0.13, 0.13)):
        inverse = 600.0 if out.element_size() == 1 else 1.0
        assert softcap_xent._kernel(logits, curve, out).func.__name__ == "softcap_xent_resident"
        got = loss_and_grad(logits, labels, curve, out, valid=valid, inverse=inverse)
        assert (got - losses).abs().max() < 0.05
        assert (got - losses).mean().abs() < (3e-2 if few else 1e-2)
        assert (out.double() / inverse - exact).norm() / exact.norm() < bound
        rest = torch.ones_like(exact).scatter_(1, labels.ids.clamp(min=0), 0.0)  # small beside those of labels
        assert ((out.double() / inverse - exact) * rest).norm() / (exact * rest).norm() < rest_bound
        assert not out[:, valid:].float().any()
        again = torch.empty_like(out)
        assert torch.equal(loss_and_grad(logits, labels, curve, again, valid=valid, inverse=inverse), got)
        assert torch.equal(again.view(torch.uint8), out.view(torch.uint8))
    in_place, plain = logits.clone(), torch.empty_like(logits)
    loss_and_grad(logits, labels, curve, plain, valid=valid)
    loss_and_grad(in_place, labels, curve, in_place, valid=valid)
    assert torch.equal(in_place, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", tuning.SOFTCAP_XENT_CANDIDATES, ids=str)
def test_tiles_and_strides_on_a_gpu(hopper, monkeypatch, tile):
    logits, labels = on_gpu(600, 50_304, 4)
    curve, out = curve_of(CAPS[1]), torch.empty_like(logits, dtype=fp8.E5M2)
    losses = loss_and_grad(logits, labels, curve, out, inverse=600.0)
    monkeypatch.setattr(tuning, "SOFTCAP_XENT_HELD", tile)
    wide, wide_out = torch.empty(600, 50_400, device="cuda"), torch.zeros(600, 50_432, device="cuda")
    wide, wide_out = wide.fill_(float("nan")).bfloat16()[:, :50_304], wide_out.to(fp8.E5M2)
    wide.copy_(logits)
    inner = wide_out[:, :50_304]
    got = loss_and_grad(wide, labels, curve, inner, inverse=600.0)
    torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-5)  # sums in another order
    assert (inner.float() != out.float()).float().mean() < 1e-3
    assert not wide_out[:, 50_304:].float().any()


@pytest.mark.gpu
def test_what_is_not_a_number_or_too_large_on_a_gpu(hopper):
    logits, labels = on_gpu(600, 50_304, 4)
    rows = [0, 300, 599]  # of the first blocks, and of their second or third turn
    logits[rows, [0, 30_000, 50_303]] = float("nan")
    bad = torch.zeros(600, dtype=torch.bool, device="cuda")
    bad[rows] = True
    out = torch.empty_like(logits, dtype=fp8.E5M2)
    losses = loss_and_grad(logits, labels, curve_of(CAPS[1]), out, inverse=1e9)
    assert torch.equal(losses.isnan(), bad)
    assert torch.equal(out.float().isfinite().all(1), ~bad)
    assert out[~bad].float().abs().max() == torch.finfo(fp8.E5M2).max


@pytest.mark.gpu
def test_offsets_beyond_31_bits(hopper):
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of GPU memory")
    T, V = 49_152, 50_304
    logits = torch.randn(T, V, device="cuda", dtype=torch.bfloat16)
    labels = Labels(torch.randint(V, (T, 1), device="cuda"), *(torch.ones(n, device="cuda") for n in (1, T)))
    last = Labels(labels.ids[-16:], labels.weights, labels.totals[-16:])
    for dtype in (torch.bfloat16, fp8.E5M2):
        grad, part = torch.empty_like(logits, dtype=dtype), torch.empty_like(logits[-16:], dtype=dtype)
        losses = loss_and_grad(logits, labels, curve_of(CAPS[1]), grad, inverse=600.0)
        assert torch.equal(losses[-16:], loss_and_grad(logits[-16:], last, curve_of(CAPS[1]), part, inverse=600.0))
        assert torch.equal(grad[-16:].view(torch.uint8), part.view(torch.uint8))
