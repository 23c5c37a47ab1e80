"""A squared-ReLU MLP of a 124M GPT-2 by parts and as a whole: `python -m benchmarks.bench_mlp [--sweep]`, on a GPU.

    up, up8      relu(x up^T)^2, from bf16 or FP8 operands; up8 writes post in E4M3, too, and its maximum
    dpre, dpre8  2 sqrt(post) (g down^T) likewise; dpre8 writes E5M2, too
    dx, dx8      what comes after: dpre up, in bf16 or in FP8 with precise sums
    up8t, dpre8t nothing but codes, plain and turned, as gradients of the weights in FP8 want them
    dW, dW8      those gradients, (hidden, width), summed over tokens; turn: codes of x and g turned by a pass

Each of the first four: cuBLAS and what the compiler makes of the rest, cuBLAS and our pass, and both fused kernels by
the tiles in `tuning`. Then forward and backward of the whole MLP with fp32 weights, compiled. Last the renewal of the
FP8 copies of 11 layers; "host" is the time until it is launched.

`--sweep` times every candidate of `tuning.RELU2_CANDIDATES`, of both kernels, instead; one that does not fit or
computes something else is reported. The floor is the larger of operations at 1,500 TFLOP/s (FP8) or the bf16 rate
measured on the same card, and of bytes at the rate of a copy. Name what wins in `tuning` (`RELU2_TILES`,
`RELU2_RESIDENT`, and which kinds are computed so).
Device times: median of 15.
"""

import argparse
import functools
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.bench_optim import copy_rate, matmul_rate, time_ms
from benchmarks.harness import write_rows
from benchmarks.inputs import Sizes, mlp_operands
from nanosprint.config import Fp8MLPSpec
from nanosprint.kernels import tuning
from nanosprint.kernels.linear_relu2 import relu2_pass, relu2_product
from nanosprint.model.fp8_mlp import Fp8MLP
from nanosprint.ops.fp8 import E4M3, E5M2, quantize, scale_from, scale_of, scaled_product, turn
from nanosprint.ops.fp8_copies import renew
from nanosprint.ops.linear_relu2 import relu2_grad_turned, relu2_mlp, up_relu2_turned

DIM, HIDDEN, LAYERS = 768, 3072, 11
FP8_RATE = 1500e12
KINDS = ("up8", "dpre8", "up", "dpre")


@torch.compile(dynamic=False)
def compiled_up(pre, scale):
    post = F.relu(pre).square()
    return (post, None) if scale is None else (post, quantize(post, scale, E4M3), post.amax())


@torch.compile(dynamic=False)
def compiled_dpre(d_post, post, scale):
    d_pre = 2 * post.sqrt() * d_post
    return (d_pre, None) if scale is None else (d_pre, quantize(d_pre, scale, E5M2))


class Part:
    """One of KINDS on random data: three ways to compute it, and its floor."""

    def __init__(self, kind, tokens, roofs):
        self.kind, self.forward = kind, kind.startswith("up")
        in_fp8 = kind.endswith("8")
        self.A, self.B, self.scales, self.code_scale, self.post = mlp_operands(kind, Sizes(tokens=tokens))
        self.out8 = self.peaks = None
        self.out = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        if in_fp8:
            self.out8 = torch.empty_like(self.out, dtype=self.A.dtype)
            self.peaks = torch.empty(tuning.RELU2_PEAKS, device="cuda") if self.forward else None
        self.flops = 2 * tokens * DIM * HIDDEN
        moved = (self.A, self.B, self.out, self.out8, self.post)
        traffic = sum(t.nbytes for t in moved if t is not None)
        self.floor = 1e3 * max(self.flops / (FP8_RATE if in_fp8 else roofs[0]), traffic / roofs[1])

    def product(self):
        if self.scales is None:
            return self.A @ self.B.mT
        return scaled_product(self.A, self.B, *self.scales, torch.bfloat16, fast=True)

    def by_compiler(self):
        pre = self.product()
        return compiled_up(pre, self.code_scale) if self.forward else compiled_dpre(pre, self.post, self.code_scale)

    def by_pass(self):
        x = self.product()
        relu2_pass(x, post=self.post, out8=self.out8, out_scale=self.code_scale, peaks=self.peaks)
        return x

    def fused(self, tile):
        kernel = relu2_product
        if isinstance(tile, tuning.Resident):
            from nanosprint.kernels.linear_relu2_resident import relu2_resident as kernel  # Gluon, hence Triton 3.6
        kernel(
            self.A, self.B, self.out, tile, scales=self.scales, post=self.post, out8=self.out8,
            out_scale=self.code_scale, peaks=self.peaks,
        )  # fmt: skip
        return self.out

    def error(self, tile):
        """Relative, of the one kernel against product and pass; of the codes, too."""
        expected, wanted = self.by_pass().float(), None if self.out8 is None else self.out8.float()
        error = (self.fused(tile).float() - expected).norm() / expected.norm()
        if wanted is not None:
            error = torch.maximum(error, (self.out8.float() - wanted).norm() / wanted.norm())
        return error.item()


