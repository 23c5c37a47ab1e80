"""The FP8 projection with norm and rotary positions behind it against an emulation of its roundings in float64.

A CPU has no kernel for the norm, so formulas stand in for it there; `test_rotary.py` tests the kernel itself.
"""

import pytest
import torch

from nanosprint.kernels import has_triton
from nanosprint.ops import fp8, fp8_qkv
from nanosprint.ops.fp8_projection import fp8_projection
from nanosprint.ops.qk_norm_rotary import NormRotary, qk_norm_rotary
from nanosprint.ops.rotary import rotate
from tests.ops.test_fp8 import relative, rounded
from tests.ops.test_fp8_projection import DEVICES, G_S, X_S, copies_of, scales, values
from tests.ops.test_rotary import EPS, angles, textbook

CASES = [(2, 16, 2, 16, 48), (3, 9, 1, 32, 16), (1, 1, 3, 16, 32)]  # rows, tokens, heads, head size, width


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def heads_of(qkv, H):
    q, k, v = qkv.unflatten(-1, (3, H, -1)).unbind(2)
    return q, k, v


def inverse_length(t):
    return torch.rsqrt(t.square().mean(-1, keepdim=True) + EPS)


def forward(qkv, cos, sin, H, turning, eps, neighbours, ranges):
    q, k, v = heads_of(qkv.float(), H)
    q, k = (rotate(t * inverse_length(t), cos, sin) for t in (q, k))
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype, copy=True)


def backward(gq, gk, gv, qkv, cos, sin, code_scale, turning, eps, neighbours, ranges):
    out = []
    for g, t in zip((gq, gk), heads_of(qkv.float(), gq.shape[2])[:2], strict=True):
        g, scale = rotate(g.float(), cos, -sin), inverse_length(t)
        out.append((g - t * scale * (g * t * scale).mean(-1, keepdim=True)) * scale)
    gradient = torch.stack((*out, gv.float()), dim=2).flatten(2).to(qkv.dtype)
    return [gradient, fp8.quantize(gradient, code_scale, fp8.E5M2)]


@pytest.fixture
def kernel(device, monkeypatch):
    """What stands for the kernel: itself on a GPU."""
    if device == "cuda":
        if not has_triton():
            pytest.skip("Triton is not installed")
        return
    monkeypatch.setattr(fp8_qkv, "fused", forward)
    monkeypatch.setattr(fp8_qkv, "fused_backward", backward)
    monkeypatch.setattr(
        fp8_qkv,
        "kernel_arguments",
        lambda shape, dtype, device, how: (how.cos_SP, how.sin_SP, how.num_heads, 0, EPS, False, []),
    )


def case_of(B, S, H, K, D, device, dtype=torch.bfloat16):
    x = torch.randn(B, S, D).to(device, dtype).requires_grad_()
    weight = (0.1 * torch.randn(3 * H * K, D)).to(device).requires_grad_()
    grads = [(1e-3 * torch.randn(B, S, H, K)).to(device, dtype) for _ in range(3)]
    tables = (t.to(device) for t in angles(S, K // 2, torch.float32))
    return x, weight, grads, NormRotary(H, *tables, EPS, torch.float32)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_rounds_where_it_says(device, kernel, case):
    x, weight, grads, how = case_of(*case, device)
    copies = copies_of(weight)
    got = fp8_qkv.fp8_qkv(x, weight, copies, *scales(device), how)
    dx, dw = torch.autograd.grad(got, (x, weight), grads)
    qkv = (rounded(x, X_S, fp8.E4M3) * X_S @ values(copies).mT).bfloat16().double().requires_grad_()
    want = textbook(qkv, how.num_heads, how.cos_SP.double(), how.sin_SP.double(), False, ())
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 4e-3
    (g,) = torch.autograd.grad(want, qkv, [t.double() for t in grads])
    codes = rounded(g.bfloat16(), G_S, fp8.E5M2) * G_S
    assert relative(dx, codes @ values(copies)) < 2e-2  # a code on the border is a quarter off
    assert relative(dx, g @ values(copies)) < 7e-2
    assert relative(dw, g.flatten(0, 1).mT @ x.detach().double().flatten(0, 1)) < 1e-2  # the exact gradient
    assert (got[0].dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert (dx.shape, dw.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_only_some_of_it_is_used_or_wanted(device, kernel):
    x, weight, grads, how = case_of(*CASES[0], device)
    copies = copies_of(weight)
    q, _, v = fp8_qkv.fp8_qkv(x, weight.detach(), copies, *scales(device), how)
    (dx,) = torch.autograd.grad((q, v), x, (grads[0], grads[2]))
    got = fp8_qkv.fp8_qkv(x, weight, copies, *scales(device), how)
    (expected,) = torch.autograd.grad(got, x, (grads[0], torch.zeros_like(grads[1]), grads[2]))
    assert torch.equal(dx, expected)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_equals_eager(device, kernel, backend):
    if backend == "inductor" and device == "cpu":
        pytest.skip("slow to build on a CPU")
    x, weight, grads, how = case_of(2, 16, 2, 16, 48, device)
    factor = torch.tensor(0.5, device=device, requires_grad=True)
    copies = copies_of(weight, 0.5)

    def function(x, weight, factor):
        return fp8_qkv.fp8_qkv(2 * x, factor * weight, copies, *scales(device), how)

    results = []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        out = run(x, weight, factor)
        results.append([t.detach() for t in (*out, *torch.autograd.grad(out, (x, weight, factor), grads))])
    for a, b in zip(*results, strict=True):
        assert b.norm() > 0
        assert relative(a, b.double()) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("sizes", [(2, 512, 6, 128, 768), (1, 77, 12, 64, 96)])
def test_equals_projection_and_norm_one_after_the_other(device, kernel, sizes):
    """Bit for bit: what is fused is where a cast happens."""
    x, weight, grads, how = case_of(*sizes, device)
    copies, results = copies_of(weight), []
    for heads in (
        fp8_qkv.fp8_qkv(x, weight, copies, *scales(device), how),
        qk_norm_rotary(fp8_projection(x, weight, copies, *scales(device)), *how),
    ):
        results.append((*heads, *torch.autograd.grad(heads, (x, weight), grads)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_formulas_where_no_kernel_serves_and_a_backward_pass_in_the_dtype_of_x():
    x, weight, grads, how = case_of(*CASES[0], "cpu", torch.float32)
    for in_fp8 in (True, False):
        copies = copies_of(weight, backward=in_fp8)
        got = fp8_qkv.fp8_qkv(x, weight, copies, *scales(), how._replace(key_offset=((3, 9),)))
        (dx,) = torch.autograd.grad(got, x, grads)
        qkv = (rounded(x, X_S, fp8.E4M3) * X_S @ values(copies).mT).requires_grad_()
        want = textbook(qkv, how.num_heads, how.cos_SP.double(), how.sin_SP.double(), False, ((3, 9),))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        (g,) = torch.autograd.grad(want, qkv, [t.double() for t in grads])
        expected = rounded(g, G_S, fp8.E5M2) * G_S @ values(copies) if in_fp8 else g @ weight.detach().double()
        assert relative(dx, expected) < (2e-2 if in_fp8 else 1e-5)


def test_sizes_that_do_not_fit():
    x, weight, _, how = case_of(*CASES[0], "cpu")
    with pytest.raises(ValueError, match="does not fit cos and sin"):
        fp8_qkv.fp8_qkv(x, weight, copies_of(weight), *scales(), how._replace(num_heads=5))
