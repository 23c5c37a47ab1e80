"""Attention as batched products against loops in float64, forward and backward."""

import pytest
import torch

from nanosprint.ops.attention_backends.batched import batched


def by_loops(q, k, v, scale, window):
    rows = []
    ahead = k.size(1) - q.size(1)
    for t in range(q.size(1)):
        stop = ahead + t + 1
        start = 0 if window is None else max(0, stop - 1 - window)
        weights = (torch.einsum("bhk,bshk->bhs", q[:, t], k[:, start:stop]) * scale).softmax(-1)
        rows.append(torch.einsum("bhs,bshk->bhk", weights, v[:, start:stop]))
    return torch.stack(rows, dim=1)


def inputs(B=2, queries=7, keys=7, H=3, K=5, dtype=torch.float64):
    sizes = (queries, keys, keys)
    return [torch.randn(B, S, H, K, dtype=torch.float64).to(dtype).requires_grad_() for S in sizes]


@pytest.mark.parametrize("window", [None, 0, 2, 50])
@pytest.mark.parametrize("queries", [1, 4, 7])
def test_forward_and_gradient_in_float64(window, queries):
    qkv = inputs(queries=queries)
    torch.testing.assert_close(batched(*qkv, 0.3, window), by_loops(*qkv, 0.3, window), rtol=1e-12, atol=1e-12)
    if queries > 1:
        assert torch.autograd.gradcheck(lambda *t: batched(*t, 0.3, window), qkv)


def test_bf16():
    qkv = inputs(queries=33, keys=33, K=16, dtype=torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in qkv]
    out, want = batched(*qkv, 0.25, None), by_loops(*wide, 0.25, None)
    grad = torch.randn_like(out)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)
    for got, target in zip(
        torch.autograd.grad(out, qkv, grad), torch.autograd.grad(want, wide, grad.double()), strict=True
    ):
        torch.testing.assert_close(got.double(), target, rtol=0.05, atol=0.05)


def test_any_strides():
    qkv = [torch.randn(2, 3, 7, 10, dtype=torch.float64).transpose(1, 2)[..., ::2].requires_grad_() for _ in range(3)]
    out, want = batched(*qkv, 0.3, None), by_loops(*qkv, 0.3, None)
    grad = torch.ones((), dtype=torch.float64).expand(out.shape)
    for got, target in zip(torch.autograd.grad(out, qkv, grad), torch.autograd.grad(want, qkv, grad), strict=True):
        torch.testing.assert_close(got, target, rtol=1e-12, atol=1e-12)


def test_rows_do_not_depend_on_the_batch():
    q, k, v = (t.detach() for t in inputs(B=6, queries=33, keys=33, K=16, dtype=torch.float32))
    assert torch.equal(batched(q, k, v, 0.25, None)[2:4], batched(q[2:4], k[2:4], v[2:4], 0.25, None))


def test_a_mask_first_made_in_inference_mode_serves_training():
    q, k, v = inputs(queries=11, keys=11)
    with torch.inference_mode():
        batched(q, k, v, 0.5, 9)
    batched(q, k, v, 0.5, 9).sum().backward()
    assert q.grad is not None


def test_compiles_as_one_graph():
    qkv = inputs(dtype=torch.float32)
    compiled = torch.compile(batched, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        *(torch.autograd.grad(f(*qkv, 0.3, 2).square().sum(), qkv) for f in (compiled, batched)), strict=True
    ):
        torch.testing.assert_close(got, want)
