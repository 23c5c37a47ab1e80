"""Head gates, one head of one token at a time."""

import torch

from nanosprint.model.techniques.head_gate import gated


def test_each_head():
    y, gate = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16), torch.randn(2, 3, 4)
    got = gated(y, gate)
    assert got.dtype == torch.bfloat16
    for b in range(2):
        for t in range(3):
            for h in range(4):
                assert torch.equal(got[b, t, h], y[b, t, h] * gate[b, t, h].bfloat16())


def test_one_number_for_all():
    y = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16)
    assert torch.equal(gated(y, 1.0), y)
    assert gated(y, torch.tensor(0.5)).dtype == torch.bfloat16
