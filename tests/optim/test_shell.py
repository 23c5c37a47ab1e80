"""Manners that every optimizer has: state dicts, closures, schedulers, None gradients, torch.compile."""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from nanosprint.optim import SOAP, AdamW, Muon

OPTIMIZERS = [AdamW, Muon, SOAP]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)]
    return nn.Sequential(*layers, nn.Linear(16, 4, bias=False)).to(dtype)


def train(net, optimizer, steps, start=0, step=None):
    for t in range(start, start + steps):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(t)).to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        (step or optimizer.step)()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_is_bitwise(cls, dtype):
    """Through a file, into a fresh optimizer with other settings, in the middle of SOAP's refresh period."""
    whole, half = model(dtype), model(dtype)
    optimizer = cls(whole.parameters(), lr=0.01)
    train(whole, optimizer, 13)
    first = cls(half.parameters(), lr=0.01)
    train(half, first, 7)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = model(dtype)
    resumed.load_state_dict(saved["model"])
    second = cls(resumed.parameters(), lr=0.5)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, 6, start=7)
    assert same(whole, resumed)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_loading_copies(cls):
    """A snapshot taken before warm-up steps must survive them."""
    net = model()
    optimizer = cls(net.parameters(), lr=0.01)
    train(net, optimizer, 3)
    snapshot = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(snapshot)
    kept = copy.deepcopy(snapshot)
    train(net, optimizer, 3)
    for index, state in kept["state"].items():
        for key, value in state.items():
            assert torch.equal(value, snapshot["state"][index][key]), key


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_copies_and_pickles(cls):
    """Model and optimizer together, as torch.save of whole objects and copy.deepcopy do it."""
    net = model()
    optimizer = cls(net.parameters(), lr=0.01)
    train(net, optimizer, 3)
    clones = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
    train(net, optimizer, 3, start=3)
    for other, its_optimizer in clones:
        train(other, its_optimizer, 3, start=3)
        assert same(net, other)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_older_state_dicts_take_new_options_defaults(cls):
    net = model()
    optimizer = cls(net.parameters())
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["weight_decay"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["weight_decay"] == optimizer.defaults["weight_decay"]
    train(net, optimizer, 1)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_closure(cls):
    net, twin = model(), model()
    ours, theirs = cls(net.parameters(), lr=0.01), cls(twin.parameters(), lr=0.01)
    x = torch.randn(32, 8)

    def closure():
        ours.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        loss = ours.step(closure)
        theirs.zero_grad()
        expected = twin(x).square().mean()
        expected.backward()
        assert theirs.step() is None
        assert torch.equal(loss, expected)
    assert same(net, twin)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_lr_scheduler_and_param_groups(cls):
    """A scheduler on two groups equals setting each group's rate by hand."""
    net, twin = model(), model()

    def groups(m):
        params = list(m.parameters())
        return [{"params": params[:2], "lr": 0.02}, {"params": params[2:]}]

    ours, theirs = cls(groups(net), lr=0.01), cls(groups(twin), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1 / (step + 1))
    for t in range(4):
        train(net, ours, 1, start=t)
        scheduler.step()
        for group, base in zip(theirs.param_groups, (0.02, 0.01), strict=True):
            group["lr"] = base * (1 / (t + 1))
        train(twin, theirs, 1, start=t)
    assert same(net, twin)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_zero_rate_and_no_gradients(cls):
    net, before = model(), model()
    cls(net.parameters()).step()  # no gradients at all
    train(net, cls(net.parameters(), lr=0.0), 3)
    assert same(net, before)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_named_parameters(cls):
    net, twin = model(), model()
    ours = cls(net.named_parameters(), lr=0.01)
    train(net, ours, 3)
    train(twin, cls(twin.parameters(), lr=0.01), 3)
    assert same(net, twin)
    assert ours.param_groups[0]["param_names"][0] == "0.weight"


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_training_lowers_the_loss(cls):
    net, x = model(), torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
    target = torch.sin(x[:, :4])
    optimizer, losses = cls(net.parameters(), lr=0.01), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (net(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_compiled_step_equals_eager(cls):
    """One graph for changing rates, as long as they are tensors; SOAP opts out and still works."""
    torch._dynamo.reset()
    net, twin = model(), model()
    options = {"orthogonalize_dtype": torch.float32} if cls is Muon else {}
    ours = cls(net.parameters(), lr=torch.tensor(0.01), **options)
    theirs = cls(twin.parameters(), lr=torch.tensor(0.01), **options)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(ours.step, backend=graphs)
    for t in range(4):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"].fill_(0.01 / (t + 1))
        train(net, ours, 1, start=t, step=step)
        train(twin, theirs, 1, start=t)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert graphs.frame_count == (0 if cls is SOAP else 1)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_integer_parameters_are_refused(cls):
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match="int64"):
        cls([p])
