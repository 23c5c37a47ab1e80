"""Muon's one-pass kernels against the lists of operations that they replace."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanosprint.kernels import has_triton
from nanosprint.optim import Muon
from nanosprint.optim import muon as rule

SHAPES = [(256, 768), (256, 768), (768, 256), (33, 50), (1, 9), (6, 2, 3, 3), (300, 257)]


def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def train(optimizer, params, gradients):
    for gradient in gradients:
        for p, g in zip(params, gradient, strict=True):
            p.grad = g.clone()
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("name", ["ns5", "polar_express"])
def test_fused_step_equals_plain_step(monkeypatch, dtype, nesterov, name):
    needs_gpu()
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device="cuda").to(dtype)) for s in SHAPES]
    gradients = [[torch.randn(s, device="cuda").to(dtype) for s in SHAPES] for _ in range(3)]
    twins, start = copy.deepcopy(params), copy.deepcopy(params)
    options = {"lr": 0.1, "weight_decay": 0.1, "nesterov": nesterov, "orthogonalizer": name}
    ours = Muon(params, **options)
    versions = [p._version for p in params]
    train(ours, params, gradients)
    assert all(p._version > v for p, v in zip(params, versions, strict=True))
    monkeypatch.setattr(rule, "_fusible", lambda *_: False)
    plain = Muon(twins, **options)
    train(plain, twins, gradients)
    for p, q, w in zip(params, twins, start, strict=True):
        m, n = ours.state[p]["exp_avg"], plain.state[q]["exp_avg"]
        torch.testing.assert_close(m, n, rtol=1e-5, atol=1e-6)
        assert (p - q).float().norm() / (q - w).float().norm() < (1e-2 if dtype == torch.float32 else 5e-2)


@pytest.mark.gpu
def test_tensors_that_cannot_be_fused_take_the_plain_way():
    """Not contiguous, or at an odd address."""
    needs_gpu()
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 32, device="cuda")) for _ in range(2)]
    twins = copy.deepcopy(params)
    gradients = [torch.randn(64, 32, device="cuda") for _ in range(2)]
    for p, q, g in zip(params, twins, gradients, strict=True):
        q.grad = g.clone()
        p.grad = g.T.contiguous().T if p is params[0] else torch.cat([g.new_zeros(1), g.flatten()])[1:].view(64, 32)
    Muon(params).step()
    Muon(twins).step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_kernel_logic_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, hence a process of its own."""
    if not has_triton():
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves are tested here")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, __file__], check=True, env=env, timeout=120)


def interpreted():
    from nanosprint.kernels import fp8, muon

    def lists(shape):
        return [torch.randn(shape) for _ in range(3)]

    for shape in [(37, 53), (1, 1), (64, 64)]:
        for nesterov, momentum in ((True, 0.95), (False, 0.95), (True, 0.25), (True, 0.0)):
            params, grads, averages = lists(shape), lists(shape), lists(shape)
            plain = [[t.clone() for t in column] for column in (params, averages)]
            assert muon.can_fuse(params, grads, averages)
            stack = muon.momentum_stack(averages, grads, momentum, nesterov, torch.float32)
            directions = rule.momentum_(plain[1], grads, momentum, nesterov)
            torch.testing.assert_close(averages, plain[1], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(list(stack), directions, rtol=1e-5, atol=1e-6)
            muon.apply_stack(params, stack, 0.1, 0.99)
            torch.testing.assert_close(params, [0.99 * p - 0.1 * u for p, u in zip(plain[0], stack, strict=True)])

    for rows, cols, padded in [(50, 200, 64), (128, 128, 128), (1, 16, 16), (130, 3, 144)]:
        x = 3 * torch.randn(rows, cols)
        x[0, 1] = float("nan")
        out, turned = torch.full((rows, cols), -7.0), torch.full((cols, padded), -7.0)
        expected = (0.5 * x).clamp(-1, 1)
        fp8.quantize(x, out, turned, 0.5, 1.0)
        torch.testing.assert_close(out, expected, equal_nan=True)
        torch.testing.assert_close(turned[:, :rows], expected.T, equal_nan=True)
        assert not turned[:, rows:].any()
        alone = torch.full_like(out, -7.0)
        fp8.quantize(x, alone, None, 0.5, 1.0)
        torch.testing.assert_close(alone, out, equal_nan=True)


if __name__ == "__main__":
    interpreted()
