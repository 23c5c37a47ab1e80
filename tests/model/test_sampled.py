"""The softmax over a part of the vocabulary, against explicit sums in float64."""

import math

import pytest
import torch

from nanosprint.config import SoftcapSpec
from nanosprint.model.context import LossTensors
from nanosprint.model.head import Head
from nanosprint.model.objective import labels_of
from nanosprint.model.sampled import draw
from nanosprint.ops.head_loss import Fp8Scales, head_loss
from nanosprint.ops.softcap_xent import Labels
from nanosprint.recipes import load_recipe

V, D = 96, 16


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def some_labels(salt=0, m=2):
    ids = torch.randint(-1, 20, (30, m))
    ids[0, 0] = 21 + salt  # another sum, and so another draw
    return Labels(ids, torch.tensor([1.0, 0.5])[:m].double(), torch.rand(30).double())


def test_what_is_drawn():
    labels = some_labels()
    sure = sorted(set(labels.ids.flatten().tolist()) - {-1})
    columns, part = draw(labels, V, 48)
    assert columns[: len(sure)].tolist() == sure
    assert len(set(columns.tolist())) == 48
    assert part.rest.tolist() == pytest.approx([len(sure), math.log((V - len(sure)) / (48 - len(sure)))])
    there = labels.ids >= 0
    assert torch.equal(columns[part.ids[there]], labels.ids[there])
    assert torch.equal(part.ids < 0, ~there)
    assert torch.equal(draw(labels, V, 48).columns, columns)  # no random state
    others = [set(draw(some_labels(salt), V, 48).columns.tolist()) for salt in range(8)]
    assert len(set(map(frozenset, others))) == 8


def test_every_other_token_is_drawn_as_often():
    times, expected = torch.zeros(V), 0.0
    for salt in range(1, 3001):
        ids = torch.ones(salt, 1, dtype=torch.int64)  # each time another sum
        labels = Labels(ids, torch.ones(1), torch.ones(salt))
        columns, part = draw(labels, V, 32)
        times[columns] += 1
        expected += (32 - part.rest[0].item()) / (V - part.rest[0].item())
    rest = torch.cat([times[:1], times[2:]])
    deviation = (expected * (1 - expected / 3000)) ** 0.5
    assert (rest.mean() - expected).abs() < 4 * deviation / len(rest) ** 0.5
    assert (rest - expected).abs().max() < 4 * deviation


def test_the_partition_is_right_on_average():
    logits = torch.randn(V).double() * 2
    whole, found = logits.exp().sum(), []
    for salt in range(1, 4001):
        labels = Labels(torch.full((salt, 1), 1 + salt % 2), torch.ones(1).double(), torch.ones(salt).double())
        columns, part = draw(labels, V, 32)
        count = torch.where(torch.arange(32) >= part.rest[0], part.rest[1], 0.0).exp()
        found.append((logits[columns].exp() * count).sum())
    found = torch.stack(found)
    assert (found.mean() - whole).abs() < 4 * found.std() / 4000**0.5
    assert found.std() > 0.02 * whole


def explicit(x, weight, labels, count, spec):
    """The loss by explicit sums; what totals add beyond it enters as lse times a constant."""
    columns, part = draw(labels, V, count)
    sure = int(part.rest[0])
    share = (count - sure) / (V - sure)
    z = x @ weight.mT
    l = z if spec is None else spec.cap / (1 + torch.exp(-(z + spec.shift) / spec.width))
    Z = l[:, columns[:sure]].exp().sum(-1) + l[:, columns[sure:]].exp().sum(-1) / share
    total = 0.0
    for t, row in enumerate(labels.ids.tolist()):
        for w, y in zip(labels.weights, row, strict=True):
            if y >= 0:
                total = total + w * (Z[t].log() - l[t, y])
    beyond = labels.totals - ((labels.ids >= 0) * labels.weights).sum(-1)
    return total + ((lambda b: b - b.detach())(beyond * Z.log())).sum()


