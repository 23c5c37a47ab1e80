"""Paired heads against dense attention over a list of (token, head) pairs written out from the table of slots."""

import pytest
import torch

from nanosprint.config.model import RotarySpec
from nanosprint.model.rotary import Rotary
from nanosprint.model.techniques.paired_heads import apart, doubled, interleaved
from nanosprint.ops.attention import check_documents, pack_documents, sdpa


def dense(q, k, v, scale, window, lengths):
    """(B, S, 6, K): slot j's sequence is head j of token 0, head j + 3 of token 0, head j of token 1, and so on."""
    B, S, H, _ = q.shape
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(B, S)
    out = torch.empty_like(v)
    for b in range(B):
        for slot in range(H // 2):
            places = [(t, head) for t in range(S) for head in (slot, slot + H // 2)]
            for here, (t, head) in enumerate(places):
                seen = [
                    places[p]
                    for p in range(here + 1)
                    if document[b, places[p][0]] == document[b, t] and (window is None or here - p <= window)
                ]
                scores = torch.stack([scale * q[b, t, head] @ k[b, j, g] for j, g in seen])
                weights = scores.exp() / scores.exp().sum()
                out[b, t, head] = sum(w * v[b, j, g] for w, (j, g) in zip(weights, seen, strict=True))
    return out


@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize(("B", "S", "lengths"), [(1, 7, [7]), (2, 5, [3, 2, 5]), (1, 9, [1, 0, 5, 3])])
def test_dense_over_the_table_of_slots(B, S, lengths, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, S, 6, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    documents = doubled(pack_documents(lengths, slots=len(lengths) + 3))
    check_documents(documents, B, 2 * S)
    got = apart(sdpa(interleaved(q), interleaved(k), interleaved(v), 0.6, window, documents))
    want = dense(q, k, v, 0.6, window, lengths)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    weight = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((t * weight).sum(), (q, k, v)) for t in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_interleaving_is_a_view_and_can_be_undone():
    t = torch.randn(2, 5, 6, 4)
    assert interleaved(t).data_ptr() == t.data_ptr()
    assert torch.equal(apart(interleaved(t)), t)
    assert torch.equal(interleaved(t)[1, 2 * 3 + 1, 2], t[1, 3, 5])  # position 2t + 1, slot j: head j + 3 of token t
    assert doubled(None) is None


def test_even_heads_stand_at_2t_and_odd_heads_at_2t_plus_1():
    rotary = Rotary(RotarySpec(base=1024.0, fraction=0.5, pairs="neighbours"), 8, 11, places=2).double()
    x = torch.randn(2, 11, 6, 8, dtype=torch.float64)
    got = rotary(x, places=2)
    omega = [1.0, 1 / 1024, 0.0, 0.0]
    for t in range(11):
        for h in range(6):
            position = 2 * t + h % 2
            for m in range(4):
                z = torch.complex(x[:, t, h, 2 * m], x[:, t, h, 2 * m + 1])
                z = z * torch.polar(torch.ones((), dtype=torch.float64), torch.tensor(-position * omega[m]).double())
                torch.testing.assert_close(got[:, t, h, 2 * m], z.real, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(got[:, t, h, 2 * m + 1], z.imag, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotary(x[:, 4:], start=4, places=2), got[:, 4:], rtol=0, atol=0)
