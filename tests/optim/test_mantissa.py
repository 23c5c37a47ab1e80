"""Truth: numpy's uint32 arithmetic on the bits, and a twin that keeps fp32 parameters."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from nanosprint.optim import Muon
from nanosprint.optim.mantissa import join, split

SPECIAL = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x0000FFFF, 0x00010000, 0x007FFFFF, 0x807FFFFF, 0x00800000,
    0x3F800000, 0x3F808000, 0x3F80FFFF, 0xBF80FFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
]  # fmt: skip


def patterns():
    """Bits of fp32 numbers: both zeros, subnormals, ties, the largest, infinities, and random ones that are no NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    bits = np.concatenate([np.array(SPECIAL, np.uint32), bits])
    return bits[~np.isnan(bits.view(np.float32))]


def bits_of(tensor, dtype):
    return tensor.view(torch.int16 if dtype == np.uint16 else torch.int32).numpy().view(dtype)


def test_split_and_join_are_the_bits():
    bits = patterns()
    high, low = split(torch.from_numpy(bits.view(np.float32).copy()))
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    np.testing.assert_array_equal(bits_of(high, np.uint16), bits >> 16)
    np.testing.assert_array_equal(bits_of(low, np.uint16), bits & 0xFFFF)
    np.testing.assert_array_equal(bits_of(join(high, low), np.uint32), bits)


def test_the_upper_half_is_cut_off_and_not_rounded():
    x = torch.tensor([1 + 2**-8 + 2**-9, -(1 + 2**-8 + 2**-9)])  # nearer to 1 + 2^-7 than to 1
    assert split(x)[0].tolist() == [1.0, -1.0]
    assert x.bfloat16().tolist() == [1 + 2**-7, -(1 + 2**-7)]


def test_zero_low_half_is_the_parameter_itself():
    p = torch.randn(100).bfloat16()
    assert torch.equal(join(p, torch.zeros(100, dtype=torch.int16)), p.float())


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_any_shape_and_stride(shape):
    x = torch.randn(shape)
    assert torch.equal(join(*split(x)), x)
    turned = torch.randn(3, 5).T
    assert torch.equal(join(*split(turned)), turned)


@pytest.mark.parametrize("options", [{}, {"variance_beta": 0.9, "decay": "cautious", "lr_scale": 2.0}])
def test_equals_an_fp32_twin_bit_for_bit(options):
    """Signs, both zeros and subnormals among the weights; steps far below a bf16 rounding step."""
    torch.manual_seed(0)
    start = [torch.randn(12, 8).bfloat16(), torch.randn(8, 12).bfloat16(), torch.randn(12, 8).bfloat16()]
    start[0][0, :4] = torch.tensor([0.0, -0.0, 1e-39, -1e-39])
    params = [nn.Parameter(w) for w in start]
    twins = [nn.Parameter(w.float()) for w in start]
    ours = Muon(params, lr=1e-3, weight_decay=0.7, mantissa=True, **options)
    theirs = Muon(twins, lr=1e-3, weight_decay=0.7, **options)
    for _ in range(5):
        for p, q in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    for p, q in zip(params, twins, strict=True):
        master = join(p.detach(), ours.state[p]["mantissa"])
        assert torch.equal(master.view(torch.int32), q.detach().view(torch.int32))
        assert ours.state[p]["mantissa"].shape == p.shape


def test_small_steps_add_up():
    """Without the lower half, steps below half a bf16 rounding step are lost one by one."""
    p = [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]
    q = copy.deepcopy(p)
    for params, mantissa in ((p, True), (q, False)):
        optimizer = Muon(params, lr=5e-4, momentum=0.0, mantissa=mantissa)
        for _ in range(100):
            params[0].grad = torch.eye(4, dtype=torch.bfloat16)
            optimizer.step()
    assert torch.equal(q[0].detach().diag(), torch.ones(4, dtype=torch.bfloat16))
    assert (p[0].detach().diag() < 0.97).all()


def test_whoever_overwrites_weights_resets_the_lower_half():
    """Old low bits beside new high ones are a weight that nobody wrote."""
    p = nn.Parameter(torch.randn(4, 4).bfloat16())
    optimizer = Muon([p], mantissa=True)
    p.grad = torch.randn_like(p)
    optimizer.step()
    low = optimizer.state[p]["mantissa"]
    with torch.no_grad():
        p.fill_(1.0)
    assert not torch.equal(join(p.detach(), low), p.float())
    low.zero_()
    assert torch.equal(join(p.detach(), low), p.float())
