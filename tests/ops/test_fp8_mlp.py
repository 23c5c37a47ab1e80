"""The FP8 MLP against an emulation of its roundings and against exact products, both in float64."""

import pytest
import torch

from nanosprint.ops import fp8
from nanosprint.ops.fp8_mlp import Fp8Weights, fp8_mlp, scale_from, scale_of, to_e4m3
from tests.ops.test_fp8 import relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = [False, True]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def device(request):
    if request.param == "cuda" and not (torch.cuda.is_available() and fp8.supports_fp8("cuda")):
        pytest.skip("needs a GPU with FP8")
    return request.param


def case(T, D, F, in_out, device="cpu", dtype=torch.bfloat16):
    x = torch.randn(T, D).to(device, dtype).requires_grad_()
    up = (0.1 * torch.randn(F, D)).to(device).requires_grad_()
    down = (0.1 * torch.randn((F, D) if in_out else (D, F))).to(device).requires_grad_()
    g = torch.randn(T, D).to(device, dtype)
    return x, up, down, g


def copies_of(x, up, down, in_out, with_down=True):
    """Copies as training makes them; the scale of post from exact activations, with headroom."""
    down_DF = down.detach().mT if in_out else down.detach()
    post = (x.detach().double() @ up.detach().double().mT).relu() ** 2
    up_s, down_s, post_s = scale_of(up), scale_of(down_DF), scale_from(post.max(), 1.8)
    codes = [to_e4m3(w.detach(), s).view(torch.uint8).contiguous() for w, s in ((up, up_s), (down_DF, down_s))]
    return Fp8Weights(codes[0], up_s, codes[1] if with_down else None, down_s, post_s)


def e4m3(t, scale):
    q = (t.detach().float() / scale).clamp(-448, 448)
    return q.to(torch.float8_e4m3fn).double()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 32, 96), (33, 16, 48), (1, 16, 16)])
def test_rounds_where_it_says(device, in_out, shape):
    x, up, down, g = case(*shape, in_out, device)
    copies = copies_of(x, up, down, in_out)
    y, peak = fp8_mlp(x, up, down, copies, in_out=in_out)
    dx, d_up, d_down = torch.autograd.grad(y, (x, up, down), g)
    x_s = x.detach().abs().max().double() / 448
    product = e4m3(x, x_s.float()) @ copies.up.view(fp8.E4M3).double().mT
    pre = (product * x_s * copies.up_scale.double()).bfloat16()
    post = pre.relu().square()
    assert peak.item() == pytest.approx(post.max().item(), rel=1e-2)
    assert peak.dtype == torch.float32
    out = e4m3(post, copies.post_scale) @ copies.down.view(fp8.E4M3).double().mT
    assert relative(y, out * (copies.post_scale * copies.down_scale).double()) < 6e-3
    post, G, X, U = post.double(), g.double(), x.detach().double(), up.detach().double()
    down_FD = (down if in_out else down.mT).detach().double()
    d_pre = 2 * post.sqrt() * (G @ down_FD.mT)
    expected_down = post.mT @ G if in_out else G.mT @ post
    for got, expected in ((dx, d_pre @ U), (d_up, d_pre.mT @ X), (d_down, expected_down)):
        assert relative(got, expected) < 1e-2
    assert (dx.dtype, d_up.dtype, d_down.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(("with_down", "tolerance"), [(True, 8e-2), (False, 6e-2)])
def test_error_against_exact_products(device, with_down, tolerance):
    x, up, down, g = case(256, 64, 256, True, device)
    y, _ = fp8_mlp(x, up, down, copies_of(x, up, down, True, with_down), in_out=True)
    dx, d_up, d_down = torch.autograd.grad(y, (x, up, down), g)
    X, U, W = (t.detach().double().requires_grad_() for t in (x, up, down))
    truth = (X @ U.mT).relu() ** 2 @ W
    assert relative(y, truth) < tolerance
    for got, expected in zip((dx, d_up, d_down), torch.autograd.grad(truth, (X, U, W), g.double()), strict=True):
        assert relative(got, expected) < 6e-2


def test_fp32_activations_differ_by_their_rounding_only():
    """In fp32, the gradients follow from the quantised post alone: exact but for fp32."""
    x, up, down, g = case(40, 16, 32, True, dtype=torch.float32)
    copies = copies_of(x, up, down, True)
    y, _ = fp8_mlp(x, up, down, copies, in_out=True)
    (d_down,) = torch.autograd.grad(y, down, g)
    x8 = to_e4m3(x.detach(), scale_of(x)).double() * scale_of(x).double()
    post = (x8 @ (copies.up.view(fp8.E4M3).double() * copies.up_scale.double()).mT).relu() ** 2
    assert relative(d_down, post.mT @ g.double()) < 1e-5


def test_leading_axes_and_only_one_gradient_wanted():
    x, up, down, _ = case(24, 16, 32, False)
    copies = copies_of(x, up, down, False)
    y, _ = fp8_mlp(x.view(2, 12, 16), up, down.detach(), copies)
    assert torch.equal(y.view(24, 16), fp8_mlp(x, up, down, copies)[0])
    y.sum().backward()  # an expanded gradient
    assert down.grad is None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("large", [0.0, 1e30])
def test_zeros_and_values_beyond_the_scale(large):
    x, up, down, g = case(16, 16, 16, True)
    copies = copies_of(x, up, down, True)
    if large:
        copies = copies._replace(post_scale=copies.post_scale * 1e-6)  # everything is beyond it
    else:
        x = torch.zeros_like(x).requires_grad_()
    y, peak = fp8_mlp(x, up, down, copies, in_out=True)
    assert y.isfinite().all()
    assert all(t.isfinite().all() for t in torch.autograd.grad(y, (x, up, down), g))
    assert bool(peak) == bool(large)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("with_down", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_equals_eager(device, with_down, backend):
    if backend == "inductor" and device == "cpu":
        pytest.skip("slow to build on a CPU")
    x, up, down, g = case(64, 32, 48, True, device)
    copies = copies_of(x, up, down, True, with_down)
    compiled = torch.compile(fp8_mlp, backend=backend, fullgraph=True)
    results = []
    for function in (fp8_mlp, compiled):
        y, peak = function(x, up, down, copies, in_out=True)
        results.append((y.detach(), peak.detach(), *torch.autograd.grad(y, (x, up, down), g)))
    for a, b in zip(*results, strict=True):
        assert relative(a, b.double()) < (1e-6 if backend == "aot_eager" else 3e-2)
