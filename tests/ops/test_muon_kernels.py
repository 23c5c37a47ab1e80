"""Muon's one-pass kernels against the lists of operations that they replace."""

import copy

import pytest
import torch

from nanosprint.optim import Muon
from nanosprint.optim import muon as rule
from nanosprint.optim.adam import adamw_, adamw_triton_
from nanosprint.optim.mantissa import join
from tests.ops.counted import Counted

SHAPES = [(256, 768), (256, 768), (768, 256), (33, 50), (1, 9), (6, 2, 3, 3), (300, 257)]


def needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def train(optimizer, params, gradients):
    for gradient in gradients:
        for p, g in zip(params, gradient, strict=True):
            p.grad = g.clone()
        optimizer.step()


OPTIONS = {
    "plain": {},
    "simple momentum": {"nesterov": False},
    "polar express": {"orthogonalizer": "polar_express"},
    "equal rows": {"equalize": "rows"},
    "evened out": {"variance_beta": 0.9},
    "cautious": {"decay": "cautious", "lr_scale": 2.0},
    "all": {"orthogonalizer": "polar_express", "variance_beta": 0.9, "decay": "cautious", "mantissa": True},
    "all and equal rows": {"equalize": "rows", "variance_beta": 0.9, "decay": "cautious", "mantissa": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stacked", [False, True])
def test_fused_step_equals_plain_step(monkeypatch, dtype, options, stacked):
    needs_gpu()
    options = {"lr": 0.1, "weight_decay": 0.1, "stacked": stacked, **OPTIONS[options]}
    if options.get("mantissa") and dtype != torch.bfloat16:
        pytest.skip("lower halves belong to bf16 parameters")
    shapes = [(5, *s) for s in SHAPES if len(s) == 2] if stacked else SHAPES
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device="cuda").to(dtype)) for s in shapes]
    gradients = [[torch.randn(s, device="cuda").to(dtype) for s in shapes] for _ in range(3)]
    twins, start = copy.deepcopy(params), copy.deepcopy(params)
    ours = Muon(params, **options)
    versions = [p._version for p in params]
    train(ours, params, gradients)
    assert all(p._version > v for p, v in zip(params, versions, strict=True))
    monkeypatch.setattr(rule, "_fusible", lambda *_: False)
    plain = Muon(twins, **options)
    train(plain, twins, gradients)
    for p, q, w in zip(params, twins, start, strict=True):
        for name, tolerance in (("exp_avg", 1e-5), ("second_moment", 2e-2)):
            if name in ours.state[p]:
                m, n = ours.state[p][name], plain.state[q][name]
                torch.testing.assert_close(m, n, rtol=tolerance, atol=0.1 * tolerance)
        assert (p - q).float().norm() / (q - w).float().norm() < (1e-2 if dtype == torch.float32 else 5e-2)


@pytest.mark.gpu
def test_tensors_that_cannot_be_fused_take_the_plain_way():
    """Not contiguous, or at an odd address."""
    needs_gpu()
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 32, device="cuda")) for _ in range(2)]
    twins = copy.deepcopy(params)
    gradients = [torch.randn(64, 32, device="cuda") for _ in range(2)]
    for p, q, g in zip(params, twins, gradients, strict=True):
        q.grad = g.clone()
        p.grad = g.T.contiguous().T if p is params[0] else torch.cat([g.new_zeros(1), g.flatten()])[1:].view(64, 32)
    Muon(params).step()
    Muon(twins).step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_kernel_logic_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def interpreted():
    torch.manual_seed(0)
    momentum_kernel()
    equal_rows_kernel()
    variance_kernels()
    apply_kernel()
    adam_kernel()
    adam_together()
    quantize_kernel()


def lists(shape, count=3):
    return [torch.randn(shape) for _ in range(count)]


