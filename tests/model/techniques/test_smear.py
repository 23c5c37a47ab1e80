"""Smear against its formula, token by token."""

import torch

from nanosprint.config import Gate, Read, Scalar, SmearSpec
from nanosprint.model.gpt import GPT
from nanosprint.model.mixing import NetLayouts
from nanosprint.model.roles import collect_roles
from nanosprint.model.techniques.smear import Smear
from nanosprint.ops.embedding import rows_of
from nanosprint.recipes import load_recipe

SPEC = SmearSpec(gate=Gate(reads=(Read(source="e", dims=3),), role="smear"), weight=Scalar(init=0.0, role="smear"))


def smear(init=0.7):
    module = Smear(SPEC, NetLayouts([])).double()
    with torch.no_grad():
        module.gate.weight.copy_(torch.tensor([[0.5, -1.0, 2.0]]))
        module.weight.value.fill_(init)
    return module


def test_formula():
    e = torch.randn(2, 5, 8, dtype=torch.float64)
    got = smear()(e)
    for b in range(2):
        assert torch.equal(got[b, 0], e[b, 0])
        for t in range(1, 5):
            gate = torch.sigmoid(0.5 * e[b, t, 0] - e[b, t, 1] + 2 * e[b, t, 2])  # of the token, not of its neighbour
            torch.testing.assert_close(got[b, t], e[b, t] + 0.7 * gate * e[b, t - 1])


def test_identity_at_first_and_for_a_single_token():
    e = torch.randn(1, 4, 8, dtype=torch.float64)
    assert torch.equal(Smear(SPEC, NetLayouts([])).double()(e), e)
    assert torch.equal(smear()(e[:, :1]), e[:, :1])


def test_in_the_model_it_comes_before_the_norm():
    spec = {"gate": {"reads": [{"source": "e", "dims": 12}], "role": "smear"}, "weight": {"init": 0.3, "role": "smear"}}
    model = GPT(load_recipe("tiny", {"model.smear": spec}).model, compute_dtype=torch.float64).double()
    model.init_weights(0)
    tokens = torch.randint(257, (2, 7), generator=torch.Generator().manual_seed(0))
    e = model.embed.weight[tokens]
    smeared = e.clone()
    smeared[:, 1:] += 0.3 * 0.5 * e[:, :-1]
    expected = smeared / (smeared.square().mean(-1, keepdim=True) + 2**-23).sqrt()
    torch.testing.assert_close(model.embed(tokens, rows_of(tokens), torch.float64), expected, rtol=1e-6, atol=1e-6)
    names = {role.name for name, role in collect_roles(model).items() if name.startswith("embed.smear")}
    assert names == {"gate.smear", "scalar.smear"}
