"""The FP8 projection against an emulation of its roundings and against exact products, both in float64."""

import pytest
import torch

from nanosprint.ops import fp8
from nanosprint.ops.fp8 import scale_of
from nanosprint.ops.fp8_projection import Copies, fp8_projection
from tests.ops.test_fp8 import relative, rounded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(64, 32, 96), (33, 16, 48), (1, 16, 16), (300, 96, 32)]
X_S, G_S = 2.0**-6, 2.0**-20


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def case(T, D, E, device="cpu", dtype=torch.bfloat16):
    x = torch.randn(T, D).to(device, dtype).requires_grad_()
    weight = (0.1 * torch.randn(E, D)).to(device).requires_grad_()
    g = (1e-3 * torch.randn(T, E)).to(device, dtype)
    return x, weight, g


def copies_of(weight, factor=1.0, backward=True):
    scale = scale_of(weight)
    codes = fp8.quantize(weight.detach(), scale, fp8.E4M3).view(torch.uint8)
    return Copies(codes, codes.mT.contiguous() if backward else None, scale * factor)


def scales(device="cpu", x=X_S, g=G_S):
    return torch.tensor(x, device=device), torch.tensor(g, device=device)


def values(copies):
    return copies.codes.view(fp8.E4M3).double() * copies.scale.double()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_where_it_says(device, backward, shape):
    x, weight, g = case(*shape, device)
    copies = copies_of(weight, backward=backward)
    y = fp8_projection(x, weight, copies, *scales(device))
    dx, dw = torch.autograd.grad(y, (x, weight), g)
    assert relative(y, rounded(x, X_S, fp8.E4M3) * X_S @ values(copies).mT) < 4e-3
    expected = rounded(g, G_S, fp8.E5M2) * G_S @ values(copies) if backward else g.double() @ weight.bfloat16().double()
    assert relative(dx, expected) < 4e-3
    assert relative(dw, g.double().mT @ x.detach().double()) < 4e-3
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("backward", [True, False])
def test_error_against_exact_products(device, backward):
    x, weight, g = case(256, 96, 64, device)
    y = fp8_projection(x, weight, copies_of(weight, backward=backward), *scales(device))
    dx, dw = torch.autograd.grad(y, (x, weight), g)
    X, W, G = x.detach().double(), weight.detach().double(), g.double()
    assert relative(y, X @ W.mT) < 5e-2
    assert relative(dx, G @ W) < (7e-2 if backward else 5e-3)  # E5M2 keeps two bits
    assert relative(dw, G.mT @ X) < 4e-3


@pytest.mark.parametrize("factor", [0.5, -3.0])
def test_factors_of_the_weight_have_the_gradients_of_their_product(factor):
    """lambda (A over B): gradients of all three from the exact gradient of the product, as autograd has them."""
    x, weight, g = case(40, 32, 48, dtype=torch.float32)
    top, bottom = (part.detach().clone().requires_grad_() for part in weight.split((32, 16)))
    scale = torch.tensor(factor, requires_grad=True)
    copies = copies_of(weight, factor)
    y = fp8_projection(x, scale * torch.cat((top, bottom)), copies, *scales())
    got = torch.autograd.grad(y, (scale, top, bottom, x), g)
    dW = g.double().mT @ x.detach().double()
    W = weight.detach().double()
    assert got[0].item() == pytest.approx((dW * W).sum().item(), rel=1e-5)
    for out, expected in zip(got[1:3], (factor * dW).split((32, 16)), strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-7)
    assert relative(y, factor * (x.detach().double() @ W.mT)) < 5e-2
    assert relative(got[3], factor * (g.double() @ W)) < 7e-2


def test_values_of_the_weight_are_not_read():
    x, weight, g = case(16, 32, 16)
    copies = copies_of(weight)
    nothing = torch.full_like(weight, torch.nan).requires_grad_()
    for w in (weight, nothing):
        y = fp8_projection(x, w, copies, *scales())
        dx, dw = torch.autograd.grad(y, (x, w), g)
        assert all(t.isfinite().all() for t in (y, dx, dw))


def test_leading_axes_strides_and_only_one_gradient_wanted():
    x, weight, _ = case(24, 16, 32)
    copies = copies_of(weight)
    y = fp8_projection(x.view(2, 3, 4, 16), weight.detach(), copies, *scales())
    assert y.shape == (2, 3, 4, 32)
    assert torch.equal(y.view(24, 32), fp8_projection(x, weight, copies, *scales()))
    y.sum().backward()  # an expanded gradient, contiguous in no axis
    assert weight.grad is None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_values_beyond_the_scales_are_clamped_and_nan_is_not_hidden(device):
    x, weight, g = case(32, 16, 16, device)
    with torch.no_grad():
        x[3] *= 1e4
        g[7] *= 1e30
    copies = copies_of(weight)
    y = fp8_projection(x, weight, copies, *scales(device))
    (dx,) = torch.autograd.grad(y, x, g)
    assert relative(y, rounded(x, X_S, fp8.E4M3) * X_S @ values(copies).mT) < 4e-3
    assert relative(dx, rounded(g, G_S, fp8.E5M2) * G_S @ values(copies)) < 4e-3
    with torch.no_grad():
        x[5, 2] = torch.nan
    y = fp8_projection(x, weight, copies, *scales(device))
    assert y[5].isnan().all()
    assert y[6:].isfinite().all()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("in_fp8", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_equals_eager(device, in_fp8, backend):
    if backend == "inductor" and device == "cpu":
        pytest.skip("slow to build on a CPU")
    x, weight, g = case(64, 32, 48, device)
    copies, factor = copies_of(weight, 0.5, in_fp8), torch.tensor(0.5, device=device, requires_grad=True)

    def function(x, weight, factor):
        return fp8_projection(x, factor * weight, copies, *scales(device))

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = []
    for run in (function, compiled):
        y = run(x, weight, factor)
        results.append((y.detach(), *torch.autograd.grad(y, (x, weight, factor), g)))
    for a, b in zip(*results, strict=True):
        assert relative(a, b.double()) < (1e-6 if backend == "aot_eager" else 2e-2)
