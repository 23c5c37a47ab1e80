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


def test_gradients_where_values_are_next_to_nothing():
    """Below the smallest square the length is a constant."""
    y, v = (torch.randn(1, 2, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    v[0, 0] *= 1e-6
    tensors = [t.requires_grad_() for t in (y, v, torch.full((1, 2, 2), 0.7, dtype=torch.float64))]
    assert torch.autograd.gradcheck(without_own_value, tensors, eps=1e-9, atol=1e-6, rtol=1e-4)


def test_keeps_outputs_and_values_in_their_own_dtype():
    y, v = torch.randn(2, 1, 4, 3, 8).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        without_own_value(y, v, torch.ones(1, 4, 3, requires_grad=True))
    assert [t.dtype for t in kept if t.shape == y.shape] == [torch.bfloat16] * 2
