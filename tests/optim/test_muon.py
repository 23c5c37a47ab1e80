import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from nanosprint.config.groups import AdamConfig, MuonConfig, ParamGroup, SoapConfig
from nanosprint.config.recipe import Precision
from nanosprint.ops import polar
from nanosprint.optim import Muon
from nanosprint.optim.build import _optimizer
from nanosprint.optim.mantissa import join
from nanosprint.optim.muon import equal_rows, matrix_shape, variance_shape

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


@pytest.mark.parametrize("nesterov", [True, False])
def test_equal_rows_against_the_textbook(nesterov):
    """MuonEq-R, one matrix at a time: every row's RMS becomes the matrix', then the polar step; also of blocks."""
    shapes = [((8, 8), 1), ((24, 8), 3), ((8, 24), 1), ((6, 2, 3, 3), 1)]
    for shape, split in shapes:
        params, gradients = setting([shape], dtype=F64)
        for (g,) in gradients:
            g[0] *= 1e-4  # rows of very different length
            g[-1] = 0  # and one that stays zero
        W = params[0].detach().clone().reshape(shape[0], -1)
        M = torch.zeros_like(W)
        options = {"split": split, "nesterov": nesterov, "orthogonalize_dtype": F64}
        run(Muon(params, lr=0.02, momentum=0.9, equalize="rows", **options), params, gradients)
        for (g,) in gradients:
            g = g.reshape(W.shape)
            M = 0.9 * M + 0.1 * g
            blocks = []
            for U in (0.9 * M + 0.1 * g if nesterov else M).chunk(split):
                rms = U.square().mean(1, keepdim=True).sqrt()
                blocks.append(ns_by_svd(torch.where(rms > 0, U / rms * U.square().mean().sqrt(), 0)))
            W = W - 0.02 * max(1, blocks[0].shape[0] / W.shape[1]) ** 0.5 * torch.cat(blocks)
        torch.testing.assert_close(params[0].detach().reshape(W.shape), W, rtol=1e-6, atol=1e-7)
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        run(Muon(others, lr=0.02, momentum=0.9, **options), others, gradients)
        assert not torch.allclose(others[0], params[0], rtol=0, atol=1e-3)


def test_equal_rows_of_a_stack_and_in_bf16():
    """A stack is as many matrices, and a bf16 stack is rounded once: rows of RMS 1 to bf16's precision."""
    parts, gradients = setting([(12, 6)] * 3, dtype=F64)
    stack = [nn.Parameter(torch.stack([p.detach() for p in parts]))]
    options = {"orthogonalize_dtype": F64, "equalize": "rows"}
    run(Muon(parts, **options), parts, gradients)
    run(Muon(stack, stacked=True, **options), stack, [[torch.stack(g)] for g in gradients])
    torch.testing.assert_close(stack[0].detach(), torch.stack([p.detach() for p in parts]), rtol=1e-12, atol=1e-12)
    rows = equal_rows((1e-6 * torch.randn(4, 64)).bfloat16())
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.double().square().mean(-1), torch.ones(4, dtype=F64), rtol=5e-3, atol=0)


def evened_out(V, S, beta):
    """NorMuon's variance step on one matrix, float64: (update, second moments), by norms of whole matrices."""
    rows, cols = V.shape
    axis = 1 if rows >= cols else 0
    S = beta * S + (1 - beta) * V.square().mean(axis)
    scaled = V / S.clamp_min(1e-10).sqrt().unsqueeze(axis)
    return scaled * (V.norm() / scaled.norm().clamp_min(1e-10)), S


def nor_textbook(weight, gradients, lr, mu, beta, decay, lr_scale, split=1, cautious=True):
    """(weight, second moments of each block) after NorMuon with one lr a step, float64, one matrix at a time."""
    W = weight.detach().double().clone()
    M, S = torch.zeros_like(W), [0.0] * split
    for g, eta in zip(gradients, lr, strict=True):
        g = g.double()
        M = M + (1 - mu) * (g - M)
        u = g + mu * (M - g)
        parts = []
        for j, block in enumerate(u.chunk(split)):
            update, S[j] = evened_out(ns_by_svd(block), S[j], beta)
            parts.append(max(1, block.shape[0] / block.shape[1]) ** 0.5 * update)
        step = eta * lr_scale * torch.cat(parts)
        if cautious:
            shape_factor = max(1, W.shape[0] / split / W.shape[1]) ** 0.5
            shrink = (eta * lr_scale * shape_factor) * (decay * eta) * (step * W >= 0).double()
        else:
            shrink = eta * lr_scale * decay
        W = W - shrink * W - step
    return W, S


