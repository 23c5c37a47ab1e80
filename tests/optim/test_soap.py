import pytest
import torch
from torch import nn

from nanosprint.optim import SOAP
from nanosprint.optim import soap as soap_module

F64 = torch.float64


class DenseSOAP:
    """One matrix, float64, written from the specification; columns are reordered by explicit permutation matrices."""

    def __init__(self, W, lr, beta1, beta2, eps, decay, every, left=True, right=True):
        self.W, self.lr, self.b1, self.b2, self.eps = W.double().clone(), lr, beta1, beta2, eps
        self.decay, self.every, self.left, self.right = decay, every, left, right
        m, n = W.shape
        self.L, self.R = torch.zeros(m, m, dtype=F64), torch.zeros(n, n, dtype=F64)
        self.QL = self.QR = None
        self.M, self.V, self.t = torch.zeros(m, n, dtype=F64), torch.zeros(m, n, dtype=F64), 0

    def eigenvectors(self, X):
        values, vectors = torch.linalg.eigh(X)
        return vectors[:, values.argsort(descending=True)]

    def grams(self, G):
        self.L = self.b2 * self.L + (1 - self.b2) * (G @ G.T)
        self.R = self.b2 * self.R + (1 - self.b2) * (G.T @ G)

    def step(self, G):
        m, n = G.shape
        if self.QL is None:
            self.grams(G)
            self.QL = self.eigenvectors(self.L) if self.left else torch.eye(m, dtype=F64)
            self.QR = self.eigenvectors(self.R) if self.right else torch.eye(n, dtype=F64)
            return
        self.t += 1
        rotated = self.QL.T @ G @ self.QR
        self.M = self.b1 * self.M + (1 - self.b1) * G
        self.V = self.b2 * self.V + (1 - self.b2) * rotated**2
        N = self.QL @ ((self.QL.T @ self.M @ self.QR) / (self.V.sqrt() + self.eps)) @ self.QR.T
        self.W = self.W - self.lr * (1 - self.b2**self.t) ** 0.5 / (1 - self.b1**self.t) * N
        self.W = self.W * (1 - self.lr * self.decay)
        self.grams(G)
        if self.t % self.every == 0:
            if self.left:
                P = self.permutation(self.QL, self.L)
                self.V = P.T @ self.V
                self.QL = torch.linalg.qr(self.L @ self.QL @ P).Q
            if self.right:
                P = self.permutation(self.QR, self.R)
                self.V = self.V @ P
                self.QR = torch.linalg.qr(self.R @ self.QR @ P).Q

    def permutation(self, Q, X):
        order = torch.diag(Q.T @ X @ Q).argsort(descending=True)
        return torch.eye(len(X), dtype=F64)[:, order]


