"""The oracle is an emulation with the same rounding points, written out below in float64."""

import logging

import pytest
import torch

from nanosprint.ops import fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(256, 64, 96), (1, 16, 16), (100, 32, 48), (33, 48, 16)]
X_S, W_S, G_S = 8 / 448, 0.25 / 448, 2**-16


@pytest.fixture
def device(request):
    if request.param == "cuda" and not (torch.cuda.is_available() and fp8.supports_fp8("cuda")):
        pytest.skip("needs a GPU with FP8")
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def case(T, D, V, device="cpu", dtype=torch.bfloat16):
    x = torch.randn(T, D, device=device).to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(V, D, device=device)).requires_grad_()
    g = (1e-3 * torch.randn(T, V, device=device)).bfloat16()
    return x, weight, g


def rounded(t, scale, dtype):
    """float64 of what FP8 keeps of t, in units of the scale."""
    limit = 448.0 if dtype == E4M3 else 57344.0
    q = t.detach().float() * torch.tensor(1 / scale, dtype=torch.float32)
    return torch.where(q.abs() > limit, q.sign() * limit, q).to(dtype).double()


def emulate(x, weight, g):
    qx, qw, qg = rounded(x, X_S, E4M3), rounded(weight, W_S, E4M3), rounded(g, G_S, E5M2)
    return qx @ qw.T * (X_S * W_S), qg @ qw * (G_S * W_S), qg.T @ qx * (G_S * X_S)


def relative(out, truth):
    return ((out.double() - truth).norm() / truth.norm()).item()


