"""Norm, rotary positions and key offset of queries and keys on a GPU: the kernel against what the compiler makes.

    python -m benchmarks.bench_rotary --sweep

6 heads of 128, half of the pairs turning, as in the record. The floor counts each byte once: forward three tensors in
and three out, backward five in and three out.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.bench_optim import copy_rate, time_ms
from benchmarks.harness import write_rows
from benchmarks.inputs import Sizes, projected
from nanosprint.kernels import qk_norm_rotary as kernels
from nanosprint.ops.key_offset import offset_keys
from nanosprint.ops.qk_norm_rotary import qk_norm_rotary

HEADS, HEAD_DIM, EPS = 6, 128, 2.0**-23
TILES = [(8, 4), (16, 4), (32, 4), (64, 4), (64, 8), (32, 2), (16, 2)]
CASES = [("plain", 1, ()), ("paired", 2, ()), ("key offset", 2, ((64, 128),))]


def formulas(qkv, heads, cos, sin, eps, key_offset=()):
    """The same as plain operators: norm and rotation in the dtype of qkv, neighbours as pairs."""
    qk, v = qkv.unflatten(-1, (3, heads, -1)).split((2, 1), dim=2)
    qk = F.rms_norm(qk, qk.shape[-1:], eps=eps)
    x, y = qk.flatten(2).unflatten(-1, (-1, cos.size(-1), 2)).unbind(-1)
    cos, sin = (t[:, None].to(qkv.dtype) for t in (cos, sin))
    turned = torch.stack((x * cos + y * sin, y * cos - x * sin), dim=-1)
    q, k = turned.view(qk.shape).unbind(2)
    return q, offset_keys(k, key_offset) if key_offset else k, v.squeeze(2).contiguous()


def works(tokens, together, key_offset):
    """(forward, forward and backward) by the kernel and by the compiled formulas."""
    qkv, *tables, grads = projected(Sizes(tokens=tokens), together)
    fused = partial(
        qk_norm_rotary, qkv, HEADS, *tables, EPS, torch.bfloat16, "neighbours", key_offset=key_offset,
        turning=HEAD_DIM // 4,
    )  # fmt: skip
    compiled = partial(torch.compile(formulas, dynamic=False), qkv, HEADS, *tables, EPS, key_offset)
    return {
        name: (forward, lambda forward=forward: torch.autograd.grad(forward(), qkv, grads))
        for name, forward in (("kernel", fused), ("compiled", compiled))
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=196_608)
    parser.add_argument("--sweep", action="store_true", help="try the kernel's tiles")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    rate, rows = copy_rate(), []
    unit = 1e3 * 2 * args.tokens * HEADS * HEAD_DIM / rate
    for case, together, key_offset in CASES:
        for name, (forward, both) in works(args.tokens, together, key_offset).items():
            for tile in TILES if args.sweep and name == "kernel" else [kernels.QK_NORM_ROTARY]:
                kernels.QK_NORM_ROTARY = tile
                ms, both_ms = time_ms(forward, "cuda", 10)[0], time_ms(both, "cuda", 10)[0]
                what = f"{case}, {name}" + (f", tile {tile}" if name == "kernel" else "")
                print(
                    f"{what:40s} {ms:6.3f} / {both_ms:6.3f} ms  floor {6 * unit:.3f} / {14 * unit:.3f} ms = "
                    f"{6 * unit / ms:.0%} / {14 * unit / both_ms:.0%}",
                    flush=True,
                )
                rows.append({"name": what, "forward_ms": ms, "both_ms": both_ms, "floor_ms": 14 * unit})
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
