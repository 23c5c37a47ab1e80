"""Squared ReLU behind a product, forward and backward; the kernels' logic runs here too, in Triton's interpreter."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from nanosprint.kernels import tuning
from nanosprint.ops import fp8, linear_relu2
from nanosprint.ops.linear_relu2 import relu2_grad, relu2_grad_turned, relu2_mlp, up_relu2, up_relu2_turned
from tests.ops.gluon_on_cpu import Machine, Pointer, Values, load_module
from tests.ops.test_fp8 import relative

LAYOUTS = [False, True]
ROUTES = ["fused", "resident", "pass"]
SIZES = [(300, 64, 208), (1, 16, 48), (1000, 768, 3072), (33, 50, 77), (256, 768, 256)]  # T, D, F
FP8_SIZES = [size for size in SIZES if size[1] % 16 == size[2] % 16 == 0]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def route(request, monkeypatch):
    """All kinds computed by one kernel, or none, on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "resident" and not (torch.cuda.get_device_capability() == (9, 0) and linear_relu2.has_gluon()):
        pytest.skip("needs a Hopper GPU and the Triton that the kernel is written for")
    everything, nothing = frozenset(tuning.RELU2_TILES), frozenset()
    monkeypatch.setattr(tuning, "FUSED_RELU2", nothing if request.param == "pass" else everything)
    monkeypatch.setattr(tuning, "RESIDENT_RELU2", everything if request.param == "resident" else nothing)
    monkeypatch.setattr(tuning, "MEASURED", (torch.cuda.get_device_capability(),))
    return request.param


def case(T, D, F, in_out, dtype, device="cpu"):
    shapes = ((T, D), (F, D), (F, D) if in_out else (D, F), (T, D))
    return [(torch.randn(s, dtype=torch.float64) / s[-1] ** 0.5).to(device, dtype) for s in shapes]


