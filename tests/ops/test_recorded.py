"""Recorded orthogonalisation against the plain call. Everything but the first test needs a GPU."""

import pytest
import torch

from nanosprint.ops.polar import polar_express
from nanosprint.ops.recorded import can_record, recorded
from nanosprint.optim import Muon


def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def steps(cuda_graph, device, shapes, stacked=False):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in shapes]
    optimizer = Muon(params, variance_beta=0.9, cuda_graph=cuda_graph, stacked=stacked)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return params


def test_a_cpu_takes_the_plain_way():
    assert not can_record(torch.ones(2, 2))
    for p, q in zip(steps(True, "cpu", [(8, 4)]), steps(False, "cpu", [(8, 4)]), strict=True):
        assert torch.equal(p, q)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 256, 768), (2, 768, 256), (2, 33, 50)])
def test_recorded_equals_plain(shape):
    needs_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    graph = recorded(polar_express, shape, torch.bfloat16, device)
    assert recorded(polar_express, shape, torch.bfloat16, device) is graph
    for _ in range(3):
        G = torch.randn(shape, device=device).bfloat16()
        graph.input.copy_(G)
        torch.testing.assert_close(graph(), polar_express(G), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("shapes", "stacked"), [([(64, 32)] * 3 + [(32, 64)] * 2, False), ([(3, 256, 768)], True)])
def test_muon_with_and_without_a_graph(shapes, stacked):
    needs_gpu()
    plain, ours = steps(False, "cuda", shapes, stacked), steps(True, "cuda", shapes, stacked)
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