@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize(("shape", "split"), [((24, 8), 1), ((8, 8), 1), ((8, 24), 1), ((24, 8), 2), ((12, 8), 3)])
def test_normuon_float64(shape, split, cautious):
    """A stack and separate parameters, rates that change, every option at once."""
    stack, gradients = setting([(3, *shape)], dtype=F64)
    singles = [nn.Parameter(w.clone()) for w in stack[0].detach()]
    rates = [0.02, 0.05, 0.03, 0.01]
    truths = [
        nor_textbook(w, [g[0][i] for g in gradients], rates, 0.9, 0.8, 1.2, 2.0, split, cautious)
        for i, w in enumerate(stack[0])
    ]
    options = {
        "momentum": 0.9, "orthogonalize_dtype": F64, "variance_beta": 0.8, "weight_decay": 1.2, "lr_scale": 2.0,
        "decay": "cautious" if cautious else "plain", "split": split,
    }  # fmt: skip
    bank, apart = Muon(stack, stacked=True, **options), Muon(singles, **options)
    for rate, (gradient,) in zip(rates, gradients, strict=True):
        for optimizer, params, grads in ((bank, stack, [gradient]), (apart, singles, list(gradient))):
            optimizer.param_groups[0]["lr"] = rate
            run(optimizer, params, [grads])
    for i, (truth, moments) in enumerate(truths):
        torch.testing.assert_close(stack[0][i].detach(), truth, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(singles[i].detach(), truth, rtol=1e-8, atol=1e-9)
        ours = bank.state[stack[0]]["second_moment"][i * split : (i + 1) * split]
        torch.testing.assert_close(ours.flatten(1), torch.stack(moments), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_normuon_in_bf16_is_close_to_exact_and_keeps_the_norm(shape):
    params, gradients = setting([shape, shape], steps=1)
    start = copy.deepcopy(params)
    twins = copy.deepcopy(params)
    run(Muon(params, lr=1.0, variance_beta=0.9), params, gradients)
    run(Muon(twins, lr=1.0), twins, gradients)
    for p, q, w, g in zip(params, twins, start, gradients[0], strict=True):
        step, bare = (w - p).detach().double(), (w - q).detach().double()
        truth = w.detach().double() - nor_textbook(w, [g], [1.0], 0.95, 0.9, 0.0, 1.0)[0]
        assert (step - truth).norm() / truth.norm() < 2e-2
        assert abs(step.norm() / bare.norm() - 1) < 1e-2
        lengths = step.norm(dim=1 if shape[0] >= shape[1] else 0)  # the first step makes them equal
        assert lengths.max() / lengths.min() < 1.02


def test_variance_state_can_be_cut_between_matrices():
    """The first axis counts matrices as the stack stores them: a shard's state is a slice of the whole."""
    assert variance_shape((5, 12, 4), 3, stacked=True) == (15, 4, 1)
    assert variance_shape((5, 12, 9), 3, stacked=True) == (15, 1, 9)
    assert variance_shape((12, 4)) == (1, 12, 1)
    assert variance_shape((6, 2, 3, 3), 2) == (2, 1, 18)
    options = {"stacked": True, "split": 2, "variance_beta": 0.9, "orthogonalize_dtype": F64}
    stack, gradients = setting([(4, 6, 5)], dtype=F64)
    whole = Muon(stack, **options)
    run(whole, stack, gradients[:2])
    shard = [nn.Parameter(stack[0].detach()[1:3].clone())]
    part = Muon(shard, **options)
    run(part, shard, [[torch.zeros(2, 6, 5)]])
    for name, value in whole.state[stack[0]].items():
        each = 2 if name == "second_moment" else 1
        part.state[shard[0]][name] = value[1 * each : 3 * each].clone()
    shard[0].data.copy_(stack[0].detach()[1:3])
    run(whole, stack, gradients[2:])
    run(part, shard, [[g[0][1:3]] for g in gradients[2:]])
    torch.testing.assert_close(shard[0], stack[0][1:3], rtol=1e-10, atol=1e-12)


def test_zero_gradients_with_variance():
    """A padding matrix: no update, nothing infinite, and decay though the step is zero."""
    params, _ = setting([(4, 4)], dtype=F64)
    before = params[0].detach().clone()
    run(Muon(params, lr=0.1, variance_beta=0.9, weight_decay=0.5, decay="cautious"), params, [[torch.zeros(4, 4)]] * 2)
    torch.testing.assert_close(params[0].detach(), before * (1 - 0.1**2 * 0.5) ** 2, rtol=1e-12, atol=0)


def test_single_row_trap():
    """Evened out along columns of one entry, a row loses all but its signs: gates do not belong into this rule."""
    params, gradients = setting([(1, 9)], steps=1, dtype=F64)
    start = params[0].detach().clone()
    run(Muon(params, lr=1.0, variance_beta=0.9, orthogonalize_dtype=F64), params, gradients)
    step = start - params[0].detach()
    torch.testing.assert_close(step, step.abs().mean() * gradients[0][0].sign(), rtol=1e-9, atol=0)


@pytest.fixture
def as_it_is(monkeypatch):
    """An orthogonaliser that does nothing, so that steps can be chosen by hand."""
    monkeypatch.setitem(polar.ORTHOGONALIZERS, "as_it_is", lambda G, dtype: G.to(dtype))
    return {"orthogonalizer": "as_it_is", "orthogonalize_dtype": F64, "momentum": 0.0}


def test_cautious_decay_by_hand(as_it_is):
    """Four weights: moved toward zero, away from it, not at all (which counts here), and toward zero from below."""
    p = nn.Parameter(torch.tensor([[2.0, 2.0], [2.0, -2.0]], dtype=F64))
    gradient = torch.tensor([[1.0, -1.0], [0.0, -1.0]], dtype=F64)
    run(Muon([p], lr=0.1, weight_decay=5.0, decay="cautious", **as_it_is), [p], [[gradient]])
    shrink = 0.1**2 * 5.0 * 2.0
    truth = torch.tensor([[1.9 - shrink, 2.1], [2.0 - shrink, -1.9 + shrink]], dtype=F64)
    torch.testing.assert_close(p.detach(), truth, rtol=1e-12, atol=0)


def test_powers_of_the_rate_in_decay(as_it_is):
    """Cautious: lr^2, the first power of lr_scale and of the shape's factor. Plain: first powers and no factor."""

    def taken(shape=(2, 2), **options):
        p = nn.Parameter(torch.ones(shape, dtype=F64))
        run(Muon([p], weight_decay=0.5, **options, **as_it_is), [p], [[torch.zeros(shape)]])
        return 1 - p.detach()[0, 0].item()

    for decay, by_lr, by_shape in (("plain", 2, 1), ("cautious", 4, 2)):
        once = taken(lr=0.01, decay=decay)
        assert once > 0
        assert taken(lr=0.02, decay=decay) == pytest.approx(by_lr * once)
        assert taken(lr=0.01, lr_scale=2.0, decay=decay) == pytest.approx(2 * once)
        assert taken(lr=0.01, decay=decay, shape=(8, 2)) == pytest.approx(by_shape * once)
    p = nn.Parameter(torch.ones(2, 2, dtype=F64))
    run(Muon([p], lr=0.1, lr_scale=3.0, **as_it_is), [p], [[torch.ones(2, 2)]])
    torch.testing.assert_close(p.detach(), torch.full((2, 2), 0.7, dtype=F64))


ALL = {"variance_beta": 0.9, "weight_decay": 0.5, "decay": "cautious", "lr_scale": 2.0, "mantissa": True}


def test_state_dict_round_trip_with_all_options(tmp_path):
    params, gradients = setting([(8, 4), (4, 8)], steps=6, dtype=torch.bfloat16)
    optimizer = Muon(params, **ALL)
    run(optimizer, params, gradients[:3])
    torch.save((params, optimizer.state_dict()), tmp_path / "state.pt")
    run(optimizer, params, gradients[3:])
    with torch.serialization.safe_globals([nn.Parameter]):
        twins, saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = Muon(twins, lr=7.0, **ALL)
    resumed.load_state_dict(saved)
    run(resumed, twins, gradients[3:])
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
        for name, dtype in (("exp_avg", None), ("second_moment", None), ("mantissa", torch.int16)):
            assert resumed.state[q][name].dtype == (dtype or torch.float32)
            assert torch.equal(resumed.state[q][name], optimizer.state[p][name])


def test_options_of_a_recipe_arrive():
    """From `ParamGroup` and its rule to what the optimizers read; rules with one rate get the product."""
    bank = {"role": "a", "lr": 0.02, "lr_scale": 3.0, "weight_decay": 1.2}
    rules = {
        "muon": MuonConfig(variance_beta=0.9, decay="cautious", equalize="rows"),
        "adam": AdamConfig(eps_form="uncorrected", decay="cautious"),
        "soap": SoapConfig(),
    }
    stack = torch.zeros(1, 4, 4, dtype=torch.bfloat16)
    groups = {
        name: _optimizer(
            ParamGroup(rule=rule, storage="bf16+16" if name == "muon" else "bf16", **bank),
            [stack if name == "muon" else stack[0]],
            Precision(),
        ).param_groups[0]
        for name, rule in rules.items()
    }
    for name in ("muon", "adam"):
        assert (groups[name]["lr"], groups[name]["base_lr"], groups[name]["lr_scale"]) == (0.02, 0.02, 3.0)
        assert groups[name]["decay"] == "cautious"
    assert (groups["muon"]["variance_beta"], groups["muon"]["mantissa"]) == (0.9, True)
    assert groups["muon"]["equalize"] == "rows"
    assert groups["adam"]["eps_form"] == "uncorrected"
    assert groups["soap"]["lr"] == groups["soap"]["base_lr"] == pytest.approx(0.06)
    with pytest.raises(ValueError, match=r"storage='bf16\+16' of role 'a' needs MuonConfig"):
        _optimizer(ParamGroup(rule=rules["adam"], storage="bf16+16", **bank), [stack[0]], Precision())


def test_options_may_come_later():
    params, gradients = setting([(6, 6)], dtype=torch.bfloat16)
    optimizer = Muon(params)
    run(optimizer, params, gradients[:1])
    optimizer.param_groups[0].update(ALL)
    run(optimizer, params, gradients[1:])
    assert optimizer.state[params[0]]["mantissa"].any()
    assert (optimizer.state[params[0]]["second_moment"] > 0).all()


def test_compiled_step_with_all_options_is_one_graph():
    torch._dynamo.reset()
    params, gradients = setting([(3, 8, 4), (3, 4, 8)], dtype=torch.bfloat16)
    twins = copy.deepcopy(params)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    options = {"stacked": True, "orthogonalize_dtype": torch.float32, **ALL}
    rates = [torch.tensor(0.02), torch.tensor(0.02)]
    ours, theirs = Muon(params, lr=rates[0], **options), Muon(twins, lr=rates[1], **options)
    step = torch.compile(ours.step, backend=graphs)
    for t, gradient in enumerate(gradients):
        for rate, optimizer, group in zip(rates, (ours, theirs), (params, twins), strict=True):
            rate.fill_(0.02 / (t + 1))
            for p, g in zip(group, gradient, strict=True):
                p.grad = g.clone()
            (step if optimizer is ours else theirs.step)()
    assert graphs.frame_count == 1
    for p, q in zip(params, twins, strict=True):
        masters = [join(x.detach(), o.state[x]["mantissa"]) for x, o in ((p, ours), (q, theirs))]
        torch.testing.assert_close(*masters, rtol=1e-5, atol=1e-6)


def test_user_mistakes():
    matrix = [nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(ValueError, match=r"variance_beta=1\.0"):
        Muon(matrix, variance_beta=1.0)
    with pytest.raises(ValueError, match=r"decay='bold'.*plain, cautious"):
        Muon(matrix, decay="bold")
    with pytest.raises(ValueError, match=r"mantissa=True needs bf16.*float32"):
        Muon(matrix, mantissa=True)
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
