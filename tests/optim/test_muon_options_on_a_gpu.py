"""Muon's mixture, basis and radius on a GPU against the same steps on the CPU, at sizes like the record's."""

import pytest
import torch
from torch import nn

from nanosprint.config import GradientBasis, MomentumMixture, RadiusControl
from nanosprint.optim import Muon
from nanosprint.optim.basis import power_step
from nanosprint.optim.mantissa import exact

OPTIONS = {
    "radius": {"radius": RadiusControl()},
    "basis": {"basis": GradientBasis(refresh_every=2)},
    "mixture": {"mixture": MomentumMixture(count=4)},
    "all": {"radius": RadiusControl(), "basis": GradientBasis(refresh_every=2), "mixture": MomentumMixture(count=4)},
}


def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 256, 96), (2, 96, 96), (2, 77, 51)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_the_cpu(name, dtype, shape):
    """fp32 throughout, or bf16 weights with 16 more bits, the orthogonalisation in bf16 and products in TF32."""
    needs_gpu()
    start, gradients = torch.randn(shape).to(dtype), torch.randn(4, *shape).to(dtype)
    options = {
        "lr": 0.05, "stacked": True, "orthogonalizer": "polar_express", "orthogonalize_dtype": dtype,
        "mantissa": dtype == torch.bfloat16, "weight_decay": 1.0, "decay": "cautious", **OPTIONS[name],
    }  # fmt: skip
    ends = []
    for device in ("cpu", "cuda"):
        p = nn.Parameter(start.to(device, copy=True))
        optimizer = Muon([p], **options)
        for g in gradients:
            p.grad = g.to(device)
            optimizer.step()
        ends.append(exact(p, optimizer.state[p]).double().cpu())
    moved = (ends[0] - start.double()).norm()
    assert (ends[1] - ends[0]).norm() / moved < (1e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.gpu
def test_bases_of_the_record_are_orthogonal():
    """60 matrices of 768 from gradients in bf16 of 256 rows each, after ten renewals."""
    needs_gpu()
    gradients = torch.randn(60, 256, 768, device="cuda")
    gradients *= torch.logspace(0, -3, 768, device="cuda")
    gram, basis = gradients.mT @ gradients, torch.eye(768, device="cuda").repeat(60, 1, 1)
    for _ in range(10):
        basis, _ = power_step(gram, basis)
    off = basis.double().mT @ basis.double() - torch.eye(768, device="cuda", dtype=torch.float64)
    assert off.abs().max() < 1e-5