@pytest.mark.parametrize("spec", [None, SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5)])
@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("count", [32, V])
def test_loss_and_gradients_in_float64(spec, in_out, count):
    x, weight = torch.randn(30, D).double().requires_grad_(), torch.randn(V, D).double().requires_grad_()
    labels = some_labels()
    columns, part = draw(labels, V, count)
    given = weight.mT.contiguous() if in_out else weight
    got = head_loss(x, given, part, softcap=spec, in_out=in_out, columns=columns)
    expected = explicit(x, weight, labels, count, spec)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    pairs = zip(torch.autograd.grad(got, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    if count == V:
        whole = head_loss(x, given, labels, softcap=spec, in_out=in_out)
        assert whole.item() == pytest.approx(got.item(), rel=1e-12)


def test_fp8_products_of_a_part():
    x, weight = torch.randn(32, D).bfloat16(), (torch.randn(V, D) / 4).bfloat16().requires_grad_()
    ids = torch.randint(0, 20, (32, 1))
    columns, part = draw(Labels(ids, torch.ones(1), torch.ones(32)), V, 48)
    scales = Fp8Scales(4 / 448, 1 / 448, 1 / 448)
    exact = head_loss(x.double(), weight.double(), part, columns=columns)
    got = head_loss(x, weight, part, columns=columns, scales=scales)
    assert got.item() == pytest.approx(exact.item(), rel=0.02)
    (one,), (other,) = (torch.autograd.grad(loss, weight) for loss in (got, exact))
    assert (one.double() - other.double()).norm() < 0.1 * other.double().norm()
    absent = torch.ones(V, dtype=torch.bool).index_fill_(0, columns, False)
    assert absent.sum() == V - 48
    assert not one[absent].any()


@pytest.mark.parametrize("operator", [None, head_loss])
def test_the_head_draws_in_training_only(operator):
    config = load_recipe("tiny", {"model.tied_head": "false"}).model
    head = Head(config, operator)
    head.init_weights(torch.Generator().manual_seed(0))
    torch.nn.init.normal_(head.weight)
    x = torch.randn(2, 9, config.dim)
    targets = torch.randint(0, 40, (2, 9))
    loss = LossTensors(torch.tensor([1.0, 0.5]), None, 64)
    got = head.loss_sum(x, targets, None, loss)
    labels = labels_of(targets, loss, head.prefixes)
    columns, part = draw(labels, config.vocab_size, 64)
    expected = head_loss(x.flatten(0, 1), head.weight, part, columns=columns, softcap=config.softcap)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    whole = head.loss_sum(x, targets, None, loss._replace(sampled=None))
    assert abs(got.item() - whole.item()) > 1e-3
    with torch.no_grad():
        assert head.loss_sum(x, targets, None).isfinite()


def test_too_few_for_the_labels_is_seen():
    labels = Labels(torch.arange(40)[:, None], torch.ones(1), torch.ones(40))
    columns, part = draw(labels, V, 32)
    x, weight = torch.randn(40, D), torch.randn(V, D, requires_grad=True)
    assert head_loss(x, weight, part, columns=columns).isnan()
    with pytest.raises(ValueError, match="over 112 of 96 tokens"):
        draw(labels, V, 112)


@pytest.mark.parametrize("operator", [None, head_loss])
def test_compiled_in_one_graph(operator):
    config = load_recipe("tiny", {"model.tied_head": "false"}).model
    head = Head(config, operator)
    torch.nn.init.normal_(head.weight)
    torch._dynamo.reset()
    compiled = torch.compile(head.loss_sum, dynamic=False, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = torch.randn(2, 9, config.dim, requires_grad=True)
        targets = torch.randint(0, 40 + seed, (2, 9))
        loss = LossTensors(torch.tensor([1.0, 0.5]), torch.tensor(0.25), 64)
        results = [function(x, targets, None, loss) for function in (head.loss_sum, compiled)]
        torch.testing.assert_close(*results)
        gradients = [torch.autograd.grad(result, (x, head.weight)) for result in results]
        torch.testing.assert_close(*gradients)
