"""Exclusive self-attention by projection matrices."""

import torch

from nanosprint.model.techniques.xsa import without_own_value


def test_projection_matrix():
    generator = torch.Generator().manual_seed(0)
    y, v = (torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    gate = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (y, v, gate)]
    onto = v[..., :, None] * v[..., None, :] / (v * v).sum(-1)[..., None, None]
    share = 1 - 2 / (torch.exp(2 * gate) + 1)  # tanh
    want = y - share[..., None] * (onto @ y[..., None])[..., 0]
    got = without_own_value(*tensors)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(t.pow(3).sum(), tensors) for t in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_ends_of_the_gate():
    y, v = torch.randn(2, 1, 4, 3, 8, dtype=torch.float64)
    assert torch.equal(without_own_value(y, v, torch.zeros(1, 4, 3)), y)
    rest = without_own_value(y, v, torch.full((1, 4, 3), 50.0))
    torch.testing.assert_close((rest * v).sum(-1), torch.zeros(1, 4, 3, dtype=torch.float64))


def test_values_of_zero_and_rounding():
    y = torch.randn(1, 4, 3, 8).bfloat16()
    v = torch.zeros_like(y, requires_grad=True)
    out = without_own_value(y, v, torch.ones(1, 4, 3).bfloat16())
    out.sum().backward()
    assert torch.equal(out, y)
    assert out.dtype == torch.bfloat16
    assert v.grad.isfinite().all()
