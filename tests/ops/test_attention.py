"""Every attention backend against a float64 form that loops over queries, forward and backward."""

import math

import pytest
import torch

from nanosprint.ops.attention import BACKENDS, backend, reference, sdpa

CPU_BACKENDS = ["sdpa", "reference"]


def by_loops(q, k, v, scale, window):
    """softmax(scale q k) v, one query at a time, in float64 and plain indexing."""
    B, S, H, _ = q.shape
    out = torch.empty_like(v)
    for b in range(B):
        for h in range(H):
            for t in range(S):
                first = 0 if window is None else max(0, t - window)
                scores = [scale * float(q[b, t, h] @ k[b, j, h]) for j in range(first, t + 1)]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                mix = sum(w * v[b, j, h] for w, j in zip(weights, range(first, t + 1), strict=True))
                out[b, t, h] = mix / sum(weights)
    return out


def inputs(B, S, H, K, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, S, H, K, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("name", CPU_BACKENDS)
@pytest.mark.parametrize("window", [None, 0, 1, 4, 6, 100])
@pytest.mark.parametrize("shape", [(2, 7, 3, 8), (1, 1, 1, 4), (1, 13, 2, 16)])
def test_forward(name, window, shape):
    q, k, v = inputs(*shape)
    torch.testing.assert_close(backend(name)(q, k, v, 0.3, window), by_loops(q, k, v, 0.3, window))


@pytest.mark.parametrize("window", [None, 3])
def test_backward_by_finite_differences(window):
    q, k, v = (t.requires_grad_() for t in inputs(1, 5, 2, 4))
    for attend in (sdpa, reference):
        assert torch.autograd.gradcheck(lambda *a, f=attend: f(*a, 0.5, window), (q, k, v))


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_bf16_stays_near_the_truth(name):
    q, k, v = inputs(2, 33, 2, 16)
    out = backend(name)(*(t.bfloat16() for t in (q, k, v)), 0.25, None)
    truth = by_loops(q, k, v, 0.25, None)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - truth).norm() / truth.norm()) < 1e-2


def test_fewer_queries_than_keys_stand_at_the_end():
    q, k, v = inputs(1, 9, 2, 8)
    whole = by_loops(q, k, v, 0.3, 4)
    for attend in (sdpa, reference):
        torch.testing.assert_close(attend(q[:, -2:], k, v, 0.3, 4), whole[:, -2:])


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"exec.attention='fa9': known backends are sdpa"):
        backend("fa9")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "reference"])
def test_gpu_backends(name):
    q, k, v = (t.cuda().bfloat16().requires_grad_() for t in inputs(2, 128, 4, 64))
    truth = reference(*(t.double() for t in (q, k, v)), 0.125, None)
    out = backend(name)(q, k, v, 0.125, None)
    assert float((out.double() - truth).norm() / truth.norm()) < 1e-2
    weight = torch.randn_like(truth)
    expected = torch.autograd.grad(truth, (q, k, v), weight, retain_graph=True)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), weight.bfloat16()), expected, strict=True):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 2e-2
