"""The head's product and loss in one operator, against float64 autograd and an emulation of its roundings."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nanosprint.config import SoftcapSpec
from nanosprint.ops import fp8
from nanosprint.ops import head_loss as module
from nanosprint.ops.attention import as_data
from nanosprint.ops.head_loss import Fp8Scales, head_loss
from nanosprint.ops.softcap_xent import Labels
from tests.ops.test_fp8 import rounded
from tests.ops.test_softcap_xent import textbook

CAP = SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5)
SCALES = Fp8Scales(8 / 448, 0.25 / 448, 0.75 / 448)
LAYOUTS = [False, True]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def case(T, D, V, in_out, dtype, device="cpu"):
    x = torch.randn(T, D).to(device, dtype).requires_grad_()
    weight = 0.05 * torch.randn((D, V) if in_out else (V, D))
    ids = torch.randint(-1, V, (T, 3))
    weights = torch.tensor([1.0, 0.5, 0.25])
    totals = ((ids >= 0) * weights).sum(-1) + 0.125 * (torch.arange(T) % 2)
    return x, weight.to(device).requires_grad_(), Labels(*(t.to(device) for t in (ids, weights, totals)))


def run(x, weight, labels, upstream=1.0, **options):
    loss = head_loss(x, weight, labels, **options)
    return loss.detach(), *torch.autograd.grad(upstream * loss, (x, weight))


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize("spec", [None, CAP])
def test_plain_products_in_float64(in_out, spec, monkeypatch):
    x, weight, labels = case(53, 24, 83, in_out, torch.float64)
    weight = weight.detach().double().requires_grad_()
    w = weight.detach().mT if in_out else weight.detach()
    losses, g = textbook(x.detach() @ w.mT, labels, spec)
    dw = x.detach().mT @ g if in_out else g.mT @ x.detach()
    for logits_at_once in (2**26, 128 * 20):  # in one part; in several
        monkeypatch.setattr(module, "_CPU_LOGITS", logits_at_once)
        loss, got_dx, got_dw = run(x, weight, labels, 0.3, softcap=spec, in_out=in_out)
        torch.testing.assert_close(loss, losses.sum())
        torch.testing.assert_close(got_dx, 0.3 * (g @ w))
        torch.testing.assert_close(got_dw, 0.3 * dw)
        assert got_dw.is_contiguous()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 32, 128), (53, 32, 83), (1, 16, 50)])
def test_fp8_rounds_where_it_says(device, in_out, shape):
    x, weight, labels = case(*shape, in_out, torch.bfloat16, device)
    loss, dx, dw = run(x, weight, labels, 1 / 1000, softcap=CAP, in_out=in_out, scales=SCALES)
    w = weight.detach().mT if in_out else weight.detach()
    x8, w8 = rounded(x, SCALES.x, fp8.E4M3), rounded(w, SCALES.weight, fp8.E4M3)
    logits = (x8 @ w8.mT * (SCALES.x * SCALES.weight)).bfloat16().double()
    losses, g = textbook(logits, labels, CAP)
    g8 = rounded(g, SCALES.gradient, fp8.E5M2)
    assert loss.item() == pytest.approx(losses.sum().item(), rel=2e-3)
    expected_dw = g8.mT @ x8 * (SCALES.gradient * SCALES.x)
    # A logit on the border between two codes may fall to either side.
    assert relative(dx * 1000, g8 @ w8 * (SCALES.gradient * SCALES.weight)) < 2e-2
    assert relative(dw * 1000, expected_dw.mT if in_out else expected_dw) < 2e-2
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("scales", [None, SCALES])
def test_error_against_exact_products(device, scales):
    x, weight, labels = case(256, 64, 320, False, torch.bfloat16, device)
    loss, dx, dw = run(x, weight, labels, softcap=CAP, scales=scales)
    X, W = x.detach().double(), weight.detach().double()
    losses, g = textbook(X @ W.mT, labels, CAP)
    assert abs(loss.item() - losses.sum().item()) / 256 < 1e-3
    assert relative(dx, g @ W) < (1e-2 if scales is None else 7e-2)
    assert relative(dw, g.mT @ X) < (1e-2 if scales is None else 7e-2)


def test_codes_do_not_depend_on_what_the_loss_is_divided_by():
    """An upstream gradient of 2^-40 would vanish in E5M2 if it were quantised."""
    x, weight, labels = case(32, 16, 64, False, torch.bfloat16)
    _, dx, dw = run(x, weight, labels, scales=SCALES)
    _, small_dx, small_dw = run(x, weight, labels, 2.0**-40, scales=SCALES)
    assert torch.equal(small_dx, dx * 2.0**-40)
    assert torch.equal(small_dw, dw * 2.0**-40)


def test_only_the_sum_over_the_width_is_a_fast_one(monkeypatch):
    """Sums over the vocabulary and over tokens are too long for the tensor cores' reduced precision."""
    seen = {}

    def product(A, B, *scales, fast=False):
        seen[A.shape[1]] = fast
        return fp8.scaled_product(A, B, *scales, fast=fast)

    monkeypatch.setattr(module, "scaled_product", product)
    x, weight, labels = case(64, 32, 128, False, torch.bfloat16)
    run(x, weight, labels, scales=SCALES)
    assert seen == {32: True, 128: False, 64: False}


