import copy

import pytest
import torch
from torch import nn

from nanosprint.optim import Muon
from nanosprint.optim.muon import matrix_shape

F64 = torch.float64
A, B, C = 3.4445, -4.7750, 2.0315


def ns_by_svd(G):
    """Five steps of the quintic on the singular values, float64."""
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    s = S / (S.norm() + 1e-7)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return (U * s) @ Vh


def textbook(weight, gradients, lr, mu, decay=0.0, rms=False, nesterov=True, split=1):
    """Muon with the summed momentum of the original, float64, one matrix at a time."""
    W = weight.detach().double().reshape(weight.shape[0], -1).clone()
    M = torch.zeros_like(W)
    for g in gradients:
        g = g.double().reshape(W.shape)
        M = mu * M + g
        u = g + mu * M if nesterov else M
        blocks = [ns_by_svd(block * (1 - mu)) for block in u.chunk(split)]
        rows, cols = blocks[0].shape
        factor = max(rows, cols) ** 0.5 if rms else max(1, rows / cols) ** 0.5
        W = W * (1 - lr * decay) - lr * factor * torch.cat(blocks)
    return W.view(weight.shape)


def run(optimizer, params, gradients):
    for gradient in gradients:
        for p, g in zip(params, gradient, strict=True):
            p.grad = None if g is None else g.to(p.dtype).clone()
        optimizer.step()


def setting(shapes, steps=4, dtype=torch.float32):
    params = [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
    return params, [[torch.randn(s).to(dtype) for s in shapes] for _ in range(steps)]


SHAPES = [(8, 8), (8, 8), (24, 8), (8, 24), (1, 9), (9, 1), (3, 1000), (6, 2, 3, 3)]


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("nesterov", [True, False])
def test_textbook_float64(rms, nesterov):
    params, gradients = setting(SHAPES, dtype=F64)
    start = copy.deepcopy(params)
    lr = 1e-3 if rms else 0.02
    optimizer = Muon(
        params, lr=lr, momentum=0.9, weight_decay=0.1, scale="rms" if rms else "spectral", nesterov=nesterov,
        orthogonalize_dtype=F64,
    )  # fmt: skip
    run(optimizer, params, gradients)
    for i, p in enumerate(params):
        truth = textbook(start[i], [g[i] for g in gradients], lr, 0.9, 0.1, rms, nesterov)
        torch.testing.assert_close(p.detach(), truth, rtol=1e-9, atol=1e-9)


def test_bf16_orthogonalisation_is_close_to_exact():
    params, gradients = setting([(64, 64), (128, 64)], steps=1)
    start = copy.deepcopy(params)
    run(Muon(params, lr=1.0), params, gradients)
    for p, w, g in zip(params, start, gradients[0], strict=True):
        step = (p - w).detach().double()
        truth = textbook(w, [g], 1.0, 0.95) - w.detach().double()
        assert (step - truth).norm() / truth.norm() < 2e-2


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_agrees_with_torch_muon(adjust):
    """torch's runs in bf16 whatever it is given; "match_rms_adamw" is our "rms" with 0.2 of the rate."""
    params, gradients = setting([(64, 64), (48, 96), (96, 48)], steps=3)
    twins, start = copy.deepcopy(params), copy.deepcopy(params)
    rms = adjust != "original"
    ours = Muon(
        [{"params": params, "lr": 0.2 * 0.01 if rms else 0.01}], momentum=0.9, scale="rms" if rms else "spectral"
    )
    theirs = torch.optim.Muon(twins, lr=0.01, momentum=0.9, weight_decay=0.0, adjust_lr_fn=adjust)
    run(ours, params, gradients)
    run(theirs, twins, gradients)
    for p, q, w in zip(params, twins, start, strict=True):
        assert (p - q).norm() / (q - w).norm() < 2e-2


def test_agrees_with_torch_muon_decay():
    """Zero gradients leave decay alone, which both take from the unscaled rate."""
    params, _ = setting([(12, 4)])
    twins = copy.deepcopy(params)
    zeros = [[torch.zeros(12, 4)]]
    run(Muon(params, lr=0.1, weight_decay=0.3), params, zeros)
    run(torch.optim.Muon(twins, lr=0.1, weight_decay=0.3), twins, zeros)
    torch.testing.assert_close(params[0], twins[0])


@pytest.mark.parametrize("name", ["ns5", "polar_express"])
def test_update_is_nearly_the_polar_factor(name):
    params, gradients = setting([(32, 16)], steps=1)
    start = params[0].detach().clone()
    run(Muon(params, lr=1.0, orthogonalizer=name, momentum=0.0), params, gradients)
    U, _, Vh = torch.linalg.svd(gradients[0][0].double(), full_matrices=False)
    truth = -((32 / 16) ** 0.5) * U @ Vh
    step = (params[0].detach() - start).double()
    assert (step - truth).norm() / truth.norm() < 0.33
    assert (step * truth).sum() / step.norm() / truth.norm() > 0.97


def test_split_orthogonalises_blocks_of_rows():
    params, gradients = setting([(24, 8)], dtype=F64)
    parts = [nn.Parameter(block.clone()) for block in params[0].detach().chunk(3)]
    run(Muon(params, orthogonalize_dtype=F64, split=3), params, gradients)
    run(Muon(parts, orthogonalize_dtype=F64), parts, [g[0].chunk(3) for g in gradients])
    torch.testing.assert_close(params[0].detach(), torch.cat([p.detach() for p in parts]))


def test_stacking_changes_nothing():
    params, gradients = setting([(8, 4)] * 3 + [(4, 8)] * 2)
    singles = copy.deepcopy(params)
    run(Muon(params, orthogonalize_dtype=F64), params, gradients)
    for i, p in enumerate(singles):
        run(Muon([p], orthogonalize_dtype=F64), [p], [[g[i]] for g in gradients])
    for p, q in zip(params, singles, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("shape", [(12, 5), (6, 8), (9, 3)])
def test_stack_equals_its_tensors(shape, split):
    """(k, M, N) with stacked=True is k parameters of (M, N); without, it is one matrix of k rows."""
    stack, gradients = setting([(4, *shape)], dtype=F64)
    flat, parts = copy.deepcopy(stack), [nn.Parameter(w.clone()) for w in stack[0].detach()]
    options = {"orthogonalize_dtype": F64, "weight_decay": 0.1}
    run(Muon(stack, stacked=True, split=split, **options), stack, gradients)
    run(Muon(parts, split=split, **options), parts, [g[0] for g in gradients])
    torch.testing.assert_close(stack[0].detach(), torch.stack([p.detach() for p in parts]), rtol=1e-12, atol=1e-12)
    run(Muon(flat, **options), flat, gradients)
    assert (flat[0] - stack[0]).abs().max() > 1e-3


def test_momentum_and_lr_change_per_step():
    """The buffer is a mean, so a changing momentum is defined by the recursion itself."""
    params, gradients = setting([(6, 6)], dtype=F64)
    W, M = params[0].detach().clone(), torch.zeros(6, 6, dtype=F64)
    optimizer = Muon(params, orthogonalize_dtype=F64)
    for step, (g,) in enumerate(gradients):
        mu, lr = 0.85 + 0.03 * step, 0.1 / (step + 1)
        optimizer.param_groups[0].update(momentum=mu, lr=lr)
        run(optimizer, params, [[g]])
        M = mu * M + (1 - mu) * g
        W = W - lr * ns_by_svd((1 - mu) * g + mu * M)
        torch.testing.assert_close(params[0].detach(), W, rtol=1e-9, atol=1e-9)


def test_tensors_for_lr_and_momentum():
    params, gradients = setting([(6, 6), (12, 6)])
    twins = copy.deepcopy(params)
    run(Muon(params, lr=torch.tensor(0.02), momentum=torch.tensor(0.9)), params, gradients)
    run(Muon(twins, lr=0.02, momentum=0.9), twins, gradients)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_bf16_parameters_keep_fp32_momentum():
    params, gradients = setting([(8, 8)], steps=2, dtype=torch.bfloat16)
    W, M = params[0].detach().double(), torch.zeros(8, 8, dtype=F64)
    optimizer = Muon(params, lr=0.3, orthogonalize_dtype=torch.float32)
    run(optimizer, params, gradients)
    for (g,) in gradients:
        M = 0.95 * M + 0.05 * g.double()
        W = (W - 0.3 * ns_by_svd(0.05 * g.double() + 0.95 * M)).bfloat16().double()
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(params[0].detach().double(), W, rtol=8e-3, atol=1e-3)  # one bf16 step


def test_none_and_zero_gradients():
    params, _ = setting([(4, 4), (4, 4), (4, 4)])
    before = [p.detach().clone() for p in params]
    optimizer = Muon(params)
    run(optimizer, params, [[None, torch.zeros(4, 4), torch.randn(4, 4)]])
    assert torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1])
    assert not torch.equal(params[2], before[2])
    assert params[0] not in optimizer.state


