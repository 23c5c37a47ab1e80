"""The output head in FP8 against bf16: `python -m benchmarks.bench_fp8 [--tokens N] [--json FILE]`, on a GPU.

Forward and backward of x (49,152 x 768) times a weight (50,304 x 768), kept in fp32:

    compiled    product and cross-entropy in fp32 as the compiler has them (bf16 only)
    fused       product, cross-entropy and gradients in one operator, `ops.head_loss`; in_out: the weight transposed
    record      the same with a cap, three targets and a prefix

Then the kernel of the loss alone, writing E5M2 or over the logits in bf16; `--sweep` tries its tiles. The floor is the
three products at 1,500 TFLOP/s (FP8) or at the bf16 rate measured on the same card, and for the loss its bytes (logits
read twice, gradient written once) at the rate of a copy. Targets on an H200: head and loss 1.5 times as fast as bf16,
the loss at 80 % of its floor. Times are device times: median with 20th and 80th percentile.
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.bench_optim import copy_rate, matmul_rate, time_ms
from benchmarks.harness import write_rows
from nanosprint.config import SoftcapSpec
from nanosprint.kernels import softcap_xent as kernels
from nanosprint.ops import fp8
from nanosprint.ops.head_loss import Fp8Scales, head_loss
from nanosprint.ops.softcap_xent import Labels, curve_of, loss_and_grad

DIM, VOCAB = 768, 50_304
SCALES = Fp8Scales(x=100 / 448, weight=1.6 / 448, gradient=0.75 / 448)
FP8_RATE = 1500e12  # what cuBLAS reaches on large products of this kind on an H200


def compiled(x, weight, targets):
    """Forward and backward of product and loss as plain formulas."""

    @torch.compile
    def loss(x, weight):
        return F.cross_entropy(F.linear(x, weight.to(x.dtype)).float(), targets, reduction="sum")

    return lambda: torch.autograd.grad(loss(x, weight), (x, weight))


CAP = SoftcapSpec(kind="sigmoid", cap=23.0, shift=5.0, width=7.5)
TILES = [(2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 32)]


def labels_of(targets, num_labels):
    """The targets, and further labels as the record has them."""
    ids = torch.stack([targets.roll(-k) for k in range(num_labels)], 1)
    weights = torch.tensor([1.0, 0.5, 0.25, 0.25], device="cuda")[:num_labels]
    return Labels(ids, weights, weights.sum().expand(len(ids)).contiguous())


def fused(x, weight, labels, **options):
    """Forward and backward of the one operator."""
    return lambda: torch.autograd.grad(head_loss(x, weight, labels, **options) / 8, (x, weight))


def loss_rows(logits, targets, sweep):
    """The kernel of the loss alone."""
    rate, rows = copy_rate(), []
    for name, num_labels, cap in (("next token, no cap", 1, None), ("record", 4, CAP)):
        labels = labels_of(targets, num_labels)
        for out in (torch.empty_like(logits, dtype=fp8.E5M2), logits):
            floor = 1e3 * (2 * logits.nbytes + out.nbytes) / rate
            for tile in TILES if sweep else [kernels.SOFTCAP_XENT]:
                kernels.SOFTCAP_XENT = tile
                work = functools.partial(loss_and_grad, logits, labels, curve_of(cap), out, inverse=600.0)
                ms, low, high = time_ms(work, "cuda", 15)
                what = f"loss, {name}, {'e5m2' if out is not logits else 'bf16'}, tile {tile}"
                print(f"{what:55s} {ms:7.3f} ms ({low:.3f} .. {high:.3f})  floor {floor:.2f} ms = {floor / ms:.0%}")
                rows.append({"name": what, "ms": ms, "p20": low, "p80": high, "floor_ms": floor})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=49_152)
    parser.add_argument("--sweep", action="store_true", help="try the tiles of the loss")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(args.tokens, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(VOCAB, DIM, device="cuda")).requires_grad_()
    g = torch.randn(args.tokens, VOCAB, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCAB, (args.tokens,), device="cuda")
    turned = weight.detach().T.contiguous().requires_grad_()
    next_token, record = labels_of(targets, 1), labels_of(targets, 4)
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
