"""Copies byte for byte against the formula, and products against the same codes in float64."""

import logging

import pytest
import torch

from nanosprint.ops import fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(16, 16), (1, 16), (40, 48), (130, 272), (512, 768), (1000, 1264)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rounded(t, scale, dtype):
    """float64 of what FP8 keeps of t, in units of the scale."""
    limit = 448.0 if dtype == E4M3 else 57344.0
    q = t.detach().float() * torch.tensor(1 / scale, dtype=torch.float32)
    return torch.where(q.abs() > limit, q.sign() * limit, q).to(dtype).double()


def relative(out, truth):
    return ((out.double() - truth).norm() / truth.norm()).item()


def same_bytes(a, b):
    return torch.equal(a.view(torch.uint8).cpu(), b.view(torch.uint8).cpu())


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(("dtype", "limit", "error"), [(E4M3, 448, 2**-4), (E5M2, 57344, 2**-3)])
def test_formula(device, dtype, limit, error):
    """Half a unit in the last place, clamped at both ends, whether the scale is a number or a tensor."""
    x = torch.randn(64, 48, device=device)
    x[0, :4] = torch.tensor([1e30, -1e30, float("nan"), 0.0], device=device)
    scale = 2.0**-6
    q = fp8.quantize(x, scale, dtype)
    assert torch.equal(q[1:].double(), rounded(x[1:], scale, dtype))
    assert same_bytes(fp8.quantize(x, torch.tensor(scale, device=device), dtype), q)
    back = q[1:].double() * scale
    assert ((back - x[1:].double()).abs() <= error * x[1:].double().abs().clamp(min=2.0**-6 * scale)).all()
    assert q[0, :2].double().tolist() == [limit, -limit]
    assert q[0, 2].isnan()
    assert q[0, 3] == 0


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, "ready"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_pairs_are_those_of_the_formula(device, source, dtype):
    """Byte for byte, both layouts: a permuted copy can still give plausible products."""
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, device=device) * 20
        x = fp8.quantize(x, 0.1, dtype) if source == "ready" else x.to(source)
        expected = x if source == "ready" else fp8.quantize(x, 0.1, dtype)
        plain, turned = fp8.quantize_pair(x, 0.1, dtype)
        assert same_bytes(plain, expected)
        assert turned.shape == (cols, -(-rows // 16) * 16)
        assert same_bytes(turned[:, :rows].contiguous(), expected.view(torch.uint8).mT.contiguous())
        assert not turned[:, rows:].float().any()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("a_dtype", "out"), [(E4M3, torch.bfloat16), (E5M2, torch.bfloat16), (E4M3, torch.float32)])
def test_product(device, fast, a_dtype, out):
    a, b = torch.randn(33, 64, device=device), torch.randn(48, 64, device=device)
    a8, b8 = fp8.quantize(a, 2**-8, a_dtype), fp8.quantize(b, 2**-7, E4M3)
    truth = rounded(a, 2**-8, a_dtype) @ rounded(b, 2**-7, E4M3).mT * 2.0**-15
    a_s, b_s = torch.tensor(2.0**-8, device=device), torch.tensor(2.0**-7, device=device)
    for scales in ((2**-8, 2**-7), (a_s, b_s), (a_s, 2**-7)):
        y = fp8.scaled_product(a8, b8, *scales, out, fast=fast)
        assert y.dtype == out
        assert relative(y, truth) < (2.5e-3 if out == torch.bfloat16 else 5e-4 + 2e-3 * fast)


def test_device_choice(caplog):
    assert fp8.has_fp8("cpu")
    fp8._warn_without_fp8.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not fp8.has_fp8("meta")
        assert not fp8.has_fp8("meta")
    assert caplog.text.count("no FP8") == 1


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("shape", [(5,), (1, 1), (7, 3), (2, 5, 3, 4)])
def test_largest(device, shape):
    """Wherever it is, of either sign, in the dtype at hand; a NaN anywhere is the answer."""
    x = torch.rand(shape, device=device).to(torch.bfloat16)
    for i in {0, x.numel() // 2, x.numel() - 1}:
        y = x.clone()
        y.view(-1)[i] = -3.0
        peak = fp8.largest(y)
        assert (peak.shape, peak.dtype, peak.item()) == ((), torch.bfloat16, 3.0)
        y.view(-1)[i] = torch.nan
        assert fp8.largest(y).isnan()
