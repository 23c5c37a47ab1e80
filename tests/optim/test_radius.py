"""Steps that steer norms, against the formulas written out for one matrix at a time in float64."""

import pytest
import torch
from torch import nn

from nanosprint.config import RadiusControl
from nanosprint.ops import polar
from nanosprint.optim import Muon
from nanosprint.optim.radius import step_at_radius

F64 = torch.float64


@pytest.fixture
def as_it_is(monkeypatch):
    """An orthogonaliser that does nothing, so that updates can be chosen by hand."""
    monkeypatch.setitem(polar.ORTHOGONALIZERS, "as_it_is", lambda G, dtype: G.to(dtype))
    return {"orthogonalizer": "as_it_is", "orthogonalize_dtype": F64, "momentum": 0.0}


def textbook(W, U, rate, decay, cautious, floor=0.3825, outward=0.5, pin=True, outputs="rows"):
    """One matrix; the outward part is found by splitting U into what is along W and the rest, row after row."""
    if outputs == "columns":
        return textbook(W.T, U.T, rate, decay, cautious, floor, outward, pin).T
    size = sum(w * w for w in W.flatten().tolist()) ** 0.5
    if size > 0:
        unit = W / size
        radial = (U * unit).sum().item()
        rest = U - radial * unit
        U = rest + (radial * outward if radial < 0 else radial) * unit
    rows = []
    for w, u in zip(W, U, strict=True):
        least = floor * w.square().sum().sqrt()
        length = u.square().sum().sqrt()
        rows.append(u * (least / length) if 0 < length < least else u)
    U = torch.stack(rows)
    new = W - rate * U
    if pin and size > 0:
        rho = size - rate * (U * W).sum().item() / size
        if rho > 0:
            new = new * (rho / new.square().sum().sqrt())
    mask = (U * W >= 0).double() if cautious else 1.0
    return new * (1 - decay * mask)


CASES = {
    "all": {},
    "floor": {"outward": 1.0, "pin": False, "floor": 1.5},
    "outward": {"floor": 0.0, "pin": False, "outward": 0.0},
    "pin": {"floor": 0.0, "outward": 1.0},
    "columns": {"outputs": "columns", "floor": 1.1},
}


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (1, 3)])
def test_textbook_float64(shape, case, cautious):
    W, U = torch.randn(4, *shape, dtype=F64), 0.2 * torch.randn(4, *shape, dtype=F64)
    U[0] -= W[0]  # lengthens W
    U[1] += W[1]  # shortens it
    U[2, 0] = 0  # an output without update
    W[3] = 0  # a matrix that starts at zero
    given = W.clone(), U.clone()
    ours = step_at_radius(W, U, RadiusControl(**CASES[case]), 0.3, 0.01, cautious)
    truth = torch.stack([textbook(w, u, 0.3, 0.01, cautious, **CASES[case]) for w, u in zip(W, U, strict=True)])
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-14)
    assert torch.equal(W, given[0])
    assert torch.equal(U, given[1])
    assert (ours - (W - 0.3 * U)).abs().max() > 1e-3  # it is no plain step
    assert ours[3].any()


def test_a_step_longer_than_the_matrix_is_taken_as_it_is():
    W, U = torch.eye(2, dtype=F64)[None], torch.eye(2, dtype=F64)[None]
    new = step_at_radius(W, U, RadiusControl(floor=0.0), 3.0, 0.0, False)
    torch.testing.assert_close(new, W - 3 * U)


def test_the_radius_stays_under_steps_across():
    """Updates at right angles to the matrix leave its norm alone, however many there are; without the pin it grows."""
    W = {True: torch.randn(3, 6, 4, dtype=F64)}
    W[False] = W[True].clone()
    before = W[True].norm(dim=(1, 2))
    for _ in range(30):
        for pin, w in W.items():
            U = torch.randn(3, 6, 4, dtype=F64)
            U -= (U * w).sum((1, 2), keepdim=True) / w.square().sum((1, 2), keepdim=True) * w
            W[pin] = step_at_radius(w, U, RadiusControl(floor=0.0, pin=pin), 0.1, 0.0, False)
    torch.testing.assert_close(W[True].norm(dim=(1, 2)), before, rtol=1e-12, atol=0)
    assert (W[False].norm(dim=(1, 2)) > 1.1 * before).all()


@pytest.mark.parametrize("split", [1, 2])
def test_in_muon(as_it_is, split):
    """The factor of the shape is the update's, lr_scale the rate's; stacks and single parameters, blocks apart."""
    stack = nn.Parameter(torch.randn(3, 12, 4, dtype=F64))
    singles = [nn.Parameter(w.clone()) for w in stack.detach()]
    radius, lr, lr_scale, decay = RadiusControl(), 0.05, 2.0, 0.7
    options = {"lr": lr, "lr_scale": lr_scale, "weight_decay": decay, "split": split, "decay": "cautious", **as_it_is}
    bank = Muon([stack], stacked=True, radius=radius, **options)
    apart = Muon(singles, radius=radius, **options)
    W = stack.detach().clone()
    factor = (12 / split / 4) ** 0.5
    for _ in range(3):
        G = torch.randn(3, 12, 4, dtype=F64)
        stack.grad = G.clone()
        for p, g in zip(singles, G, strict=True):
            p.grad = g.clone()
        bank.step()
        apart.step()
        blocks = [
            textbook(w, factor * g, lr * lr_scale, lr * lr_scale * factor * lr * decay, True)
            for w, g in zip(W.view(3 * split, -1, 4), G.view(3 * split, -1, 4), strict=True)
        ]
        W = torch.stack(blocks).view(3, 12, 4)
        torch.testing.assert_close(stack.detach(), W, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.stack([p.detach() for p in singles]), W, rtol=1e-12, atol=1e-13)
