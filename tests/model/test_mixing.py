"""Weights and sums against the formulas written out; columns arrive where they were asked for."""

import pytest
import torch

from nanosprint.config import Column, Fixed, Gate, GateNetSpec, Product, Read, Scalar, Term
from nanosprint.model.mixing import Columns, Mixture, NetLayouts, build_weight, scaled
from nanosprint.model.roles import collect_roles

B, S, D = 2, 3, 12


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def no_nets():
    return NetLayouts([])


def test_columns_come_in_the_order_of_requests_and_are_repeated_for_neighbours():
    layouts = NetLayouts([GateNetSpec(name="a"), GateNetSpec(name="b")])
    one = layouts.request(Column(net="a", init=0.5), 1)
    other = layouts.request(Column(net="b", init=9.0), 3)
    six = layouts.request(Column(net="a", init=2.0, width=2), 6)
    assert layouts.sizes("a") == (1, 2)
    assert layouts.inits("a") == (0.5, 2.0, 2.0)
    assert layouts.inits("b") == (9.0, 9.0, 9.0)
    outputs = randn(B, S, 3)
    columns = Columns(outputs, layouts.sizes("a"))
    assert torch.equal(columns.take(one), outputs[..., :1])
    assert torch.equal(columns.take(six), outputs[..., [1, 1, 1, 2, 2, 2]])
    assert columns.take(six).shape == (B, S, 6)
    assert Columns(randn(B, S, 3), layouts.sizes("b")).take(other).shape == (B, S, 3)


def test_a_fixed_weight_of_one_is_the_source_itself():
    x = randn(B, S, D)
    assert Mixture([Term(source="x")], no_nets())({"x": x}, {}) is x
    assert torch.equal(Mixture([Term(source="x", weight=Fixed(value=-2.0))], no_nets())({"x": x}, {}), -2 * x)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_scalar(sigmoid):
    weight = build_weight(Scalar(init=-1.5, role="skip", sigmoid=sigmoid), no_nets())
    expected = 1 / (1 + torch.tensor(1.5).exp()) if sigmoid else torch.tensor(-1.5)
    torch.testing.assert_close(weight({}, {}), expected)
    assert collect_roles(weight)["value"].name == "scalar.skip"
    assert weight({}, {}).ndim == 0
    assert (weight({}, {}) * torch.ones(3, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_gate_reads_the_first_components_of_each_source():
    spec = Gate(reads=(Read(source="n", dims=2), Read(source="table0", dims=3)), role="value", scale=2.0)
    gate = build_weight(spec, no_nets(), 4).double()
    n, table = randn(B, S, D), randn(B, S, D, seed=1)
    assert torch.equal(gate({"n": n, "table0": table}, {}), torch.ones(B, S, 4, dtype=torch.float64))  # 2 sigmoid(0)
    with torch.no_grad():
        gate.weight.copy_(randn(4, 5, seed=2))
    got = gate({"n": n, "table0": table}, {})
    for b in range(B):
        for s in range(S):
            for h in range(4):
                z = sum(float(gate.weight[h, i] * n[b, s, i]) for i in range(2))
                z += sum(float(gate.weight[h, 2 + i] * table[b, s, i]) for i in range(3))
                assert float(got[b, s, h]) == pytest.approx(2 / (1 + float(torch.tensor(-z).exp())), rel=1e-6)
    assert collect_roles(gate)["weight"].name == "gate.value"


def test_product_multiplies_its_factors():
    layouts = NetLayouts([GateNetSpec(name="a")])
    factors = (Scalar(init=3.0, role="s"), Column(net="a"), Fixed(value=0.5))
    weight = build_weight(Product(factors=factors), layouts)
    columns = {"a": Columns(randn(B, S, 1), layouts.sizes("a"))}
    torch.testing.assert_close(weight({}, columns), 1.5 * randn(B, S, 1))
    assert {role.name for role in collect_roles(weight).values()} == {"scalar.s"}


def test_weights_of_heads_multiply_their_part_of_the_width():
    x, w = randn(B, S, D), randn(B, S, 3, seed=1)
    torch.testing.assert_close(
        scaled(w, x, 3), torch.cat([w[..., h : h + 1] * x[..., 4 * h : 4 * h + 4] for h in range(3)], -1)
    )
    torch.testing.assert_close(scaled(w[..., :1], x), w[..., :1] * x)
    assert torch.equal(scaled(torch.tensor(2.0), x, 3), 2 * x)


def test_a_mixture_sums_its_terms_and_every_weight_learns():
    layouts = NetLayouts([GateNetSpec(name="a")])
    terms = [
        Term(source="x"),
        Term(source="y", weight=Scalar(init=0.25, role="s")),
        Term(source="y", weight=Column(net="a", width=1)),
        Term(source="z", weight=Gate(reads=(Read(source="x", dims=2),), role="g")),
    ]
    mix = Mixture(terms, layouts, width=2).double()
    x, y, z, column = (randn(B, S, n, seed=i) for i, n in enumerate((D, D, D, 1)))
    got = mix({"x": x, "y": y, "z": z}, {"a": Columns(column, layouts.sizes("a"))})
    torch.testing.assert_close(got, x + 0.25 * y + column * y + 0.5 * z)
    got.square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in mix.parameters())
    assert len(list(mix.parameters())) == 2


def test_a_number_is_handed_over_to_whoever_makes_the_source():
    scalar = Scalar(init=3.0, role="post")
    mix = Mixture(
        [Term(source="x", weight=Scalar(init=2.0, role="residual")), Term(source="mlp", weight=scalar)], no_nets()
    )
    sources = {"x": randn(B, S, D), "mlp": randn(B, S, D, seed=1)}
    names = [name for name, _ in mix.named_parameters()]
    number = mix.hand_over("mlp")
    assert number({}, {}).item() == 3.0
    torch.testing.assert_close(mix(sources, {}), 2 * sources["x"] + sources["mlp"])
    assert [name for name, _ in mix.named_parameters()] == names  # it stays a parameter of the sum


@pytest.mark.parametrize(
    "terms",
    [
        [Term(source="mlp")],
        [Term(source="mlp", weight=Gate(reads=(Read(source="mlp", dims=2),), role="gate"))],
        [Term(source="mlp", weight=Scalar(init=3.0, role="a")), Term(source="mlp", weight=Scalar(init=2.0, role="a"))],
    ],
)
def test_any_other_weight_stays_with_the_sum(terms):
    mix, untouched, sources = Mixture(terms, no_nets()), Mixture(terms, no_nets()), {"mlp": randn(B, S, D).float()}
    assert mix.hand_over("mlp") is None
    assert mix.hand_over("x") is None
    assert torch.equal(mix(sources, {}), untouched(sources, {}))
