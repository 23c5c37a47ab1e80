"""The output head in FP8 against bf16: `python benchmarks/bench_fp8.py [--tokens N] [--json FILE]`, on a GPU.

Forward and backward of x (49,152 x 768) times a weight (50,304 x 768), kept in fp32, three ways:

    alone       the gradient of the logits is given in bf16
    ready       the same, the gradient given in E5M2 as a fused loss could write it (FP8 only)
    with loss   cross-entropy in fp32 behind it, all compiled: the compiler quantises the gradient where it is made

The floor is the three products at 1,500 TFLOP/s (FP8) or at the bf16 rate measured on the same card. Target on an H200:
1.5 times as fast as bf16. Times are device times: median with 20th and 80th percentile.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.bench_optim import matmul_rate, time_ms
from benchmarks.harness import write_rows
from nanosprint.ops import fp8

DIM, VOCAB = 768, 50_304
SCALES = {"x_s": 100 / 448, "w_s": 1.6 / 448, "g_s": 0.75 / 448}
FP8_RATE = 1500e12  # what cuBLAS reaches on large products of this kind on an H200


def bf16_linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def fp8_linear(x, weight):
    return fp8.fp8_linear(x, weight, **SCALES)


def alone(linear, x, weight, g):
    """Forward and backward of the product, the gradient given."""
    return lambda: torch.autograd.grad(linear(x, weight), (x, weight), g)


def ready(x, weight, g):
    """The same on a gradient that is quantised already."""
    g8 = fp8.quantize(g, SCALES["g_s"], fp8.E5M2)
    x, weight = x.detach(), weight.detach()

    def work():
        _, x8_t, w8_t = torch.ops.nanosprint.fp8_linear(x, weight, *SCALES.values(), torch.bfloat16, False)
        return fp8.fp8_linear_grads(g8, x8_t, w8_t, *SCALES.values())

    return work


def with_loss(linear, x, weight, targets):
    """Forward and backward of product and loss, compiled."""

    @torch.compile
    def loss(x, weight):
        return F.cross_entropy(linear(x, weight).float(), targets, reduction="sum")

    return lambda: torch.autograd.grad(loss(x, weight), (x, weight))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=49_152)
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(args.tokens, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(VOCAB, DIM, device="cuda")).requires_grad_()
    g = torch.randn(args.tokens, VOCAB, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCAB, (args.tokens,), device="cuda")
    flops, rate = 3 * 2 * args.tokens * DIM * VOCAB, matmul_rate()
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.0f} TFLOP/s bf16 measured; {flops / 1e12:.2f} TFLOP a pass")
    rows, bf16_ms = [], {}
    works = {
        ("alone", "bf16"): lambda: alone(bf16_linear, x, weight, g),
        ("alone", "fp8"): lambda: alone(fp8_linear, x, weight, g),
        ("ready", "fp8"): lambda: ready(x, weight, g),
        ("with loss", "bf16"): lambda: with_loss(bf16_linear, x, weight, targets),
        ("with loss", "fp8"): lambda: with_loss(fp8_linear, x, weight, targets),
    }
    for (name, kind), build in works.items():
        ms, low, high = time_ms(build(), "cuda", 15)
        if kind == "bf16":
            bf16_ms[name] = ms
        floor = 1e3 * flops / (rate if kind == "bf16" else FP8_RATE)
        baseline = bf16_ms.get(name, bf16_ms["alone"])
        print(f"{name:10s} {kind}  {ms:7.3f} ms ({low:.3f} .. {high:.3f})  {flops / ms / 1e9:5.0f} TFLOP/s", end="  ")
        print(f"floor {floor:.2f} ms = {floor / ms:.0%}, {baseline / ms:.2f} x bf16")
        rows.append({"name": f"{name}, {kind}", "ms": ms, "p20": low, "p80": high, "flops": flops, "floor_ms": floor})
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
