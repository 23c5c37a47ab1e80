"""Gate nets against their formula, with the error function written out."""

import math

import pytest
import torch

from nanosprint.config import Column, GateNetSpec
from nanosprint.model.gpt import GPT
from nanosprint.model.mixing import NetLayouts
from nanosprint.model.roles import collect_roles
from nanosprint.model.techniques.gate_net import GateNet
from nanosprint.recipes import load_recipe


def net_of(spec, columns, dim=10):
    layouts = NetLayouts([spec])
    requests = [layouts.request(column, width) for column, width in columns]
    return GateNet(spec, dim, layouts).double(), requests


def test_starts_where_its_users_ask():
    net, (one, four) = net_of(GateNetSpec(name="a", hidden=5), [(Column(net="a", init=0.5), 1), (Column(net="a"), 4)])
    net.init_weights(torch.Generator().manual_seed(0))
    assert float(net.w1.abs().max()) <= 10**-0.5
    assert float(net.w1.std()) > 0.1
    torch.testing.assert_close(net.bias.detach(), torch.tensor([5.0, 0, 0, 0, 0], dtype=torch.float64))
    columns = net(torch.randn(2, 3, 10, dtype=torch.float64))
    torch.testing.assert_close(columns.take(one), torch.full((2, 3, 1), 0.5, dtype=torch.float64))
    assert torch.equal(columns.take(four), torch.zeros(2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("scale", [None, 0.7])
def test_formula(scale):
    net, requests = net_of(GateNetSpec(name="a", hidden=5, scale=0.1), [(Column(net="a"), 2), (Column(net="a"), 9)])
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    u = torch.randn(1, 4, 10, dtype=torch.float64)
    columns = net(u, None if scale is None else torch.tensor(scale, dtype=torch.float64))
    got = torch.cat([columns.take(request) for request in requests], -1)
    for t in range(4):
        hidden = [float(row @ u[0, t]) for row in net.w1.double()]
        hidden = torch.tensor([h / 2 * (1 + math.erf(h / math.sqrt(2))) for h in hidden], dtype=torch.float64)
        expected = (scale or 0.1) * (net.w2 @ hidden + net.bias)
        torch.testing.assert_close(got[0, t], expected)


def test_nets_share_a_learned_scale_and_name_their_roles():
    nets = [{"name": n, "shared_scale": "s"} for n in ("a", "b")] + [{"name": "c", "hidden": 3}]
    columns = [{"source": "x", "weight": {"kind": "Column", "net": n, "init": 0.5}} for n in ("a", "b", "c")]
    overrides = {"model.nets": nets, "model.input_nets": ["a", "b", "c"], "model.output": columns}
    model = GPT(load_recipe("tiny", overrides).model)
    model.init_weights(0)
    roles = {name: role.name for name, role in collect_roles(model).items() if name.startswith("nets.")}
    assert roles["nets.s"] == "net.s"
    assert {r for r in roles.values() if r.startswith("net.c")} == {"net.c.w1", "net.c.w2", "net.c.bias"}
    assert sum(name == "nets.s" for name in roles) == 1
    with torch.no_grad():
        model.nets.s.fill_(0.3)
    u = torch.randn(1, 2, 32)
    for name, expected in (("a", 1.5), ("b", 1.5), ("c", 0.5)):  # b was 0.5 / 0.1, and c keeps its own scale
        request = model.output.weights["abc".index(name)].request
        torch.testing.assert_close(model.nets(name, u, u.dtype).take(request), torch.full((1, 2, 1), expected))