def momentum_kernel():
    from nanosprint.kernels import muon

    for shape, count in [((37, 53), 3), ((1, 1), 2), ((64, 64), 1), ((5, 20, 30), 1)]:
        for nesterov, momentum in ((True, 0.95), (False, 0.95), (True, 0.25), (True, 0.0)):
            grads, averages = lists(shape, count), lists(shape, count)
            plain = [t.clone() for t in averages]
            assert muon.can_fuse(grads, averages)
            stack = torch.full((count, *shape), torch.nan)
            muon.momentum_stack(averages, grads, momentum, nesterov, stack)
            directions = rule.momentum_(plain, grads, momentum, nesterov)
            torch.testing.assert_close(averages, plain, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(list(stack), list(directions), rtol=1e-5, atol=1e-6)


def equal_rows_kernel():
    """Rows narrower and wider than a program, one of zeros, one too small for its squares."""
    from nanosprint.kernels import muon

    for shape, count in [((37, 53), 3), ((1, 1), 2), ((64, 64), 1), ((5, 20, 30), 1), ((3, 3000), 2), ((2, 4097), 1)]:
        for nesterov in (True, False):
            grads, averages = lists(shape, count), lists(shape, count)
            for scale, row in ((0.0, 0), (1e-19, -1)):
                if len(shape) == 2 and shape[0] > 1:
                    grads[0][row] *= scale
                    averages[0][row] *= scale
            plain = [t.clone() for t in averages]
            stack = torch.full((count, *shape), torch.nan)
            muon.momentum_stack(averages, grads, 0.9, nesterov, stack, shape[-1])
            expected = torch.empty_like(stack)
            rule._directions(plain, grads, 0.9, nesterov, expected, shape[-1])
            torch.testing.assert_close(averages, plain, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(stack, expected, rtol=1e-5, atol=1e-6)


def variance_kernels():
    from nanosprint.kernels import muon

    for shape in [(2, 37, 53), (3, 53, 37), (1, 1, 1), (2, 64, 64), (1, 1100, 3), (1, 3, 1100), (2, 1, 9)]:
        updates = torch.randn(shape)
        updates[-1, 0] = 0  # a row that stays zero
        ours = torch.rand(rule.variance_shape(shape, stacked=True))
        theirs = ours.clone()
        factors = muon.variance_factors(updates, ours, 0.9)
        torch.testing.assert_close(factors, rule.variance_factors(updates, theirs, 0.9), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    zero = torch.zeros(2, 8, 4)
    assert not muon.variance_factors(zero, torch.zeros(2, 8, 1), 0.9).any()


def apply_kernel():
    """Lists and banks, blocks within a tensor, rows and columns, every kind of decay and of parameter."""
    from nanosprint.kernels import muon

    for shape, split, stacked, count in [
        ((37, 53), 1, False, 3), ((24, 10), 2, False, 3), ((12, 50), 3, False, 2), ((4, 24, 10), 2, True, 1),
        ((5, 12, 50), 3, True, 1), ((3, 6, 41), 1, True, 2), ((1, 1), 1, False, 1), ((2, 3, 40, 31), 1, False, 1),
    ]:  # fmt: skip
        matrix = rule.matrix_shape(shape, split, stacked)
        size = torch.Size(shape).numel() * count // (matrix[0] * matrix[1])
        updates = torch.randn(size, *matrix)
        updates[0, 0, 0] = 0  # counts as a step toward zero
        kept = (size, matrix[0], 1) if matrix[0] >= matrix[1] else (size, 1, matrix[1])
        for factors in (None, torch.rand(kept)):
            for cautious in (False, True):
                for kind in ("fp32", "bf16", "bf16+16"):
                    params, lows = lists(shape, count), None
                    if kind != "fp32":
                        params = [p.bfloat16() for p in params]
                    if kind == "bf16+16":
                        lows = [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16) for _ in params]
                    plain = [None if x is None else [t.clone() for t in x] for x in (params, lows)]
                    assert muon.can_fuse(*(x for x in (params, lows, [updates]) if x is not None))
                    muon.apply_stack(params, updates, 0.1, 0.3, cautious=cautious, factors=factors, lows=lows)
                    rule._apply_(*plain, updates, factors, 0.1, 0.3, cautious, torch.float32, None)
                    if lows is not None:
                        params, plain[0] = ([join(*x) for x in zip(*y, strict=True)] for y in ((params, lows), plain))
                    tolerance = 8e-3 if kind == "bf16" else 2e-6  # a bf16 step where a sum falls on its middle
                    torch.testing.assert_close(params, plain[0], rtol=tolerance, atol=1e-6)


def adam_kernel():
    for size in (1, 3000, 4096):
        for decay in ("plain", "cautious"):
            for eps_form in ("corrected", "uncorrected"):
                for dtype in (torch.float32, torch.bfloat16):
                    params, grads = ([t.to(dtype) for t in lists(size, 2)] for _ in range(2))
                    averages, squares = lists(size, 2), [t.square() for t in lists(size, 2)]
                    grads[0][0] = averages[0][0] = squares[0][0] = 0
                    twins = [[t.clone() for t in x] for x in (params, grads, averages, squares)]
                    options = {
                        "step": 3, "lr": 0.1, "betas": (0.5, 0.95), "eps": 1e-10, "weight_decay": 0.9,
                        "decay": decay, "eps_form": eps_form,
                    }  # fmt: skip
                    adamw_triton_(params, grads, averages, squares, **options)
                    adamw_(*twins, **options)
                    tolerance = 8e-3 if dtype == torch.bfloat16 else 2e-6
                    torch.testing.assert_close(params, twins[0], rtol=tolerance, atol=1e-6)
                    torch.testing.assert_close([averages, squares], twins[2:], rtol=2e-6, atol=1e-6)


def adam_together():
    """Optimizers of other rates, memories and dtypes in a launch for each kind, bit for bit as one by one."""
    from nanosprint.kernels import adam as kernels
    from nanosprint.optim import adam

    adam._takes_triton = lambda batch: kernels.can_fuse(*batch)
    one, every = kernels._adam_kernel, kernels._adam_all_kernel
    kernels._adam_kernel, kernels._adam_all_kernel = Counted(one), Counted(every)
    groups = [
        ((3000, 1), 0.1, (0.9, 0.99)), ((5,), 0.3, (0.5, 0.95)), ((2049,), 1e-3, (0.9, 0.95)),
        ((0, 7), 0.1, (0.9, 0.9)),
    ]  # fmt: skip
    ends = []
    for together in (True, False):
        torch.manual_seed(1)
        optimizers = []
        for i, (sizes, lr, betas) in enumerate(groups):
            dtype = torch.bfloat16 if i % 2 else torch.float32
            params = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
            options = {"eps": 1e-10, "eps_form": "uncorrected", "decay": "cautious", "weight_decay": 0.5 * i}
            optimizers.append(adam.AdamW(params, lr=lr, betas=betas, **options))
        Counted.launches = 0
        for _ in range(3):
            for optimizer in optimizers:
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = torch.randn_like(param)
            if together:
                adam.step_together(optimizers)
            for optimizer in () if together else optimizers:
                optimizer.step()
        assert Counted.launches == 3 * (2 if together else 5), Counted.launches  # kinds; tensors with anything in them
        held = [(p, o.state[p]) for o in optimizers for p in o.param_groups[0]["params"]]
        ends.append([t for p, state in held for t in (p.detach(), *state.values())])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    kernels._adam_kernel, kernels._adam_all_kernel = one, every


def quantize_kernel():
    from nanosprint.kernels import fp8

    for rows, cols, padded in [(50, 200, 64), (128, 128, 128), (1, 16, 16), (130, 3, 144)]:
        x = 3 * torch.randn(rows, cols)
        x[0, 1] = float("nan")
        out, turned = torch.full((rows, cols), -7.0), torch.full((cols, padded), -7.0)
        expected = (0.5 * x).clamp(-1, 1)
        fp8.quantize(x, out, turned, 0.5, 1.0)
        torch.testing.assert_close(out, expected, equal_nan=True)
        torch.testing.assert_close(turned[:, :rows], expected.T, equal_nan=True)
        assert not turned[:, rows:].any()
        alone = torch.full_like(out, -7.0)
        fp8.quantize(x, alone, None, 0.5, 1.0)
        torch.testing.assert_close(alone, out, equal_nan=True)


if __name__ == "__main__":
    interpreted()
