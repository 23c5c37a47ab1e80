"""Two gloo processes: FSDP2 and DTensor parameters, and DDP, give what one process gives."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nanosprint.optim import SOAP, AdamW, Muon
from tests.optim.toy import join, spawn

STEPS = 4
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


def model():
    torch.manual_seed(0)
    sizes = [(6, 9), (9, 9), (9, 9), (9, 1)]  # 9 rows on two processes: uneven shards
    layers = [m for size in sizes for m in (nn.Linear(*size, bias=False), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def optimizers(params):
    """Each rule on its own matrices; the last layer's single row leaves one process with an empty shard."""
    params = list(params)
    exact = {"orthogonalize_dtype": torch.float64}
    cautious = {"decay": "cautious", "weight_decay": 2.0, "lr_scale": 3.0}
    return [
        Muon(params[:1], split=3, variance_beta=0.9, equalize="rows", **exact),
        Muon(params[1:3], variance_beta=0.9, **cautious, **exact),
        AdamW(params[3:], lr=0.01, **cautious),
    ]


def soap(params):
    """Sides on which one gradient has too little rank to fix the eigenvectors stay unrotated: no two runs agree."""
    params = list(params)
    square = {"params": params[1:-1], "max_side": 9}
    return [SOAP([square, {"params": [params[0], params[-1]], "max_side": 8}], lr=0.01, refresh_every=2)]


def batch(step):
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(net, opts, rows=slice(None), steps=range(STEPS)):
    for step in steps:
        for o in opts:
            o.zero_grad()
        net(batch(step)[rows]).square().mean().backward()
        for o in opts:
            o.step()


def single(make):
    net = model().double()
    train(net, make(net.parameters()))
    return [p.detach() for p in net.parameters()]


def compare(params, truth, make):
    tolerance = 1e-6 if make is soap else 1e-9  # eigenvectors of close eigenvalues amplify the order of summation
    for p, q in zip(params, truth, strict=True):
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(whole.detach(), q.detach(), rtol=tolerance, atol=tolerance)


def fsdp(rank, make):
    from torch.distributed.fsdp import fully_shard

    net = model().double()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    opts = make(net.parameters())
    rows = slice(16 * rank, 16 * rank + 16)
    train(net, opts, rows, range(2))
    saved = copy.deepcopy([o.state_dict() for o in opts])
    opts = make(net.parameters())
    for o, state in zip(opts, saved, strict=True):
        o.load_state_dict(state)
    train(net, opts, rows, range(2, STEPS))
    compare(net.parameters(), single(make), make)


def columns(rank, make):
    """Tensor-parallel-like: matrices cut along their columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    reference, spread = [nn.Parameter(torch.randn(6, 6).double()) for _ in range(3)], []
    for p in reference:
        spread.append(nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(1)])))
    ours, theirs = make(spread), make(reference)
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(spread, reference, strict=True)):
            q.grad = torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * step + i)).double()
            p.grad = distribute_tensor(q.grad, mesh, [Shard(1 if step % 2 else 0)])  # laid out otherwise at times
        for o in (*ours, *theirs):
            o.step()
    compare(spread, reference, make)


def muon_only(params):
    return [Muon(params, orthogonalize_dtype=torch.float64, equalize="rows")]


def ddp(rank, make):
    net = model().double()
    train(nn.parallel.DistributedDataParallel(net), make(net.parameters()), slice(16 * rank, 16 * rank + 16))
    compare(net.parameters(), single(make), make)


def worker(rank, processes):
    join(rank, processes)
    try:
        for run, make in (
            (fsdp, optimizers), (fsdp, soap), (columns, muon_only), (columns, soap), (ddp, optimizers),
        ):  # fmt: skip
            torch.manual_seed(0)
            run(rank, make)
    finally:
        dist.destroy_process_group()


def test_two_processes_equal_one():
    spawn(2, worker)