@pytest.mark.parametrize("in_out", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_equals_the_formula_and_its_gradients(in_out, dtype, tolerance):
    x, up, down, g = case(21, 12, 40, in_out, dtype)
    inputs = [t.requires_grad_() for t in (x, up, down)]
    y = relu2_mlp(x.view(3, 7, 12), up, down, in_out=in_out)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = (wide[0] @ wide[1].mT).relu().square() @ (wide[2] if in_out else wide[2].mT)
    assert y.dtype == dtype
    assert relative(y.view(21, 12), truth) < tolerance
    grads = torch.autograd.grad(y, inputs, g.view(3, 7, 12))
    for got, expected, like in zip(grads, torch.autograd.grad(truth, wide, g.double()), inputs, strict=True):
        assert (got.dtype, got.shape) == (like.dtype, like.shape)
        assert relative(got, expected) < tolerance


def test_weights_in_fp32_have_gradients_in_fp32():
    x, up, down, _ = case(8, 16, 32, True, torch.float32)
    up.requires_grad_(), down.requires_grad_()
    relu2_mlp(x.bfloat16(), up, down, in_out=True).sum().backward()  # an expanded gradient
    assert up.grad.dtype == down.grad.dtype == torch.float32


@pytest.mark.parametrize("in_out", LAYOUTS)
def test_one_node_each_way(in_out):
    nodes = []

    def backend(graph, _):
        nodes.append(sorted(str(n.target) for n in graph.graph.nodes if "nanosprint" in str(n.target)))
        return make_boxed_func(graph.forward)

    x, up, down, g = (t.requires_grad_() for t in case(24, 16, 32, in_out, torch.float32))
    compiled = torch.compile(relu2_mlp, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    y = compiled(x, up, down, in_out=in_out)
    got = torch.autograd.grad(y, (x, up, down), g)
    for a, b in zip(got, torch.autograd.grad(relu2_mlp(x, up, down, in_out=in_out), (x, up, down), g), strict=True):
        torch.testing.assert_close(a, b)
    assert nodes == [["nanosprint.relu2_mlp.default"], ["nanosprint.relu2_mlp_backward.default"]]


def test_opcheck():
    for in_out in LAYOUTS:
        x, up, down, g = (t.requires_grad_() for t in case(24, 16, 32, in_out, torch.float32))
        torch.library.opcheck(torch.ops.nanosprint.relu2_mlp.default, (x, up, down, in_out))
        inputs = (g.detach(), x.detach(), torch.rand(24, 32), up.detach(), down.detach(), in_out)
        torch.library.opcheck(torch.ops.nanosprint.relu2_mlp_backward.default, inputs)


def test_user_mistakes():
    x, up, down, _ = case(4, 16, 32, True, torch.float32)
    with pytest.raises(ValueError, match=r"down \(32, 16\) do not fit: .*\(D, F\)"):
        relu2_mlp(x, up, down)
    with pytest.raises(ValueError, match=r"x \(4, 8\)"):
        relu2_mlp(x[:, :8], up, down, in_out=True)


def test_not_for_a_cpu():
    assert not linear_relu2.pays("cpu")


def test_which_weights_stay_in_shared_memory():
    fp8, bf16 = tuning.RELU2_RESIDENT["up8"], tuning.RELU2_RESIDENT["up"]
    assert fp8.fits((3072, 768), 1)
    assert fp8.fits((256, 128), 1)
    assert bf16.fits((3072, 768), 2)
    assert not fp8.fits((3072, 896), 1)  # 224 KiB and the ring
    assert not fp8.fits((3072 + 128, 768), 1)
    assert not fp8.fits((3072, 768 + 64), 1)
    assert not fp8.fits((3072, 768), 2)


def test_the_kernel_that_keeps_weights_is_taken_where_it_is_named_and_they_fit(monkeypatch):
    taken = []
    for name, function in (("linear_relu2_resident", "relu2_resident"), ("linear_relu2", "relu2_product")):
        fake = SimpleNamespace(**{function: lambda *_, function=function, **__: taken.append(function)})
        monkeypatch.setitem(sys.modules, f"nanosprint.kernels.{name}", fake)
    monkeypatch.setattr(linear_relu2, "has_gluon", lambda: True)
    monkeypatch.setattr(linear_relu2, "_capability", lambda _: (9, 0))
    monkeypatch.setattr(tuning, "RESIDENT_RELU2", frozenset(("up8",)))
    codes, odd = (torch.zeros(rows, 768, dtype=fp8.E4M3) for rows in (512, 528))
    for kind, B, turned in (("up8", codes, False), ("up8", odd, False), ("dpre8", codes, False), ("up8", codes, True)):
        linear_relu2._fused(kind, codes, B, codes, turned)
    assert taken == ["relu2_resident"] + 3 * ["relu2_product"]


def test_rows_of_weights_come_in_the_order_that_gives_a_thread_eight_neighbours():
    five_axes = pytest.importorskip("nanosprint.kernels.linear_relu2_resident").five_axes
    A, B = torch.randn(3, 16), torch.randn(96, 16)
    fetched = B.as_strided(*five_axes(96, 16)).reshape(96, 16)
    assert not torch.equal(fetched, B)
    product = A @ fetched.mT
    in_order = product.reshape(3, 3, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(3, 96)  # as `_take_turns` undoes it
    torch.testing.assert_close(in_order, A @ B.mT)
    for q in range(4):  # columns 2 q, 2 q + 1 of each eight are what a thread holds
        held = [n for n in range(32) if n % 8 // 2 == q]
        torch.testing.assert_close(fetched[held], B[8 * q : 8 * q + 8])


def bits(layout):
    """Which bit of (row, column) each bit of register, lane and warp is."""
    return {kind: [tuple(b) for b in getattr(layout, f"{kind}_bases")] for kind in ("reg", "lane", "warp")}


def test_turning_a_tile_moves_whole_registers_within_a_warp():
    """Each step exchanges one bit of the lane for one of the register, but the lowest two: four codes stay together."""
    kernels = pytest.importorskip("nanosprint.kernels.linear_relu2_resident")
    start = bits(kernels.store_layout(256))
    assert start["reg"][:3] == [(0, 1), (0, 2), (0, 4)]  # eight neighbouring columns in a thread
    layouts = [start] + [bits(kernels.turned_layout(256, step)) for step in range(3)]
    assert layouts[3]["reg"][:4] == [(1, 0), (2, 0), (4, 0), (8, 0)]  # sixteen neighbouring rows
    for before, after in itertools.pairwise(layouts):
        assert before["warp"] == after["warp"]
        assert sorted(b for kind in before.values() for b in kind) == sorted(b for kind in after.values() for b in kind)
        moved = [a for a, b in zip(before["lane"], after["lane"], strict=True) if a != b]
        assert len(moved) == 1
        assert moved[0] not in before["reg"]
        assert moved[0] in after["reg"]


@pytest.mark.parametrize("T", [200, 64, 37, 1])
@pytest.mark.parametrize("backward", [False, True])
def test_what_follows_a_resident_product_writes_codes_both_ways(T, backward):
    """The code of both groups of warps, on a CPU; the product of a tile is given."""
    kernels = pytest.importorskip("nanosprint.kernels.linear_relu2_resident")
    machine = Machine()
    on_cpu = load_module(str(Path(kernels.__file__)), machine)
    K, columns, COLS, GROUPS = 32, 64, 2, 2
    N, padded = COLS * columns, -(-T // 16) * 16
    dtype = fp8.E5M2 if backward else fp8.E4M3
    A, B, post8 = torch.randn(T, K), torch.randn(N, K), (3 * torch.rand(T, N)).to(fp8.E4M3)
    post8[1:2] = 0
    fetched = B.as_strided(*kernels.five_axes(N, K)).reshape(N, K)

    def multiply(rows_A, rows_B, full, free, ready, mine, others, phase, count):
        block, turn = machine.program, count // rows_B.shape[0]
        begin, first = (block // COLS + turn * GROUPS) * 64, block % COLS * columns
        rows = torch.nn.functional.pad(A, (0, 0, 0, 64 * (COLS * GROUPS + T)))[begin : begin + 64]
        return (rows @ fetched[first : first + columns].mT).as_subclass(Values)

    on_cpu._multiply, on_cpu.larger = multiply, lambda a, b: torch.maximum(a, torch.as_tensor(b))
    code = torch.full((T, N), float("nan")).to(dtype)
    turned, peaks = torch.full((N, padded), 0x7F, dtype=torch.uint8), torch.full((16,), float("nan"))
    a_scale, b_scale, post_scale = (torch.tensor(x) for x in (2.0, 0.25, 0.5))
    out_scale = torch.tensor(0.01 if backward else 1.0)  # nothing is clamped, which is the device's conversion's part
    of_post, of_peaks = (post_scale, None) if backward else (None, peaks)
    given = [None, code, turned, of_peaks, a_scale, b_scale, of_post, out_scale]
    pointers = [None if t is None else Pointer(t.view(-1)) for t in given]
    post = Pointer(post8.view(torch.uint8).view(-1)) if backward else None
    held = SimpleNamespace(shape=(1, columns // 32))
    order = SimpleNamespace(index=lambda who: who)
    for machine.program in range(COLS * GROUPS):
        for who in range(2):
            on_cpu._take_turns(
                None, held, None, None, None, order, post, *pointers, T, who, COLS, GROUPS, 16, True, backward, True,
                True, not backward, torch.float32, dtype,
            )  # fmt: skip
    product = 0.5 * A @ B.mT
    root = (post8.float() * post_scale).sqrt()
    expected = 2 * root * product if backward else product.relu() ** 2
    codes = fp8.quantize(expected, out_scale, dtype)
    differing = (code.view(torch.uint8) != codes.view(torch.uint8)).float().mean()
    assert differing < 2e-3  # sums in another order
    assert relative(code, codes.double()) < 1e-2
    assert torch.equal(turned[:, :T], code.view(torch.uint8).mT)
    assert not turned[:, T:].any()
    assert backward or peaks.amax() == pytest.approx(expected.max().item(), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
def test_bf16_on_a_gpu(route, in_out):
    for T, D, F in SIZES:
        x, up, down, g = case(T, D, F, in_out, torch.bfloat16, "cuda")
        post, code, peaks = up_relu2(x, up, x.dtype, want_peaks=True)
        assert code is None
        assert peaks.max() == post.max()
        pre = (x.double() @ up.double().mT).relu()
        assert relative(post, pre.square()) < 6e-3
        d_pre, _ = relu2_grad(g, down.mT if in_out else down, post)
        truth = 2 * post.double().sqrt() * (g.double() @ (down.double().mT if in_out else down.double()))
        assert relative(d_pre, truth) < 5e-3
        assert not up_relu2(torch.zeros_like(x), up, x.dtype)[0].any()
        x[T // 2, D // 2] = float("nan")
        post, _, peaks = up_relu2(x, up, x.dtype, want_peaks=True)
        assert post[T // 2].isnan().all()
        assert peaks.amax().isnan()
        assert T == 1 or post[T // 2 - 1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES, indirect=True)
def test_fp8_on_a_gpu(route):
    if not fp8.supports_fp8("cuda"):
        pytest.skip("needs a GPU with FP8")
    for T, D, F in FP8_SIZES:
        x, up, down, g = case(T, D, F, True, torch.bfloat16, "cuda")
        scales = {n: t.abs().amax().float() / 448 for n, t in (("x", x), ("up", up), ("down", down))}
        x8, up8, down8 = (fp8.quantize(t, scales[n], fp8.E4M3) for n, t in (("x", x), ("up", up), ("down", down)))
        code_scale = torch.tensor(1e-3, device="cuda")  # of which many values are more than 448
        post, code, peaks = up_relu2(x8, up8, torch.bfloat16, (scales["x"], scales["up"]), code_scale, True)
        exact = (x8.double() @ up8.double().mT).relu() * (scales["x"].double() * scales["up"].double())
        assert relative(post, exact.square()) < 6e-3
        assert relative(post, (x.double() @ up.double().mT).relu().square()) < 6e-2
        assert torch.equal(code.view(torch.uint8), fp8.quantize(post, code_scale, fp8.E4M3).view(torch.uint8))
        assert peaks.max() == post.max()
        g_scale = g.abs().amax().float() / 57_344
        g8 = fp8.quantize(g, g_scale, fp8.E5M2)
        pair = (g_scale, scales["down"])
        d_pre, code = relu2_grad(g8, down8.mT, post, pair, code_scale * 1e-3)
        d_post = (g8.double() @ down8.double().mT) * (g_scale.double() * scales["down"].double())
        assert relative(d_pre, 2 * post.double().sqrt() * d_post) < 5e-3
        expected = fp8.quantize(d_pre, code_scale * 1e-3, fp8.E5M2)
        assert torch.equal(code.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES, indirect=True)
def test_codes_alone_and_turned_on_a_gpu(route):
    if not fp8.supports_fp8("cuda"):
        pytest.skip("needs a GPU with FP8")
    for T, D, F in [*FP8_SIZES, (16_384, 768, 3072), (130, 128, 512)]:
        x, up, down, g = case(T, D, F, True, torch.bfloat16, "cuda")
        x8, up8, down8 = (fp8.quantize(t, fp8.scale_of(t), fp8.E4M3) for t in (x, up, down))
        pair, code_scale = (fp8.scale_of(x), fp8.scale_of(up)), torch.tensor(2e-2, device="cuda")
        pre = (x8.double() @ up8.double().mT) * (pair[0].double() * pair[1].double())
        expected = fp8.quantize(pre.relu().square(), code_scale, fp8.E4M3)
        code, turned, peaks = up_relu2_turned(x8, up8, pair, code_scale)
        assert (code.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 5e-2  # sums in reduced precision
        assert relative(code, expected.double()) < 3e-2
        assert torch.equal(turned.view(torch.uint8), torch.nn.functional.pad(code.view(torch.uint8).mT, (0, -T % 16)))
        assert peaks.max().item() == pytest.approx(pre.max().item() ** 2, rel=1e-2)
        g_scale = g.abs().amax().float() / 57_344
        g8, pair = fp8.quantize(g, g_scale, fp8.E5M2), (g_scale, fp8.scale_of(down))
        d_post = (g8.double() @ down8.double().mT) * (pair[0].double() * pair[1].double())
        truth = 2 * (code.double() * code_scale.double()).sqrt() * d_post
        pre_scale = truth.abs().max().float() / 1e4
        code, turned = relu2_grad_turned(g8, down8.mT, code, code_scale, pair, pre_scale)
        expected = fp8.quantize(truth, pre_scale, fp8.E5M2)
        assert (code.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 5e-2  # sums in reduced precision
        assert relative(code, expected.double()) < 3e-2
        assert torch.equal(turned.view(torch.uint8), torch.nn.functional.pad(code.view(torch.uint8).mT, (0, -T % 16)))


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES, indirect=True)
@pytest.mark.parametrize("in_out", LAYOUTS)
def test_whole_mlp_on_a_gpu(route, in_out):
    x, up, down, g = case(1000, 768, 3072, in_out, torch.bfloat16, "cuda")
    inputs = [t.requires_grad_() for t in (x, up, down)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = (wide[0] @ wide[1].mT).relu().square() @ (wide[2] if in_out else wide[2].mT)
    grads = torch.autograd.grad(truth, wide, g.double())
    for function in (relu2_mlp, torch.compile(relu2_mlp, fullgraph=True)):
        y = function(*inputs, in_out=in_out)
        assert relative(y, truth) < 1e-2
        for got, expected in zip(torch.autograd.grad(y, inputs, g), grads, strict=True):
            assert relative(got, expected) < 1e-2


def test_kernel_logic_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def interpreted():
    """fp32 operands on sizes around the tiles' edges; fp16 stands for FP8, which the interpreter rounds wrongly."""
    from nanosprint.kernels import linear_relu2 as kernels
    from nanosprint.kernels.linear_relu2 import relu2_pass, relu2_product
    from nanosprint.kernels.tuning import RELU2_PEAKS, Persistent

    def fresh(*shape, dtype=torch.float32):
        return torch.full(shape, float("nan"), dtype=dtype)

    kernels.RELU2_PASS = (256, 1)  # the interpreter reduces element by element
    tiles = (
        Persistent(16, 32, 16, 1, 1),
        Persistent(16, 16, 16, 1, 1, parts=1, blocks=2, flatten=False),
        Persistent(16, 32, 16, 1, 1, flatten=False),
    )
    scales, code_scale = (torch.tensor(2.0), torch.tensor(0.25)), torch.tensor(2e-5)

    def check(x, out8, result, peaks=None):
        torch.testing.assert_close(x, result, atol=1e-4, rtol=1e-5)
        expected = (x * code_scale.reciprocal()).clamp(-65504, 65504)
        assert expected.abs().max() == 65504
        assert torch.equal(out8, expected.half())
        assert peaks is None or peaks.max() == x.max()

    for tma, tile, (T, N, K) in [
        (tma, tile, size) for tma in (True, False) for tile in tiles for size in [(72, 56, 24), (7, 88, 40)]
    ]:
        A, B, post = torch.randn(T, K), torch.randn(N, K), torch.rand(T, N)
        post[T // 2] = 0.0
        out, out8, peaks = fresh(T, N), fresh(T, N, dtype=torch.float16), fresh(RELU2_PEAKS)
        options = {"out8": out8, "out_scale": code_scale, "tma": tma}
        relu2_product(A, B, out, tile, scales=scales, peaks=peaks, **options)
        check(out, out8, (0.5 * A @ B.mT).relu() ** 2, peaks)
        for turned in (False, True):
            out, out8 = fresh(T, N), fresh(T, N, dtype=torch.float16)
            options["out8"] = out8
            relu2_product(A, B.mT.contiguous() if turned else B, out, tile, post=post, turned=turned, **options)
            check(out, out8, 2 * post.sqrt() * (A @ B.mT))
        out, peaks = fresh(T, N), fresh(RELU2_PEAKS)
        A[T // 2, 3] = float("nan")
        relu2_product(A, B, out, tile, peaks=peaks, tma=tma)
        assert out[T // 2].isnan().all()
        assert out.isnan().sum() == N
        assert peaks.isnan().sum() >= 1

    for T, N in [(72, 56), (7, 88)]:
        post = torch.rand(T, N)
        post[T // 2] = 0.0
        x, out8, peaks = torch.randn(T, N), fresh(T, N, dtype=torch.float16), fresh(RELU2_PEAKS)
        truth, backward = x.relu() ** 2, x.clone()
        relu2_pass(x, out8=out8, out_scale=code_scale, peaks=peaks)
        check(x, out8, truth, peaks)
        truth = 2 * post.sqrt() * backward
        relu2_pass(backward, post=post, out8=out8, out_scale=code_scale)
        check(backward, out8, truth)
    x, peaks = torch.randn(2, 500), fresh(RELU2_PEAKS)  # several blocks, the last partial
    x[0, 0] = 9.0
    relu2_pass(x, peaks=peaks)
    assert peaks.max() == 81
    x[1, 499] = float("nan")
    relu2_pass(x, peaks=peaks)
    assert x[1, 499].isnan()
    assert peaks.isnan().sum() == 1


if __name__ == "__main__":
    interpreted()
