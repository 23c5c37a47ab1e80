"""Composed attention against a dense softmax over all pairs of tokens, one row and head at a time, in float64."""

import pytest
import torch

from nanosprint.model.techniques.compose import compose_attention
from nanosprint.ops.attention import pack_documents


def inputs(B, S, H, K, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y, q, k, v = (torch.randn(B, S, H, K, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))
    w1, w2 = (torch.randn(B, S, H, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return y, q, k, v, w1, w2


def dense(y, q, k, v, w1, w2, scale, window, lengths=None):
    """From the formula; `lengths` are those of documents laid end to end over all rows."""
    B, S, H, _ = q.shape
    lengths = [S] * B if lengths is None else lengths
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(B, S)
    t, j = torch.arange(S)[:, None], torch.arange(S)[None]
    out = []
    for b in range(B):
        hidden = (j > t) | (t - j >= window) | (document[b][:, None] != document[b][None])
        maps = []
        for h in range(H):
            e = torch.exp(scale * q[b, :, h] @ k[b, :, h].T) * ~hidden
            maps.append(e / e.sum(1, keepdim=True))
        size = ((w1[b] ** 2).mean(1) + 1e-6).sqrt()
        mixed = sum((w1[b, :, h] / size)[:, None] * maps[h] for h in range(H))
        out.append(torch.stack([y[b, :, h] + w2[b, :, h, None] * (mixed @ v[b, :, h]) for h in range(H)], 1))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("B", "S", "window", "lengths"),
    [
        (1, 13, 5, None),
        (2, 37, 16, None),  # two chunks and a part of a third
        (1, 32, 17, None),
        (1, 9, 1, None),
        (2, 7, 100, None),
        (1, 1, 4, None),
        (1, 53, 20, [17, 0, 1, 30, 5]),
        (3, 19, 6, [19, 4, 15, 1, 1, 17]),
    ],
)
def test_forward_and_backward(B, S, window, lengths):
    tensors = [t.requires_grad_() for t in inputs(B, S, 3, 4)]
    documents = None if lengths is None else pack_documents(lengths, slots=len(lengths) + 3)
    got = compose_attention(*tensors, 0.7, window, documents)
    want = dense(*tensors, 0.7, window, lengths)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((t * weight).sum(), tensors) for t in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_nothing_changes_at_zero_and_w1_has_no_size():
    y, q, k, v, w1, w2 = inputs(2, 21, 2, 4)
    assert torch.equal(compose_attention(y, q, k, v, w1, torch.zeros_like(w2), 0.5, 6), y)
    a, b = (compose_attention(y, q, k, v, f * w1, w2, 0.5, 6) for f in (1e3, 2e3))
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_queries_at_the_end_of_the_keys():
    y, q, k, v, w1, w2 = inputs(2, 23, 2, 4)
    whole = compose_attention(y, q, k, v, w1, w2, 0.5, 6)
    for count in (1, 4, 22):
        last = (t[:, -count:] for t in (w1, w2))
        got = compose_attention(y[:, -count:], q[:, -count:], k, v, *last, 0.5, 6)
        torch.testing.assert_close(got, whole[:, -count:])


def test_bf16_is_near_and_stays_bf16():
    narrow = inputs(1, 70, 6, 16, torch.bfloat16)
    got = compose_attention(*narrow, 0.1, 24)
    want = dense(*(t.double() for t in narrow), 0.1, 24)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 5e-3


def test_compiles_as_one_graph():
    tensors = [t.requires_grad_() for t in inputs(1, 40, 2, 4)]
    documents = pack_documents([11, 29], slots=6)

    def loss(*tensors):
        return compose_attention(*tensors, 0.5, 9, documents).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*tensors), tensors) for f in (compiled, loss)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window=0: it counts the token itself"):
        compose_attention(*inputs(1, 3, 1, 4), 1.0, 0)
