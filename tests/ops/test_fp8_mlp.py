"""The FP8 MLP against an emulation of its roundings and against exact products, both in float64."""

import pytest
import torch

from nanosprint.kernels import tuning
from nanosprint.ops import fp8
from nanosprint.ops import fp8_mlp as module
from nanosprint.ops.fp8 import E4M3, quantize, scale_from, scale_of
from nanosprint.ops.fp8_mlp import Fp8Weights, fp8_mlp
from tests.ops.test_fp8 import relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = [False, True]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def case(T, D, F, in_out, device="cpu", dtype=torch.bfloat16):
    x = torch.randn(T, D).to(device, dtype).requires_grad_()
    up = (0.1 * torch.randn(F, D)).to(device).requires_grad_()
    down = (0.1 * torch.randn((F, D) if in_out else (D, F))).to(device).requires_grad_()
    g = torch.randn(T, D).to(device, dtype)
    return x, up, down, g


@pytest.fixture(params=["pass", pytest.param("fused", marks=pytest.mark.gpu)])
def route(request, monkeypatch):
    """All that can be fused is, or nothing. On a CPU both are the formula."""
    if request.param == "fused":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        monkeypatch.setattr(tuning, "FUSED_RELU2", frozenset(tuning.RELU2_TILES))
        monkeypatch.setattr(tuning, "MEASURED", (torch.cuda.get_device_capability(),))


def copies_of(x, up, down, in_out, with_down=True, backward=False):
    """Copies as training makes them; the scale of post from exact activations, with headroom."""
    down_DF = down.detach().mT if in_out else down.detach()
    post = (x.detach().double() @ up.detach().double().mT).relu() ** 2
    up_s, down_s, post_s = scale_of(up), scale_of(down_DF), scale_from(post.max(), 1.8)
    codes = [quantize(w.detach(), s, E4M3).view(torch.uint8).contiguous() for w, s in ((up, up_s), (down_DF, down_s))]
    turned = [c.mT.contiguous() if backward else None for c in codes]
    return Fp8Weights(codes[0], up_s, codes[1] if with_down else None, down_s, post_s, None, *turned)


def e4m3(t, scale):
    q = (t.detach().float() / scale).clamp(-448, 448)
    return q.to(torch.float8_e4m3fn).double()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 32, 96), (33, 16, 48), (1, 16, 16)])