def report(rows, name, tokens, work, flops, floor):
    """Time `work` and print it beside its floor; a failure is printed instead."""
    try:
        ms, low, high = time_ms(work, "cuda", 15)
    except Exception as error:  # a tile that is too large, for one
        print(f"{tokens:7d}  {name:62s} failed: {str(error).splitlines()[0][:60]}", flush=True)
        return
    rate = f"{flops / ms / 1e9:5.0f} TFLOP/s  floor {floor:6.3f} = {floor / ms:4.0%}" if flops else ""
    print(f"{tokens:7d}  {name:62s} {ms:7.3f} ms ({low:.3f} .. {high:.3f})  {rate}", flush=True)
    rows.append({"name": name, "tokens": tokens, "ms": ms, "p20": low, "p80": high, "floor_ms": floor})


def report_tile(rows, part, tokens, tile):
    """The one kernel by one tile."""
    name = f"{part.kind}, {'weights kept' if isinstance(tile, tuning.Resident) else 'one kernel'} {tuple(tile)}"
    try:
        error = part.error(tile)
    except Exception as failure:
        print(f"{tokens:7d}  {name:62s} failed: {str(failure).splitlines()[0][:60]}", flush=True)
        return
    if not error < 2e-2:
        print(f"{tokens:7d}  {name:62s} WRONG by {error:.1e}", flush=True)
        return
    report(rows, name, tokens, functools.partial(part.fused, tile), part.flops, part.floor)


def bench_parts(rows, tokens, roofs, kinds, sweep):
    for kind in kinds:
        part = Part(kind, tokens, roofs)
        report(rows, f"{kind}, product alone", tokens, part.product, part.flops, part.floor)
        if not sweep:
            report(rows, f"{kind}, cuBLAS + compiler", tokens, part.by_compiler, part.flops, part.floor)
        report(rows, f"{kind}, cuBLAS + our pass", tokens, part.by_pass, part.flops, part.floor)
        fp8 = kind.endswith("8")
        named = (tuning.RELU2_TILES[kind], tuning.RELU2_RESIDENT[kind])
        for tile in tuning.RELU2_CANDIDATES["fp8" if fp8 else "bf16"] if sweep else named:
            report_tile(rows, part, tokens, tile)


def bench_dx(rows, tokens, roofs):
    """The input's gradient, both ways."""
    d_pre = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    up = torch.randn(HIDDEN, DIM, device="cuda").bfloat16()
    flops, one = 2 * tokens * DIM * HIDDEN, torch.ones((), device="cuda")
    report(rows, "dx, cuBLAS", tokens, lambda: d_pre @ up, flops, 1e3 * flops / roofs[0])
    codes, turned = d_pre.to(E5M2), up.mT.contiguous().to(E4M3)
    for fast in (False, True):
        work = functools.partial(scaled_product, codes, turned, one, one, torch.bfloat16, fast)
        report(rows, f"dx8, cuBLAS, {'fast' if fast else 'precise'}", tokens, work, flops, 1e3 * flops / FP8_RATE)