def run(x, weight, g, function=fp8.fp8_linear, **options):
    y = function(x, weight, X_S, W_S, G_S, **options)
    dx, dw = torch.autograd.grad(y, (x, weight), g.to(y.dtype))
    return y.detach(), dx, dw


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_emulation(device, shape, dtype):
    x, weight, g = case(*shape, device=device, dtype=dtype)
    y, dx, dw = run(x, weight, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, dtype, torch.float32)
    assert y.shape == g.shape
    truth = emulate(x, weight, g)
    for out, expected, tolerance in zip((y, dx, dw), truth, (2.5e-3, 2.5e-3, 1e-3), strict=True):
        assert relative(out, expected) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, "ready"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_copies_on_a_gpu_are_those_of_the_formula(source, dtype):
    """Byte for byte, both layouts: a permuted copy can still give plausible products."""
    if not (torch.cuda.is_available() and fp8.supports_fp8("cuda")):
        pytest.skip("needs a GPU with FP8")
    for rows, cols in [(16, 16), (1, 16), (40, 48), (130, 272), (512, 768), (1000, 1264)]:
        x = torch.randn(rows, cols, device="cuda") * 20
        x = fp8.quantize(x, 0.1, dtype) if source == "ready" else x.to(source)
        expected = x if source == "ready" else fp8.quantize(x, 0.1, dtype)
        plain, turned = fp8.quantize_pair(x, 0.1, dtype)
        assert torch.equal(plain.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(turned.view(torch.uint8), fp8._turned(expected).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_error_against_exact_products(device):
    x, weight, g = case(256, 64, 96, device=device)
    y, dx, dw = run(x, weight, g)
    X, W, G = x.detach().double(), weight.detach().double(), g.double()
    assert relative(y, X @ W.T) < 5e-2
    assert relative(dx, G @ W) < 7e-2
    assert relative(dw, G.T @ X) < 7e-2


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_fp32_output_is_not_rounded_to_bf16(device):
    x, weight, g = case(64, 32, 48, device=device)
    y, _, _ = run(x, weight, g, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert relative(y, emulate(x, weight, g)[0]) < 5e-4


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_values_beyond_the_scale_saturate(device):
    """torch's own cast would make them NaN (e4m3) or infinite (e5m2)."""
    x, weight, g = case(32, 16, 16, device=device)
    with torch.no_grad():
        x[3] *= 1e4
        weight[5] *= 1e6
        g[7] *= 1e30
    results = run(x, weight, g)
    for out, expected in zip(results, emulate(x, weight, g), strict=True):
        assert out.isfinite().all()
        assert relative(out, expected) < 2.5e-3
    assert x.detach().abs().max() > 448 * X_S


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_nan_is_not_hidden_and_zero_stays_zero(device):
    x, weight, g = case(32, 16, 16, device=device)
    with torch.no_grad():
        x[3, 4] = float("nan")
        weight.zero_()
    y, dx, _ = run(x, weight, g)
    assert y[3].isnan().all()
    assert not y[4].any()
    assert not dx.any(), dx


def test_leading_axes_and_strides():
    x, weight, _ = case(24, 16, 32)
    y = fp8.fp8_linear(x.view(2, 3, 4, 16), weight, X_S, W_S, G_S)
    assert y.shape == (2, 3, 4, 32)
    assert torch.equal(y.view(24, 32), fp8.fp8_linear(x, weight, X_S, W_S, G_S))
    turned = x.detach().T.contiguous().T
    assert torch.equal(fp8.fp8_linear(turned, weight.T.contiguous().T, X_S, W_S, G_S), y.view(24, 32))
    y.sum().backward()  # the gradient is an expanded scalar, contiguous in no axis
    assert x.grad.shape == x.shape


def test_gradient_that_is_fp8_already():
    x, weight, g = case(40, 16, 32)
    _, x8_t, w8_t = torch.ops.nanosprint.fp8_linear(x.detach(), weight.detach(), X_S, W_S, G_S, torch.bfloat16, False)
    plain = fp8.fp8_linear_grads(g, x8_t, w8_t, X_S, W_S, G_S)
    ready = fp8.fp8_linear_grads(fp8.quantize(g, G_S, E5M2), x8_t, w8_t, X_S, W_S, G_S)
    for a, b in zip(plain, ready, strict=True):
        assert torch.equal(a, b)


def test_directional_derivative():
    """The forward pass is a staircase, so its slope is taken over steps that span many of its stairs."""
    x, weight, g = case(128, 64, 96, dtype=torch.float32)
    _, dx, dw = run(x, weight, g)
    x, weight = x.detach(), weight.detach()

    def objective(x, weight):
        return (fp8.fp8_linear(x, weight, X_S, W_S, G_S, torch.float32) * g).double().sum()

    step = 0.5 * torch.randn_like(x)
    measured, slope = objective(x + step, weight) - objective(x - step, weight), dx.double()
    assert abs(measured - 2 * (step * slope).sum()) < 0.1 * step.norm() * slope.norm()
    step = 0.02 * torch.randn_like(weight)
    measured, slope = objective(x, weight + step) - objective(x, weight - step), dw.double()
    assert abs(measured - 2 * (step * slope).sum()) < 0.1 * step.norm() * slope.norm()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_opcheck(device):
    x, weight, g = case(20, 16, 32, device=device)
    op = torch.ops.nanosprint.fp8_linear.default
    torch.library.opcheck(op, (x, weight, X_S, W_S, G_S, torch.bfloat16, False))
    _, x8_t, w8_t = op(x.detach(), weight.detach(), X_S, W_S, G_S, torch.bfloat16, False)
    backward = torch.ops.nanosprint.fp8_linear_backward.default
    torch.library.opcheck(backward, (g, x8_t, w8_t, X_S, W_S, G_S))


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_equals_eager(device, backend):
    if backend == "inductor" and device == "cpu":
        pytest.skip("slow to build on a CPU")
    x, weight, g = case(40, 32, 48, device=device)
    compiled = torch.compile(fp8.fp8_linear, backend=backend, fullgraph=True)
    for out, expected in zip(run(x, weight, g, compiled), run(x, weight, g), strict=True):
        torch.testing.assert_close(out, expected)


def test_only_one_gradient_wanted():
    x, weight, g = case(16, 16, 16)
    y = fp8.fp8_linear(x.detach(), weight, X_S, W_S, G_S)
    y.backward(g)
    assert weight.grad.dtype == torch.float32
    assert x.grad is None


def test_device_choice(caplog):
    assert fp8.has_fp8("cpu")
    fp8._warn_without_fp8.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not fp8.has_fp8("meta")
        assert not fp8.has_fp8("meta")
    assert caplog.text.count("no FP8") == 1


def test_user_mistakes():
    x, weight, _ = case(8, 16, 32)
    with pytest.raises(ValueError, match=r"multiples of 16.*pad"):
        fp8.fp8_linear(x, torch.zeros(30, 16), X_S, W_S, G_S)
    with pytest.raises(ValueError, match=r"\(8, 16\).*\(32, 48\)"):
        fp8.fp8_linear(x, torch.zeros(32, 48), X_S, W_S, G_S)
    with pytest.raises(ValueError, match="must be positive"):
        fp8.fp8_linear(x, weight, 0.0, W_S, G_S)
    with pytest.raises(ValueError, match="int64"):
        fp8.fp8_linear(torch.ones(8, 16, dtype=torch.int64), weight, X_S, W_S, G_S)
    with pytest.raises(ValueError, match="float16"):
        fp8.fp8_linear(x, weight, X_S, W_S, G_S, out_dtype=torch.float16)
