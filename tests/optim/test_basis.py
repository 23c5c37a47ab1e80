"""SOAP's coordinates before the orthogonalisation, one matrix at a time in float64 with QR instead of Cholesky."""

import pytest
import torch
from torch import nn

from nanosprint.config import GradientBasis
from nanosprint.ops import polar
from nanosprint.optim import Muon
from nanosprint.optim.basis import init_basis, power_step, precondition_

F64 = torch.float64
MU = 0.9


@pytest.fixture
def as_it_is(monkeypatch):
    monkeypatch.setitem(polar.ORTHOGONALIZERS, "as_it_is", lambda G, dtype: G.to(dtype))
    return {"orthogonalizer": "as_it_is", "orthogonalize_dtype": F64, "lr": 1e-2, "momentum": MU}


def refreshed(gram, Q):
    """(the new basis, the order of its columns): QR of (gram + e) Q, sorted, with a diagonal of R that is positive."""
    product = (gram + 1e-5 * gram.trace() / len(gram) * torch.eye(len(gram), dtype=F64)) @ Q
    estimates = [(Q[:, j] @ product[:, j]).item() for j in range(len(gram))]
    order = sorted(range(len(gram)), key=lambda j: -estimates[j])
    basis, R = torch.linalg.qr(product[:, order])
    return basis * R.diagonal().sign(), order


class Textbook:
    """One matrix."""

    def __init__(self, rows, cols, spec):
        self.spec, self.t, self.V = spec, 0, torch.zeros(rows, cols, dtype=F64)
        self.left = spec.sides != "columns"
        self.right = spec.sides != "rows"
        self.L, self.QL = torch.zeros(rows, rows, dtype=F64), torch.eye(rows, dtype=F64)
        self.R, self.QR = torch.zeros(cols, cols, dtype=F64), torch.eye(cols, dtype=F64)

    def __call__(self, U, G):
        beta = self.spec.beta
        rotated = self.QL.T @ U @ self.QR
        self.V = beta * self.V + (1 - beta) * rotated**2
        white = torch.where(rotated == 0, 0.0, rotated / self.V.sqrt())
        out = self.QL @ white @ self.QR.T
        self.L = beta * self.L + (1 - beta) * G @ G.T
        self.R = beta * self.R + (1 - beta) * G.T @ G
        self.t += 1
        if self.t <= self.spec.refresh_every or self.t % self.spec.refresh_every == 0:
            if self.left:
                self.QL, order = refreshed(self.L, self.QL)
                self.V = self.V[order]
            if self.right:
                self.QR, order = refreshed(self.R, self.QR)
                self.V = self.V[:, order]
        return out


def gradients_of(shape, steps):
    """Gradients whose directions differ in size by three decades."""
    rows, cols = shape[-2:]
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=F64)).Q for n in (rows, cols))
    sizes = torch.logspace(0, -3, min(rows, cols), dtype=F64)
    middle = torch.zeros(rows, cols, dtype=F64)
    middle.diagonal().copy_(sizes)
    noise = torch.randn(steps, *shape, dtype=F64)
    return left @ (middle * noise + 1e-3 * torch.randn(steps, *shape, dtype=F64)) @ right.mT


@pytest.mark.parametrize("sides", ["columns", "rows", "both"])
@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
@pytest.mark.parametrize("every", [1, 3])
def test_textbook_float64(as_it_is, sides, shape, every):
    """Through Muon's Nesterov momentum; a stack of three and three single parameters of two blocks each."""
    spec = GradientBasis(sides=sides, beta=0.8, refresh_every=every)
    stack = nn.Parameter(torch.randn(3, 2 * shape[0], shape[1], dtype=F64))
    singles = [nn.Parameter(w.clone()) for w in stack.detach()]
    bank = Muon([stack], stacked=True, split=2, basis=spec, **as_it_is)
    apart = Muon(singles, split=2, basis=spec, **as_it_is)
    books = [Textbook(*shape, spec) for _ in range(6)]
    W = stack.detach().clone().view(6, *shape)
    M = torch.zeros_like(W)
    factor = max(1, shape[0] / shape[1]) ** 0.5
    for G in gradients_of((6, *shape), 8):
        stack.grad = G.reshape(stack.shape).clone()
        for p, g in zip(singles, stack.grad, strict=True):
            p.grad = g.clone()
        bank.step()
        apart.step()
        M = MU * M + (1 - MU) * G
        U = MU * M + (1 - MU) * G
        W = W - 1e-2 * factor * torch.stack([book(u, g) for book, u, g in zip(books, U, G, strict=True)])
        torch.testing.assert_close(stack.detach().view_as(W), W, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.stack([p.detach() for p in singles]).view_as(W), W, rtol=1e-6, atol=1e-7)
    state = bank.state[stack]
    assert int(state["step"]) == 8
    assert ("basis_left" in state, "basis_right" in state) == (sides != "columns", sides != "rows")


def test_the_power_step_finds_eigenvectors():
    """Started anywhere, in fp32; eigenvalues over six decades come out in order, and the basis is orthogonal."""
    Q = torch.linalg.qr(torch.randn(2, 40, 40, dtype=F64)).Q
    values = torch.logspace(0, -6, 40, dtype=F64)
    gram = (Q * values @ Q.mT).float()
    basis = torch.eye(40).repeat(2, 1, 1)
    for _ in range(60):
        basis, _ = power_step(gram, basis)
    eye = torch.eye(40).expand(2, -1, -1)
    torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=1e-5)
    leading = (basis[..., :10].double().mT @ Q[..., :10]).abs()
    torch.testing.assert_close(leading, torch.eye(10, dtype=F64).expand(2, -1, -1), rtol=0, atol=1e-2)


@pytest.mark.parametrize("gram", ["zero", "rank one", "huge", "tiny"])
def test_bases_stay_orthogonal_whatever_the_gradients(gram):
    v = torch.randn(2, 30, 1)
    factor = {"zero": 0.0, "rank one": 1.0, "huge": 1e12, "tiny": 1e-12}[gram]
    basis = torch.eye(30).repeat(2, 1, 1)
    for _ in range(4):
        basis, order = power_step(factor * v @ v.mT, basis)
        assert order.sort(-1).values.tolist() == [list(range(30))] * 2
    torch.testing.assert_close(basis.mT @ basis, torch.eye(30).expand(2, -1, -1), rtol=0, atol=1e-4)


def test_no_gradient_no_direction():
    spec, state = GradientBasis(), {}
    init_basis(state, spec, 2, 4, 3, torch.zeros(()))
    for _ in range(3):
        out = precondition_(torch.zeros(2, 4, 3), torch.zeros(2, 4, 3), state, spec, tf32=True)
    assert not out.any()
    assert all(value.isfinite().all() for value in state.values())


def test_it_whitens():
    """Strong and weak directions of the gradients leave more alike than they came."""
    spec, state = GradientBasis(sides="both", refresh_every=1), {}
    init_basis(state, spec, 1, 8, 8, torch.zeros((), dtype=F64))
    for G in gradients_of((8, 8), 60):
        out = precondition_(G[None], G[None], state, spec, tf32=False)
    sizes = torch.linalg.svdvals(out[0])
    before = torch.linalg.svdvals(G)
    assert sizes[0] / sizes[-1] < 0.1 * before[0] / before[-1]