def test_rounds_where_it_says(route, device, in_out, shape):
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
def test_error_against_exact_products(route, device, with_down, tolerance):
    x, up, down, g = case(256, 64, 256, True, device)
    y, _ = fp8_mlp(x, up, down, copies_of(x, up, down, True, with_down), in_out=True)
    dx, d_up, d_down = torch.autograd.grad(y, (x, up, down), g)
    X, U, W = (t.detach().double().requires_grad_() for t in (x, up, down))
    truth = (X @ U.mT).relu() ** 2 @ W
    assert relative(y, truth) < tolerance
    for got, expected in zip((dx, d_up, d_down), torch.autograd.grad(truth, (X, U, W), g.double()), strict=True):
        assert relative(got, expected) < 6e-2


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("with_down", [True, False])
@pytest.mark.parametrize("in_out", LAYOUTS)
def test_backward_pass_in_fp8(route, device, in_out, with_down):
    """Tokens whose gradients differ by many octaves, all of them small: each keeps its two bits of fraction."""
    x, up, down, g = case(256, 64, 256, in_out, device)
    g = (g.float() * 1e-7 * torch.randn(256, 1, device=device).mul(3).exp()).bfloat16()
    grads = []
    for backward in (False, True):
        y, _ = fp8_mlp(x, up, down, copies_of(x, up, down, in_out, with_down, backward), in_out=in_out)
        grads.append(torch.autograd.grad(y, (x, up, down), g))
    X, U, W = (t.detach().double().requires_grad_() for t in (x, up, down))
    truth = (X @ U.mT).relu() ** 2 @ (W if in_out else W.mT)
    exact = torch.autograd.grad(truth, (X, U, W), g.double())
    for got, expected, tolerance in zip(grads[1], exact, (0.13, 0.11, 0.06), strict=True):
        assert relative(got, expected) < tolerance
    assert relative(grads[0][0], exact[0]) < 6e-2 < relative(grads[1][0], exact[0])
    assert torch.equal(grads[0][2], grads[1][2])  # what leads to the weights is not quantised again
    errors = (grads[1][0].double() - exact[0]).norm(dim=1) / exact[0].norm(dim=1)
    assert errors.median() < 0.13
    assert all(got.dtype == t.dtype for got, t in zip(grads[1], (x, up, down), strict=True))


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 32, 96), (33, 16, 48), (1, 16, 16), (200, 256, 256)])
def test_gradients_of_weights_in_fp8_round_where_it_says(route, device, in_out, shape):
    """Tokens no multiple of 16, too."""
    tolerance = 8e-3 if device == "cpu" else 3e-2  # sums in reduced precision: some codes fall on the other side
    x, up, down, g = case(*shape, in_out, device)
    copies = copies_of(x, up, down, in_out, backward=True)
    y, peak = fp8_mlp(x, up, down, copies, in_out=in_out, weights=True)
    post_scale = copies.post_scale.clone()
    copies.post_scale.fill_(float("nan"))  # as a module moves on to the next before the backward pass
    dx, d_up, d_down = torch.autograd.grad(y, (x, up, down), g)
    assert (dx.dtype, d_up.dtype, d_down.dtype) == (torch.bfloat16, torch.float32, torch.float32)

    x_s, g_s = scale_of(x), g.abs().amax().float() / 57_344
    x8, g8 = e4m3(x, x_s), quantize(g, g_s, fp8.E5M2).double()
    up8, down8 = (codes.view(fp8.E4M3).double() for codes in (copies.up, copies.down))
    post = (x8 @ up8.mT * (x_s * copies.up_scale).double()).relu().square()
    assert peak.item() == pytest.approx(post.max().item(), rel=1e-2)
    post8 = e4m3(post, post_scale)
    expected = (post8 @ down8.mT) * (post_scale * copies.down_scale).double()
    assert relative(y, expected) < tolerance
    expected_down = (post8.mT @ g8) * (post_scale * g_s).double()
    assert relative(d_down, expected_down if in_out else expected_down.mT) < tolerance
    d_pre = 2 * (post8 * post_scale.double()).sqrt() * (g8 @ down8) * (g_s * copies.down_scale).double()
    pre_s = 2 * peak.sqrt() * shape[1] * (g_s * 57_344) * (copies.down_scale * 448) / 57_344
    d_pre8 = quantize(d_pre, pre_s, fp8.E5M2).double()
    assert relative(d_up, (d_pre8.mT @ x8) * (pre_s * x_s).double()) < tolerance
    assert relative(dx, (d_pre8 @ up8) * (pre_s * copies.up_scale).double()) < tolerance


def test_sums_over_tokens_are_not_fast_ones(monkeypatch):
    """They are too long for the tensor cores' reduced precision."""
    seen = []

    def product(A, B, *scales, fast=False):
        seen.append((A.shape[1], fast))
        return fp8.scaled_product(A, B, *scales, fast=fast)

    monkeypatch.setattr(module, "scaled_product", product)
    x, up, down, g = case(64, 32, 96, True)
    y, _ = fp8_mlp(x, up, down, copies_of(x, up, down, True, backward=True), in_out=True, weights=True)
    y.backward(g)
    assert sorted(seen) == [(64, False), (64, False), (96, False), (96, True)]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
def test_error_of_weights_gradients_in_fp8(route, device, in_out):
    """Against exact products; gradients of a token may be small."""
    x, up, down, g = case(250, 64, 256, in_out, device)
    g = (g.float() * 1e-7 * torch.randn(250, 1, device=device).mul(2).exp()).bfloat16()
    copies = copies_of(x, up, down, in_out, backward=True)
    y, _ = fp8_mlp(x, up, down, copies, in_out=in_out, weights=True)
    X, U, W = (t.detach().double().requires_grad_() for t in (x, up, down))
    truth = (X @ U.mT).relu() ** 2 @ (W if in_out else W.mT)
    exact = torch.autograd.grad(truth, (X, U, W), g.double())
    for got, expected in zip(torch.autograd.grad(y, (x, up, down), g), exact, strict=True):
        assert relative(got, expected) < 0.13