def test_a_weight_beyond_the_records_scale_is_clamped():
    """1.6 is the largest that its scale holds; in E4M3, what is larger would be NaN."""
    x, weight, labels = case(16, 16, 48, True, torch.bfloat16)
    scales, results = Fp8Scales(100 / 448, 1.6 / 448, 0.75 / 448), []
    for large in (1.6, 3.0, 1e4):
        with torch.no_grad():
            weight[2, 5] = large
        results.append(run(x, weight, labels, softcap=CAP, in_out=True, scales=scales))
    for result in results:
        assert all(t.isfinite().all() for t in result)
        assert all(torch.equal(t, first) for t, first in zip(result, results[0], strict=True))


def test_zero_weight_is_a_uniform_loss():
    x, weight, labels = case(16, 16, 50, False, torch.bfloat16)
    with torch.no_grad():
        weight.zero_()
    loss, dx, dw = run(x, weight, labels, scales=SCALES)
    counted = ((labels.ids >= 0) * labels.weights).sum().item()
    assert loss.item() == pytest.approx(counted * torch.tensor(50.0).log().item(), rel=1e-5)
    assert not dx.any()
    assert dw.isfinite().all()


@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize("scales", [None, SCALES])
def test_opcheck_and_compile(in_out, scales):
    x, weight, labels = case(20, 16, 50, in_out, torch.bfloat16)
    op = torch.ops.nanosprint.head_loss.default
    data = torch.tensor(2, dtype=torch.int32)
    torch.library.opcheck(op, (x, weight, *labels, None, None, in_out, scales and list(scales), 1, data))
    options = {"in_out": in_out, "scales": scales, "softcap": CAP}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(head_loss, labels=labels, **options), backend=counter, fullgraph=True)
    for counts in (0, 2):  # data: one graph serves both
        loss = compiled(x, weight, counts=as_data(counts))
        results = loss.detach(), *torch.autograd.grad(0.1 * loss, (x, weight))
        for a, b in zip(results, run(x, weight, labels, 0.1, counts=counts, **options), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize("scales", [None, SCALES])
@pytest.mark.parametrize("counts", [0, 3])
def test_the_weights_gradient_counts_so_often(device, in_out, scales, counts, monkeypatch):
    """Or not at all; the loss and the gradient of x never see it. In several parts, with a part of the vocabulary."""
    monkeypatch.setattr(module, "_rows_at_once", lambda *_: 16)
    x, weight, labels = case(40, 16, 83, in_out, torch.bfloat16, device)
    columns = torch.arange(0, 83, 2, device=device)
    labels = labels._replace(ids=labels.ids.clamp(max=len(columns) - 1))
    options = {"softcap": CAP, "in_out": in_out, "scales": scales, "columns": columns}
    loss, dx, dw = run(x, weight, labels, 0.1, **options)
    for given in (counts, as_data(counts)):
        got_loss, got_dx, got_dw = run(x, weight, labels, 0.1, counts=given, **options)
        assert torch.equal(got_loss, loss)
        assert torch.equal(got_dx, dx)
        torch.testing.assert_close(got_dw, counts * dw)
        assert (got_dw.dtype, got_dw.is_contiguous()) == (dw.dtype, True)


def test_weight_in_bf16_gets_its_gradient_in_bf16():
    x, weight, labels = case(16, 16, 64, True, torch.bfloat16)
    weight = weight.detach().bfloat16().requires_grad_()
    _, _, dw = run(x, weight, labels, in_out=True, scales=SCALES)
    assert dw.dtype == torch.bfloat16


def test_user_mistakes():
    x, weight, labels = case(8, 16, 64, False, torch.bfloat16)
    with pytest.raises(ValueError, match=r"\(8, 16\), weight \(64, 16\).*\(D, V\)"):
        head_loss(x, weight, labels, in_out=True)
    with pytest.raises(ValueError, match="positive scales"):
        head_loss(x, weight, labels, scales=Fp8Scales(1.0, 0.0, 1.0))
    with pytest.raises(ValueError, match="multiple of 16"):
        head_loss(x[:, :9], weight[:, :9], labels, scales=SCALES)