def bench_weights(rows, tokens, roofs):
    """What gradients of the weights in FP8 take, and those in bf16."""
    flops, copy = 2 * tokens * DIM * HIDDEN, roofs[1]
    up, dpre = mlp_operands("up8", Sizes(tokens=tokens)), mlp_operands("dpre8", Sizes(tokens=tokens))
    one = torch.ones((), device="cuda")
    post8, post_t, _ = up_relu2_turned(up.A, up.B, up.scales, up.code_scale)
    given = (dpre.A, dpre.B.mT, post8, up.code_scale, dpre.scales, dpre.code_scale)
    d_pre8, d_pre_t = relu2_grad_turned(*given)
    x_t, g_t = turn(up.A), turn(dpre.A)
    bound = 1e3 * flops / FP8_RATE
    work = functools.partial(up_relu2_turned, up.A, up.B, up.scales, up.code_scale)
    report(rows, "up8t", tokens, work, flops, max(bound, 1e3 * (up.A.nbytes + 2 * post8.nbytes) / copy))
    floor = max(bound, 1e3 * (dpre.A.nbytes + 3 * post8.nbytes) / copy)
    report(rows, "dpre8t", tokens, functools.partial(relu2_grad_turned, *given), flops, floor)
    report(rows, "turn x", tokens, functools.partial(turn, up.A), 0, 0.0)
    for name, left, right in (("dW_up", d_pre_t, x_t), ("dW_down", post_t, g_t)):
        work = functools.partial(scaled_product, left, right, one, one, torch.bfloat16)
        report(rows, f"{name}8, cuBLAS, precise", tokens, work, flops, bound)
    for name, left, right in (("dW_up", d_pre8, up.A), ("dW_down", post8, dpre.A)):
        left, right = left.bfloat16().mT, right.bfloat16()
        report(rows, f"{name}, cuBLAS", tokens, functools.partial(torch.mm, left, right), flops, 1e3 * flops / roofs[0])


class Composed(torch.autograd.Function):
    """The FP8 MLP of ordinary operators, which the compiler merges as it can: what the operators are measured against.

    Both weights (F, D); backward in bf16.
    """

    @staticmethod
    def forward(ctx, x, up, down, up8, up_scale, down8, down_scale, post_scale):
        x_scale = scale_of(x)
        pre = scaled_product(quantize(x, x_scale, E4M3), up8.view(E4M3), x_scale, up_scale, x.dtype, fast=True)
        post = F.relu(pre).square()
        post8 = quantize(post, post_scale, E4M3)
        ctx.save_for_backward(x, post, up, down)
        peak = post.amax().float()
        ctx.mark_non_differentiable(peak)
        return scaled_product(post8, down8.view(E4M3), post_scale, down_scale, x.dtype, fast=True), peak

    @staticmethod
    def backward(ctx, g, _):
        x, post, up, down = ctx.saved_tensors
        d_pre = 2 * post.sqrt() * (g @ down.to(x.dtype).mT)
        return d_pre @ up.to(x.dtype), (d_pre.mT @ x).to(up.dtype), (post.mT @ g).to(down.dtype), *(None,) * 5


def state_of(up, down, **options):
    state = Fp8MLP(up, Fp8MLPSpec(**options), in_out=True)
    renew(state.copies_of(up, down, 0))
    return state


