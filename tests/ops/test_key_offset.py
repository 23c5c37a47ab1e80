"""Key offset against an assignment for each number."""

import pytest
import torch

from nanosprint.ops.key_offset import offset_keys


@pytest.mark.parametrize("ranges", [((4, 8),), ((2, 4), (6, 8)), ((0, 8),), ()])
@pytest.mark.parametrize("S", [1, 2, 7])
def test_each_number(S, ranges):
    k = torch.randn(3, S, 2, 8, dtype=torch.float64, requires_grad=True)
    want = [[k[b, t - 1 if t and any(i in range(*r) for r in ranges) else t, :, i] for i in range(8)]
            for b in range(3) for t in range(S)]  # fmt: skip
    want = torch.stack([torch.stack(heads, -1) for heads in want]).view(k.shape)
    got = offset_keys(k, ranges)
    assert torch.equal(got, want)
    weight = torch.randn_like(got)
    (a,), (b,) = (torch.autograd.grad((t * weight).sum(), k) for t in (got, want))
    torch.testing.assert_close(a, b)


def test_in_parts_with_the_key_before():
    k = torch.randn(2, 9, 2, 8, dtype=torch.bfloat16)
    whole = offset_keys(k, ((3, 6),))
    parts = [offset_keys(k[:, :4], ((3, 6),)), offset_keys(k[:, 4:], ((3, 6),), k[:, 3:4])]
    assert torch.equal(torch.cat(parts, 1), whole)