def test_gradients_are_not_modified():
    params, gradients = setting([(4, 6)], steps=1)
    run(Muon(params), params, gradients)
    assert torch.equal(params[0].grad, gradients[0][0])


def test_matrix_shape():
    assert matrix_shape((8, 2, 3, 3)) == (8, 18)
    assert matrix_shape((12, 4), 3) == (4, 4)
    assert matrix_shape((5, 12, 4), 3, stacked=True) == (4, 4)
    assert matrix_shape((5, 12, 2, 2), stacked=True) == (12, 4)


def test_user_mistakes():
    matrix = [nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(ValueError, match=r"shape \(7,\) is not a matrix.*AdamW"):
        Muon([nn.Parameter(torch.ones(7))])
    with pytest.raises(ValueError, match=r"shape \(\) is not a matrix"):
        Muon([nn.Parameter(torch.tensor(1.0))])
    with pytest.raises(ValueError, match=r"lr=-0\.1"):
        Muon(matrix, lr=-0.1)
    with pytest.raises(ValueError, match="lr=nan"):
        Muon(matrix, lr=float("nan"))
    with pytest.raises(ValueError, match=r"momentum=1\.0"):
        Muon(matrix, momentum=1.0)
    with pytest.raises(ValueError, match=r"split=3.*4 rows"):
        Muon(matrix, split=3)
    with pytest.raises(ValueError, match=r"shape \(4, 4\) is no stack"):
        Muon(matrix, stacked=True)
    with pytest.raises(ValueError, match=r"scale='frobenius'.*spectral, rms"):
        Muon(matrix, scale="frobenius")
    with pytest.raises(ValueError, match="orthogonalizer='svd'"):
        Muon(matrix, orthogonalizer="svd")
    with pytest.raises(ValueError, match="orthogonalize_dtype='bf16'"):
        Muon(matrix, orthogonalize_dtype="bf16")
    with pytest.raises(ValueError, match="'ns_steps'"):
        Muon([{"params": matrix, "ns_steps": 3}])
    with pytest.raises(ValueError, match="weight_decay=-1"):
        Muon(matrix, weight_decay=-1)