def variants(up, down):
    """(name, function of x, kinds to fuse) of whole MLPs behind a norm, as in a layer."""
    dynamic, static = state_of(up, down), state_of(up, down, input="static")
    both = state_of(up, down, input="static", backward=True)
    every = state_of(up, down, input="static", backward=True, weights=True)
    copies = (dynamic.up_codes, dynamic.up_scale, dynamic.down_codes, dynamic.down_scale, dynamic.post_scale)

    def plain(x):
        return F.relu(F.linear(x, up.to(x.dtype))).square() @ down.to(x.dtype)

    def composed(x):
        y, peak = Composed.apply(x, up, down, *copies)
        with torch.no_grad():
            dynamic.post_scale.copy_(scale_from(peak, 1.8))
        return y

    operator = functools.partial(relu2_mlp, up=up, down=down, in_out=True)
    given = {"up": up, "down": down}
    forward, scaled, all_fp8, six = (functools.partial(state, **given) for state in (dynamic, static, both, every))
    everything, nothing = frozenset(KINDS), frozenset()
    yield "bf16, compiled", plain, nothing
    yield "bf16, operator, one kernel", operator, everything
    yield "FP8 forward, compiled", composed, nothing
    yield "FP8 forward, operator, our pass", forward, nothing
    yield "FP8 forward, operator, one kernel", forward, everything
    yield "FP8 forward, the same, static input", scaled, everything
    yield "FP8 forward and backward, our pass", all_fp8, nothing
    yield "FP8 forward and backward, one kernel", all_fp8, everything
    yield "FP8 forward, backward and weights, one kernel", six, everything


def behind_norm(function, x):
    return function(F.rms_norm(x, (DIM,)))


def forward_and_backward(function, x, weights, g):
    return torch.autograd.grad(function(x), (x, *weights), g)


def bench_whole(rows, tokens, roofs):
    """Norm, MLP and all gradients."""
    up, down = (
        (torch.randn(HIDDEN, DIM, device="cuda") / DIM**0.5).requires_grad_(),
        (torch.randn(HIDDEN, DIM, device="cuda") / HIDDEN**0.5).requires_grad_(),
    )
    x = torch.randn(tokens, DIM, device="cuda").bfloat16().requires_grad_()
    g, kept = torch.randn_like(x), tuning.FUSED_RELU2
    flops, compiled = 6 * 2 * tokens * DIM * HIDDEN, {}
    for name, function, fused in variants(up, down):
        tuning.FUSED_RELU2 = fused
        share = 2 * sum(word in name for word in ("FP8", "backward", "weights"))
        floor = 1e3 * flops / 6 * (share / FP8_RATE + (6 - share) / roofs[0])
        if function not in compiled:  # what is fused is no part of the graph
            compiled[function] = torch.compile(functools.partial(behind_norm, function), fullgraph=True, dynamic=False)
        work = functools.partial(forward_and_backward, compiled[function], x, (up, down), g)
        report(rows, f"MLP, {name}", tokens, work, flops, floor)
    tuning.FUSED_RELU2 = kept


def bench_refresh(rows):
    """Codes and scales of all layers' weights."""
    for backward in (False, True):
        copies = []
        for _ in range(LAYERS):
            up, down = (torch.randn(HIDDEN, DIM, device="cuda") for _ in range(2))
            copies += Fp8MLP(up, Fp8MLPSpec(backward=backward), in_out=True).copies_of(up, down, 99)
        work = functools.partial(renew, copies)
        report(rows, f"refresh, {LAYERS} layers{', turned copies' if backward else ''}", 0, work, 0, 0.0)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        host = 1e3 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        print(f"         host {host:.3f} ms")
        rows.append({"name": f"refresh, host, backward={backward}", "ms": host})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[49_152, 196_608])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sweep", action="store_true", help="try the candidate tiles, and nothing else")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    roofs, rows = (matmul_rate(), copy_rate()), []
    print(f"{torch.cuda.get_device_name()}: {roofs[0] / 1e12:.0f} TFLOP/s bf16, {roofs[1] / 1e12:.2f} TB/s measured")
    if tuple(torch.cuda.get_device_capability()) not in tuning.MEASURED:
        print("not a card that tuning knows: operators below take the pass in any case")
    for tokens in args.tokens:
        bench_parts(rows, tokens, roofs, args.kinds, args.sweep)
        if not args.sweep:
            bench_dx(rows, tokens, roofs)
            bench_weights(rows, tokens, roofs)
            bench_whole(rows, tokens, roofs)
    if not args.sweep:
        bench_refresh(rows)
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