def test_nothing_of_the_hidden_units_is_kept_but_codes():
    x, up, down, _ = case(40, 16, 32, True)
    copies, kept = copies_of(x, up, down, True, backward=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fp8_mlp(x, up, down, copies, in_out=True, weights=True)
    wide = [t for t in kept if t.numel() >= 40 * 32]
    assert [(t.dtype, tuple(t.shape)) for t in wide] == [(E4M3, (40, 32)), (E4M3, (32, 48))]
    assert torch.equal(wide[1].float(), torch.nn.functional.pad(wide[0].float().mT, (0, 8)))


@pytest.mark.parametrize("weights", [False, True])
def test_gradients_of_zero_and_of_nan_in_fp8(weights):
    x, up, down, g = case(32, 16, 32, True)
    copies = copies_of(x, up, down, True, backward=True)
    for factor in (0.0, float("nan")):
        y, _ = fp8_mlp(x, up, down, copies, in_out=True, weights=weights)
        grads = torch.autograd.grad(y, (x, up, down), g * factor)
        assert all(t.isnan().any() if factor else not t.any() for t in grads)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_scale_of_the_input_given(route, device):
    x, up, down, _ = case(256, 64, 256, True, device)
    x = fp8.quantize(
        torch.nn.functional.rms_norm(x.detach(), (64,)), torch.ones((), device=device), fp8.E4M3
    ).bfloat16()
    copies = copies_of(x, up, down, True)
    given = copies._replace(x_scale=torch.full((), 2.0**-6, device=device))
    y, peak = fp8_mlp(x, up, down, given, in_out=True)
    measured, _ = fp8_mlp(x, up, down, copies, in_out=True)
    X8 = x.double() @ (copies.up.view(fp8.E4M3).double() * copies.up_scale.double()).mT
    assert peak.item() == pytest.approx(X8.relu().square().max().item(), rel=1e-2)  # by that scale x is exact
    assert not torch.equal(y, measured)
    assert relative(y, measured.double()) < 8e-2


def test_fp32_activations_differ_by_their_rounding_only():
    """In fp32, the gradients follow from the quantised post alone: exact but for fp32."""
    x, up, down, g = case(40, 16, 32, True, dtype=torch.float32)
    copies = copies_of(x, up, down, True)
    y, _ = fp8_mlp(x, up, down, copies, in_out=True)
    (d_down,) = torch.autograd.grad(y, down, g)
    x8 = quantize(x.detach(), scale_of(x), E4M3).double() * scale_of(x).double()
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
@pytest.mark.parametrize(
    ("with_down", "backward", "weights"),
    [(True, True, True), (True, True, False), (True, False, False), (False, True, False), (False, False, False)],
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_equals_eager(device, with_down, backward, weights, backend):
    if backend == "inductor" and device == "cpu":
        pytest.skip("slow to build on a CPU")
    x, up, down, g = case(64, 32, 48, True, device)
    copies = copies_of(x, up, down, True, with_down, backward)
    torch._dynamo.reset()  # it gives up after eight kinds of one function
    compiled = torch.compile(fp8_mlp, backend=backend, fullgraph=True)
    results = []
    for function in (fp8_mlp, compiled):
        y, peak = function(x, up, down, copies, in_out=True, weights=weights)
        results.append((y.detach(), peak.detach(), *torch.autograd.grad(y, (x, up, down), g)))
    for a, b in zip(*results, strict=True):
        assert relative(a, b.double()) < (1e-6 if backend == "aot_eager" else 3e-2)


def test_opcheck():
    x, up, down, _ = case(32, 16, 48, True)
    copies = copies_of(x, up, down, True, backward=True)
    x_scale = scale_of(x)
    inputs = (x, up, down, quantize(x.detach(), x_scale, E4M3), x_scale, *copies[:5], *copies[6:], True)
    checks = ("test_autograd_registration", "test_faketensor")  # that of the schema multiplies FP8
    for operator in (torch.ops.nanosprint.fp8_mlp, torch.ops.nanosprint.fp8_mlp_in_codes):
        torch.library.opcheck(operator.default, inputs, test_utils=checks)


def test_user_mistakes():
    x, up, down, _ = case(4, 16, 32, True)
    with pytest.raises(ValueError, match=r"expected \(\.\.\., D\), \(F, D\) and \(D, F\)"):
        fp8_mlp(x, up, down, copies_of(x, up, down, True))
    for options in ({"backward": False}, {"with_down": False, "backward": True}):
        with pytest.raises(ValueError, match="need the codes of both weights, turned ones, too"):
            fp8_mlp(x, up, down, copies_of(x, up, down, True, **options), in_out=True, weights=True)
