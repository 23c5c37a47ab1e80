"""Products in FP8 against bf16: `python -m benchmarks.bench_fp8 [--tokens N] [--loss | --projections]`, on a GPU.

Forward and backward of x (49,152 x 768) times a weight (50,304 x 768), kept in fp32:

    compiled    product and cross-entropy in fp32 as the compiler has them (bf16 only)
    fused       product, cross-entropy and gradients in one operator, `ops.head_loss`; in_out: the weight transposed
    record      the same with a cap, three targets and a prefix

Then the kernel of the loss alone, writing E5M2 or over the logits in bf16; `--sweep` tries its tiles. The floor is the
three products at 1,500 TFLOP/s (FP8) or at the bf16 rate measured on the same card, and for the loss its bytes (logits
read twice, gradient written once) at the rate of a copy. Targets on an H200: head and loss 1.5 times as fast as bf16,
the loss at 80 % of its floor. Times are device times: median with 20th and 80th percentile.

`--loss` times the loss alone, the record's, at --tokens and at 32,768 rows: the kernel that reads a row twice beside
the one that keeps it in shared memory, with `--sweep` by all of its candidates in `tuning`. One that does not agree
with the first is reported and not timed. Floor: every byte once.

`--projections` times attention's projections instead, each product with its operands ready and then the whole, forward
and backward, compiled, between neighbours that the compiler merges casts with: norm before QKV, norm of queries and
keys and rotary positions behind it, gates before the output projection, a sum behind it. So the difference between the
products' saving and the whole's is what the casts cost. Target on an H200: QKV and output projection together save 1.5
ms a layer of 393,216 tokens. At last the copies of ten layers' weights: device and host time of a refresh.
"""

import argparse
import functools
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.bench_optim import copy_rate, matmul_rate, time_ms
from benchmarks.harness import synchronize, write_rows
from benchmarks.inputs import CAP, SCALES, record_labels
from nanosprint.kernels import softcap_xent as kernels
from nanosprint.kernels import tuning
from nanosprint.model.fp8_projection import Fp8Projection
from nanosprint.model.fp8_weight import Fp8Weight
from nanosprint.model.techniques.head_gate import gated
from nanosprint.ops import fp8
from nanosprint.ops.fp8_copies import renew
from nanosprint.ops.head_loss import head_loss
from nanosprint.ops.qk_norm_rotary import NormRotary, qk_norm_rotary
from nanosprint.ops.rms_norm import rms_norm
from nanosprint.ops.softcap_xent import curve_of, loss_and_grad

DIM, VOCAB = 768, 50_304
FP8_RATE = 1500e12  # what cuBLAS reaches on large products of this kind on an H200


def compiled(x, weight, targets):
    """Forward and backward of product and loss as plain formulas."""

    @torch.compile
    def loss(x, weight):
        return F.cross_entropy(F.linear(x, weight.to(x.dtype)).float(), targets, reduction="sum")

    return lambda: torch.autograd.grad(loss(x, weight), (x, weight))


TILES = [(2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 32)]


def fused(x, weight, labels, **options):
    """Forward and backward of the one operator."""
    return lambda: torch.autograd.grad(head_loss(x, weight, labels, **options) / 8, (x, weight))


def loss_rows(logits, targets, sweep):
    """The kernel of the loss alone."""
    rate, rows = copy_rate(), []
    if sweep:  # the tiles are those of the kernel that reads a row twice
        tuning.SOFTCAP_XENT_HELD = None
    for name, num_labels, cap in (("next token, no cap", 1, None), ("record", 4, CAP)):
        labels = record_labels(targets, num_labels)
        for out in (torch.empty_like(logits, dtype=fp8.E5M2), logits):
            floor = 1e3 * (2 * logits.nbytes + out.nbytes) / rate
            size = out.element_size()
            for tile in TILES if sweep else [kernels.SOFTCAP_XENT[size]]:
                kernels.SOFTCAP_XENT[size] = tile
                work = functools.partial(loss_and_grad, logits, labels, curve_of(cap), out, inverse=600.0)
                ms, low, high = time_ms(work, "cuda", 15)
                what = f"loss, {name}, {'e5m2' if out is not logits else 'bf16'}, tile {tile}"
                print(f"{what:55s} {ms:7.3f} ms ({low:.3f} .. {high:.3f})  floor {floor:.2f} ms = {floor / ms:.0%}")
                rows.append({"name": what, "ms": ms, "p20": low, "p80": high, "floor_ms": floor})
    return rows


