"""RMS norm against the formula in float64, forward and backward."""

import pytest
import torch

from nanosprint.ops.rms_norm import rms_norm

EPS = 1e-3


def formula(x, eps=EPS):
    return x / (x * x).mean(-1, keepdim=True).add(eps).sqrt()


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 5, 33), (0, 4), (3, 1)])
def test_forward_and_gradient_in_float64(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, EPS), formula(x), rtol=1e-12, atol=1e-12)
    if x.numel():
        assert torch.autograd.gradcheck(lambda t: rms_norm(t, EPS), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16])
def test_narrow_dtypes(dtype, out):
    x = (3 * torch.randn(17, 65)).to(dtype).requires_grad_()
    y = rms_norm(x, EPS, out)
    grad = torch.randn(17, 65).to(y.dtype)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(formula(wide), wide, grad.double())
    (got,) = torch.autograd.grad(y, x, grad)
    assert y.dtype == (out or dtype)
    assert got.dtype == dtype
    close(y, formula(wide))
    close(got, want)


def close(got, want):
    tolerance = 3 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_any_strides_and_gradients_that_are_expanded():
    x = torch.randn(6, 4, 5, dtype=torch.float64).transpose(0, 2)[..., ::2].requires_grad_()
    grad = torch.ones((), dtype=torch.float64).expand(x.shape)
    (want,) = torch.autograd.grad(formula(x), x, grad)
    (got,) = torch.autograd.grad(rms_norm(x, EPS), x, grad)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_zero_row_stays_zero_and_has_a_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    y = rms_norm(x, EPS)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    torch.testing.assert_close(x.grad, torch.full((2, 4), EPS**-0.5))


def test_rows_do_not_depend_on_the_batch():
    x = torch.randn(37, 64)
    assert torch.equal(rms_norm(x, EPS)[11:13], rms_norm(x[11:13], EPS))


def test_compiles_as_one_graph():
    x = torch.randn(5, 8, requires_grad=True)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, EPS, torch.bfloat16), rms_norm(x, EPS, torch.bfloat16), rtol=8e-3, atol=1e-3)
    (got,) = torch.autograd.grad(compiled(x, EPS).square().sum(), x)
    (want,) = torch.autograd.grad(rms_norm(x, EPS).square().sum(), x)
    torch.testing.assert_close(got, want)
