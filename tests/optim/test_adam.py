import copy

import pytest
import torch
from torch import nn

from nanosprint.optim import AdamW
from nanosprint.optim.adam import adamw_

SHAPES = [(5, 7), (3,), (), (2, 3, 4), (1, 9)]
IMPLEMENTATIONS = ["foreach", "fused"]


def parameters(dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def textbook(weights, gradients, steps, lr, betas, eps, decay, uncorrected):
    """float64, written from the papers; gradients[t] is the list of step t."""
    weights = [w.detach().double().clone() for w in weights]
    m, v = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    b1, b2 = betas
    for t in range(1, steps + 1):
        for i, g in enumerate(gradients[t - 1]):
            g = g.double()
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            weights[i] = weights[i] * (1 - lr * decay)
            if uncorrected:
                weights[i] -= lr * (1 - b2**t) ** 0.5 / (1 - b1**t) * m[i] / (v[i].sqrt() + eps)
            else:
                weights[i] -= lr * (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + eps)
    return weights


def run(optimizer, params, gradients):
    for gradient in gradients:
        for p, g in zip(params, gradient, strict=True):
            p.grad = None if g is None else g.to(p.dtype).clone()
        optimizer.step()


def random_gradients(steps, scale=1.0):
    return [[scale * torch.randn(shape) for shape in SHAPES] for _ in range(steps)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("uncorrected", [False, True])
def test_textbook_float64(implementation, uncorrected):
    params, gradients = parameters(torch.float64), random_gradients(12, scale=1e-4)
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5}
    truth = textbook(params, gradients, 12, *options.values(), 0.1, uncorrected)
    eps_form = "uncorrected" if uncorrected else "corrected"
    optimizer = AdamW(params, **options, weight_decay=0.1, eps_form=eps_form, implementation=implementation)
    run(optimizer, params, gradients)
    for p, w in zip(params, truth, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_torch(implementation):
    params, gradients = parameters(), random_gradients(20)
    twins = copy.deepcopy(params)
    run(AdamW(params, lr=0.01, weight_decay=0.1, implementation=implementation), params, gradients)
    run(torch.optim.AdamW(twins, lr=0.01, weight_decay=0.1), twins, gradients)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("uncorrected", [False, True])
def test_cautious_decay_float64(uncorrected):
    """w - u - l^2 wd [u w > 0] w with l = lr lr_scale, for many steps of changing lr."""
    params, gradients = parameters(torch.float64), random_gradients(12)
    eps, decay, scale, (b1, b2) = 1e-2, 30.0, 3.0, (0.5, 0.95)
    weights = [p.detach().clone() for p in params]
    m, v = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    optimizer = AdamW(
        params, betas=(b1, b2), eps=eps, weight_decay=decay, decay="cautious", lr_scale=scale,
        eps_form="uncorrected" if uncorrected else "corrected",
    )  # fmt: skip
    for t in range(1, 13):
        lr = 0.05 / t
        optimizer.param_groups[0]["lr"] = lr
        run(optimizer, params, [gradients[t - 1]])
        for i, g in enumerate(gradients[t - 1]):
            g = g.double()
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            if uncorrected:
                u = scale * lr * (1 - b2**t) ** 0.5 / (1 - b1**t) * m[i] / (v[i].sqrt() + eps)
            else:
                u = scale * lr * (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + eps)
            shrinks = (u * weights[i] > 0).double()
            weights[i] = weights[i] - u - (scale * lr) ** 2 * decay * shrinks * weights[i]
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


def test_cautious_decay_by_hand():
    """Four weights: moved toward zero, away from it, not at all, and toward zero from below. Only steps of lr count."""
    p = nn.Parameter(torch.tensor([2.0, 2.0, 2.0, -2.0], dtype=torch.float64))
    p.grad = torch.tensor([1.0, -1.0, 0.0, -1.0], dtype=torch.float64)
    AdamW([p], lr=0.1, eps=1e-30, weight_decay=5.0, decay="cautious").step()
    shrink = 0.1**2 * 5.0 * 2.0
    truth = torch.tensor([1.9 - shrink, 2.1, 2.0, -1.9 + shrink], dtype=torch.float64)
    torch.testing.assert_close(p.detach(), truth, rtol=1e-12, atol=0)


def test_powers_of_the_rate_in_decay():
    """What decay takes off: lr^2 and lr_scale^2 if cautious, the first powers if plain."""

    def taken(**options):
        ends = []
        for decay in (0.0, 0.5):
            p = nn.Parameter(torch.ones(1, dtype=torch.float64))
            p.grad = torch.ones_like(p)
            AdamW([p], weight_decay=decay, **options).step()
            ends.append(p.item())
        return ends[0] - ends[1]

    for decay, factor in (("plain", 2), ("cautious", 4)):
        once = taken(lr=0.01, decay=decay)
        assert once > 0
        assert taken(lr=0.02, decay=decay) == pytest.approx(factor * once)
        assert taken(lr=0.01, lr_scale=2.0, decay=decay) == pytest.approx(factor * once)


def test_every_other_step_sees_the_sum_of_two_gradients():
    params, gradients = parameters(torch.float64), random_gradients(20)
    options = {"lr": 0.01, "betas": (0.75, 0.95), "eps": 1e-10}
    sums = [[a + b for a, b in zip(*gradients[t : t + 2], strict=True)] for t in range(0, 20, 2)]
    truth = textbook(params, sums, 10, *options.values(), 0.0, True)
    optimizer = AdamW(params, **options, weight_decay=0.0, eps_form="uncorrected")
    for t, gradient in enumerate(gradients):
        for p, g in zip(params, gradient, strict=True):
            (p * g).sum().backward()
        if t % 2:
            optimizer.step()
            optimizer.zero_grad()
    for p, w in zip(params, truth, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-7, atol=1e-9)


def test_defaults_are_torchs():
    ours, theirs = AdamW(parameters()).defaults, torch.optim.AdamW(parameters()).defaults
    assert {k: theirs[k] for k in ("lr", "betas", "eps", "weight_decay")} == {
        k: ours[k] for k in ("lr", "betas", "eps", "weight_decay")
    }


def test_bf16_parameters_have_fp32_state_and_are_rounded_once():
    params, gradients = parameters(torch.bfloat16), random_gradients(1)
    before = [p.detach().float() for p in params]
    rounded = [[g.bfloat16() for g in gradients[0]]]
    truth = textbook(before, rounded, 1, 0.1, (0.9, 0.999), 1e-8, 0.01, False)
    optimizer = AdamW(params, lr=0.1)
    run(optimizer, params, gradients)
    for p, w in zip(params, truth, strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(p.detach(), w.float().bfloat16())


def test_mixed_gradient_presence_counts_steps_per_parameter():
    params, gradients = parameters(), random_gradients(6)
    for step, gradient in enumerate(gradients):
        if step % 2:
            gradient[0] = None
    twins = copy.deepcopy(params)
    optimizer = AdamW(params, lr=0.01)
    run(optimizer, params, gradients)
    run(torch.optim.AdamW(twins, lr=0.01), twins, gradients)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert [int(optimizer.state[p]["step"]) for p in params[:2]] == [3, 6]
    for p in params:
        p.grad = None
    optimizer.step()  # nothing to do is no error


def test_zero_gradient_moves_nothing_but_decay():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    AdamW([p], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.95))


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_lr_schedulers_and_tensor_lr(lr):
    params, gradients = parameters(), random_gradients(5)
    twins = copy.deepcopy(params)
    ours, theirs = AdamW(params, lr=lr), torch.optim.AdamW(twins, lr=0.01)
    for optimizer, group in ((ours, params), (theirs, twins)):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for gradient in gradients:
            run(optimizer, group, [gradient])
            scheduler.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_rule_takes_tensors_for_step_and_lr():
    a, b = parameters(), None
    b = copy.deepcopy(a)
    grads = [torch.randn_like(p) for p in a]
    for params, step, lr in ((a, 3, 0.1), (b, torch.tensor(3.0), torch.tensor(0.1))):
        m, v = [torch.full_like(p, 0.5) for p in params], [torch.full_like(p, 0.5) for p in params]
        with torch.no_grad():
            adamw_(params, grads, m, v, step=step, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q)


def test_torch_state_dict_loads():
    """Same names and meaning of state: a run begun with torch's AdamW can go on with this one."""
    params, gradients = parameters(), random_gradients(4)
    twins = copy.deepcopy(params)
    theirs = torch.optim.AdamW(twins, lr=0.01)
    run(theirs, twins, gradients[:2])
    for p, q in zip(params, twins, strict=True):
        p.data.copy_(q)
    ours = AdamW(params, lr=0.5)
    ours.load_state_dict(theirs.state_dict())
    run(ours, params, gradients[2:])
    run(theirs, twins, gradients[2:])
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_user_mistakes():
    p = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"lr=-1"):
        AdamW(p, lr=-1)
    with pytest.raises(ValueError, match=r"betas\[1\]=1.0"):
        AdamW(p, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="eps=-1"):
        AdamW(p, eps=-1)
    with pytest.raises(ValueError, match=r"eps_form='none'.*corrected, uncorrected"):
        AdamW(p, eps_form="none")
    with pytest.raises(TypeError, match="maximize"):
        AdamW(p, maximize=True)
    with pytest.raises(ValueError, match="no option 'maximize'"):
        AdamW([{"params": p, "maximize": True}])
    with pytest.raises(ValueError, match="did you mean 'weight_decay'"):
        AdamW([{"params": p, "weight_decy": 0.1}])
    with pytest.raises(ValueError, match=r"decay='bold'.*plain, cautious"):
        AdamW(p, decay="bold")
    with pytest.raises(ValueError, match="lr_scale=-1"):
        AdamW(p, lr_scale=-1)
    p[0].grad = torch.ones_like(p[0])
    with pytest.raises(ValueError, match=r"implementation='fused'.*decay='cautious'"):
        AdamW(p, decay="cautious", implementation="fused").step()
    half = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    half[0].grad = torch.ones_like(half[0])
    with pytest.raises(ValueError, match="implementation='fused' needs fp32"):
        AdamW(half, implementation="fused").step()


def test_sparse_gradient_is_refused():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        AdamW(table.parameters()).step()


def test_foreign_keys_travel_and_a_refused_group_leaves_nothing():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdamW([{"params": [p], "base_lr": 3.0, "name": "gains"}])
    assert optimizer.param_groups[0]["base_lr"] == 3.0
    with pytest.raises(ValueError, match="lr=-2"):
        optimizer.add_param_group({"params": [q], "lr": -2.0})
    assert len(optimizer.param_groups) == 1