def gradients(shape, steps, seed=0):
    """Anisotropic, so that the bases matter, and drifting, so that their order changes."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape
    out = []
    for t in range(steps):
        scale = torch.linspace(0.1, 2.0, rows, dtype=F64).roll(t // 4)[:, None]
        out.append(scale * torch.randn(rows, cols, dtype=F64, generator=generator))
    return out


def run(optimizer, p, grads):
    for g in grads:
        p.grad = g.to(p.dtype).clone()
        optimizer.step()


def adopt_bases(truth, state):
    """Where the first gradient has too little rank, part of its eigenbasis is arbitrary: take the optimizer's.

    It has to be one: orthogonal, and the Gram matrix diagonal in it with falling entries.
    """
    for gram, Q in ((truth.L, state["basis_left"]), (truth.R, state["basis_right"])):
        torch.testing.assert_close(Q.mT @ Q, torch.eye(len(Q), dtype=F64))
        diagonal = Q.mT @ gram @ Q
        torch.testing.assert_close(diagonal, torch.diag(diagonal.diag()), rtol=0, atol=1e-12)
        assert (diagonal.diag().diff() < 1e-12).all()
    truth.QL, truth.QR = state["basis_left"].clone(), state["basis_right"].clone()


@pytest.mark.parametrize(
    ("shape", "every"),  # a refresh only when both Gram matrices have full rank, or QR is arbitrary
    [((5, 5), 1), ((5, 5), 3), ((7, 4), 3), ((3, 8), 3), ((1, 6), 6), ((6, 1), 6)],
)
def test_equals_dense_form(shape, every):
    p = nn.Parameter(torch.randn(shape, dtype=F64))
    truth = DenseSOAP(p.detach(), 0.01, 0.9, 0.8, 1e-6, 0.1, every)
    optimizer = SOAP([p], lr=0.01, betas=(0.9, 0.8), eps=1e-6, weight_decay=0.1, refresh_every=every)
    for t, g in enumerate(gradients(shape, 14)):
        run(optimizer, p, [g])
        truth.step(g)
        if t == 0:
            adopt_bases(truth, optimizer.state[p])
    torch.testing.assert_close(p.detach(), truth.W, rtol=1e-6, atol=1e-6)


def test_bf16_and_fp32_follow_the_dense_form():
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        p = nn.Parameter(torch.randn(5, 5).to(dtype))
        truth = DenseSOAP(p.detach(), 0.01, 0.95, 0.95, 1e-8, 0.0, 10)
        grads = [g.to(dtype).double() for g in gradients((5, 5), 12)]
        optimizer = SOAP([p], lr=0.01)
        run(optimizer, p, grads)
        for g in grads:
            truth.step(g)
        assert all(v.dtype == torch.float32 for v in optimizer.state[p].values())
        torch.testing.assert_close(p.detach().double(), truth.W, rtol=tolerance, atol=tolerance)


def test_first_call_only_sets_up_bases():
    p = nn.Parameter(torch.randn(4, 3))
    before = p.detach().clone()
    optimizer = SOAP([p], weight_decay=0.5)
    run(optimizer, p, gradients((4, 3), 1))
    state = optimizer.state[p]
    assert torch.equal(p, before)
    assert int(state["step"]) == 0
    for Q in (state["basis_left"], state["basis_right"]):
        torch.testing.assert_close(Q.mT @ Q, torch.eye(len(Q)), rtol=1e-5, atol=1e-5)


def test_long_sides_are_not_rotated():
    p = nn.Parameter(torch.randn(4, 7, dtype=F64))
    truth = DenseSOAP(p.detach(), 0.01, 0.95, 0.95, 1e-8, 0.0, 2, right=False)
    grads = gradients((4, 7), 8)
    optimizer = SOAP([p], lr=0.01, refresh_every=2, max_side=5)
    run(optimizer, p, grads)
    for g in grads:
        truth.step(g)
    assert "basis_left" in optimizer.state[p]
    assert "basis_right" not in optimizer.state[p]
    torch.testing.assert_close(p.detach(), truth.W, rtol=1e-7, atol=1e-7)


def test_limit_is_the_published_one():
    assert SOAP([nn.Parameter(torch.ones(2, 2))]).defaults["max_side"] == 10_000


def test_vectors_get_plain_adam_from_the_first_step():
    p = nn.Parameter(torch.randn(5, dtype=F64))
    w, m, v = p.detach().clone(), torch.zeros(5, dtype=F64), torch.zeros(5, dtype=F64)
    optimizer = SOAP([p], lr=0.01, betas=(0.9, 0.8), eps=1e-3, weight_decay=0.1)
    for t in range(1, 6):
        g = torch.randn(5, dtype=F64)
        run(optimizer, p, [g])
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * g**2
        w = (w - 0.01 * (1 - 0.8**t) ** 0.5 / (1 - 0.9**t) * m / (v.sqrt() + 1e-3)) * (1 - 0.01 * 0.1)
        torch.testing.assert_close(p.detach(), w)


def test_more_than_two_axes_are_flattened():
    conv, flat = nn.Parameter(torch.randn(4, 2, 3, dtype=F64)), None
    flat = nn.Parameter(conv.detach().reshape(4, 6).clone())
    grads = gradients((4, 6), 5)
    run(SOAP([conv]), conv, [g.view(4, 2, 3) for g in grads])
    run(SOAP([flat]), flat, grads)
    assert torch.equal(conv.detach().reshape(4, 6), flat.detach())


def test_eigh_falls_back_to_float64(monkeypatch):
    """As LAPACK's solvers do for some ill-conditioned fp32 matrices."""
    original, seen = torch.linalg.eigh, []

    def fragile(X):
        seen.append(X.dtype)
        if X.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return original(X)

    monkeypatch.setattr(torch.linalg, "eigh", fragile)
    Q = soap_module.eigenbasis(torch.diag(torch.tensor([1.0, 3.0, 2.0])))
    assert seen == [torch.float32, torch.float64]
    assert Q.dtype == torch.float32
    torch.testing.assert_close(Q.abs(), torch.tensor([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]))


def test_zero_gradients_are_safe():
    p = nn.Parameter(torch.ones(3, 2))
    run(SOAP([p], refresh_every=1), p, [torch.zeros(3, 2)] * 3)
    assert torch.equal(p.detach(), torch.ones(3, 2))


@pytest.mark.parametrize("precision", ["high", "highest", "medium"])
def test_tf32_is_as_asked_for_inside_and_restored(precision):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        for tf32 in (False, True):
            with soap_module.fp32_products(tf32):
                assert (torch.get_float32_matmul_precision() == "highest") != tf32
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_user_mistakes():
    p = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match="refresh_every=0"):
        SOAP(p, refresh_every=0)
    with pytest.raises(ValueError, match=r"gram_beta=1\.5"):
        SOAP(p, gram_beta=1.5)
    with pytest.raises(ValueError, match="lr=-3"):
        SOAP(p, lr=-3)