def held_rows(sizes, sweep):
    """The record's loss at each number of rows, by both kernels, and the floor of its bytes."""
    rate, rows, curve = copy_rate(), [], curve_of(CAP)
    before = tuning.SOFTCAP_XENT_HELD
    named = before or tuning.SOFTCAP_XENT_CANDIDATES[0]
    for tokens in sizes:
        logits = torch.randn(tokens, VOCAB, device="cuda", dtype=torch.bfloat16)
        labels = record_labels(torch.randint(VOCAB, (tokens,), device="cuda"), 4)
        for dtype in (fp8.E5M2, torch.bfloat16):
            out = torch.empty_like(logits, dtype=dtype)
            floor = 1e3 * (logits.nbytes + out.nbytes) / rate
            exact = None
            for tile in (None, *(tuning.SOFTCAP_XENT_CANDIDATES if sweep else (named,))):
                tuning.SOFTCAP_XENT_HELD = tile
                work = functools.partial(loss_and_grad, logits, labels, curve, out, inverse=1 / SCALES.gradient)
                what = f"loss, {tokens:,} rows, {dtype}, {'read twice' if tile is None else tile}"
                losses, part = work(), out[:: tokens // 64].float()
                exact = exact or (losses, part)
                wrong = max(((a - b).norm() / b.norm()).item() for a, b in zip((losses, part), exact, strict=True))
                if not wrong < 5e-2:
                    print(f"{what:75s} WRONG by {wrong:.1e}")
                    continue
                ms, low, high = time_ms(work, "cuda", 15)
                print(f"{what:75s} {ms:6.3f} ms ({low:.3f} .. {high:.3f})  floor {floor:.2f} ms = {floor / ms:.0%}")
                rows.append({"name": what, "ms": ms, "p20": low, "p80": high, "floor_ms": floor, "differs": wrong})
    tuning.SOFTCAP_XENT_HELD = before
    return rows


HEADS, ROW = 6, 16_384  # tokens of a row
X_SCALE, G_SCALE = math.sqrt(DIM) / 448, 2.0**-20


def products(x, g, weight):
    """The three products of a projection, in bf16 and, where training has them so, in FP8, operands ready."""
    scale = torch.tensor(2.0**-10, device=x.device)
    x8, w8 = fp8.quantize(x, 2.0**-4, fp8.E4M3), fp8.quantize(weight, 2.0**-10, fp8.E4M3)
    g8, turned = fp8.quantize(g, 2.0**-10, fp8.E5M2), fp8.quantize(weight.mT.contiguous(), 2.0**-10, fp8.E4M3)
    return {
        ("forward", "bf16"): lambda: x @ weight.mT,
        ("forward", "fp8"): lambda: fp8.scaled_product(x8, w8, scale, scale, torch.bfloat16, fast=True),
        ("input gradient", "bf16"): lambda: g @ weight,
        ("input gradient", "fp8"): lambda: fp8.scaled_product(g8, turned, scale, scale, torch.bfloat16, fast=True),
        ("weight gradient", "bf16"): lambda: g.mT @ x,
    }


def projected(kind, shape, device):
    """(x, weight) -> y as a layer has it in that format, and the copies that FP8 wants refreshed."""
    if kind == "bf16":
        return lambda x, weight: F.linear(x.flatten(2), weight.to(x.dtype)), []
    known = {"input_scale": X_SCALE} if shape[0] > shape[1] else {"headroom": 2.0}
    module = Fp8Projection(shape, torch.device(device), gradient_scale=G_SCALE if kind == "fp8" else None, **known)
    return module, [module.weight]


def whole(name, kind, tokens, device):
    """Forward and backward of a projection among its neighbours, compiled. kind "fp8 forward": bf16 backward."""
    rows, width = tokens // min(ROW, tokens), 3 * DIM if name == "qkv" else DIM

    def random(*shape):
        return torch.randn(rows, tokens // rows, *shape, device=device, dtype=torch.bfloat16).requires_grad_()

    weight = (0.02 * torch.randn(width, DIM, device=device)).bfloat16().requires_grad_()
    factor = torch.tensor(0.5, device=device, requires_grad=True)
    project, copies = projected(kind, (width, DIM), device)
    renew([c.copy_of((weight,), factor) for c in copies])
    angles = torch.rand(tokens // rows, DIM // HEADS // 2, device=device)
    cos, sin, x, gate = angles.cos(), angles.sin(), random(DIM), random(HEADS)
    gradients = [random(HEADS, DIM // HEADS) for _ in range(3)] if name == "qkv" else [random(DIM)]

    how = NormRotary(HEADS, cos, sin, 1e-7, torch.bfloat16)

    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def layer(x, gate, weight, factor):
        if name == "qkv":
            x, weight = rms_norm(x, 1e-7), factor * weight
            in_bf16 = kind == "bf16"
            return qk_norm_rotary(project(x, weight), *how) if in_bf16 else project.queries_keys_values(x, weight, how)
        heads = gated(x.unflatten(-1, (HEADS, -1)), gate)
        return (1.1 * project(heads, factor * weight) + x,)

    wanted = (x, weight, factor) if name == "qkv" else (x, gate, weight, factor)
    return lambda: torch.autograd.grad(layer(x, gate, weight, factor), wanted, gradients)


def projection_rows(sizes, device="cuda"):
    """Products and wholes of both projections at each number of tokens."""
    torch._dynamo.config.recompile_limit = 64  # all wholes are one function to the compiler
    rows = []
    for tokens in sizes:
        for name, width in (("qkv", 3 * DIM), ("out", DIM)):
            x, g = (torch.randn(tokens, n, device=device, dtype=torch.bfloat16) for n in (DIM, width))
            works = products(x, g, (0.02 * torch.randn(width, DIM, device=device)).bfloat16())
            kinds = ("bf16", "fp8 forward", "fp8")
            works |= {("whole", kind): whole(name, kind, tokens, device) for kind in kinds}
            bf16_ms, flops = {}, 2 * tokens * width * DIM
            for (what, kind), work in works.items():
                ms, low, high = time_ms(work, device, 15)
                bf16_ms.setdefault(what, ms)
                print(f"{tokens:7d} {name} {what:15s} {kind:11s} {ms:7.3f} ms ({low:.3f} .. {high:.3f})", end="")
                print("" if what == "whole" else f"  {flops / ms / 1e9:5.0f} TFLOP/s", end="")
                print("" if kind == "bf16" else f"  saves {bf16_ms[what] - ms:.3f} ms")
                rows.append({"name": f"{name}, {what}, {kind}", "tokens": tokens, "ms": ms, "p20": low, "p80": high})
    return rows


def refresh_rows(device="cuda", layers=10):
    """A refresh of all copies, as after an update: QKV in two parts and the output projection of every layer."""
    copies = []
    for parts in ((2 * DIM, DIM), (DIM,)) * layers:
        weights = tuple(torch.randn(n, DIM, device=device).bfloat16() for n in parts)
        weight = Fp8Weight((sum(parts), DIM), torch.device(device), turned=True)
        copies.append(weight.copy_of(weights, torch.ones((), device=device)))
    ms, low, high = time_ms(lambda: renew(copies), device, 15)
    synchronize()
    start = time.perf_counter()
    renew(copies)
    host = 1e3 * (time.perf_counter() - start)
    synchronize()
    print(f"refresh of {layers} layers {ms:.3f} ms ({low:.3f} .. {high:.3f}), host {host:.3f} ms")
    return [{"name": f"refresh of {layers} layers", "ms": ms, "p20": low, "p80": high, "host_ms": host}]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=49_152)
    parser.add_argument("--sweep", action="store_true", help="try the tiles of the loss")
    parser.add_argument("--loss", action="store_true", help="the loss alone, by both kernels")
    parser.add_argument("--projections", action="store_true", help="attention's projections instead of the head")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.loss:
        write_rows(held_rows([args.tokens, 32_768], args.sweep), args.json)
        return
    if args.projections:
        write_rows(projection_rows([args.tokens, 4 * args.tokens]) + refresh_rows(), args.json)
        return
    x = torch.randn(args.tokens, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(VOCAB, DIM, device="cuda")).requires_grad_()
    g = torch.randn(args.tokens, VOCAB, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCAB, (args.tokens,), device="cuda")
    turned = weight.detach().T.contiguous().requires_grad_()
    next_token, record = record_labels(targets, 1), record_labels(targets, 4)
    flops, rate = 3 * 2 * args.tokens * DIM * VOCAB, matmul_rate()
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.0f} TFLOP/s bf16 measured; {flops / 1e12:.2f} TFLOP a pass")
    rows, bf16_ms = [], {}
    works = {
        ("compiled", "bf16"): lambda: compiled(x, weight, targets),
        ("fused", "bf16"): lambda: fused(x, weight, next_token),
        ("fused", "fp8"): lambda: fused(x, weight, next_token, scales=SCALES),
        ("fused, in_out", "fp8"): lambda: fused(x, turned, next_token, scales=SCALES, in_out=True),
        ("record, in_out", "bf16"): lambda: fused(x, turned, record, softcap=CAP, in_out=True),
        ("record, in_out", "fp8"): lambda: fused(x, turned, record, softcap=CAP, scales=SCALES, in_out=True),
    }
    for (name, kind), build in works.items():
        ms, low, high = time_ms(build(), "cuda", 15)
        if kind == "bf16":
            bf16_ms[name] = ms
        floor = 1e3 * flops / (rate if kind == "bf16" else FP8_RATE)
        same = bf16_ms[{"fused, in_out": "fused"}.get(name, name)]
        print(f"{name:15s} {kind}  {ms:7.3f} ms ({low:.3f} .. {high:.3f})  {flops / ms / 1e9:5.0f} TFLOP/s", end="  ")
        print(f"floor {floor:.2f} ms = {floor / ms:.0%}, {same / ms:.2f} x the same in bf16", end="")
        print(f", {bf16_ms['compiled'] / ms:.2f} x compiled bf16")
        rows.append({"name": f"{name}, {kind}", "ms": ms, "p20": low, "p80": high, "flops": flops, "floor_ms": floor})
    write_rows(rows + loss_rows(g, targets, args.sweep), args.json)


if __name__ == "__main__":
    main()
