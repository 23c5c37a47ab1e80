"""Symmetric products against cuBLAS: `python benchmarks/bench_symmetric.py [--tiles] [--json FILE]`, on a GPU.

For each product of the orthogonalisation and each shape of a 124M GPT-2, and then of the record: microseconds of a
launch by Triton and by `torch.bmm` or `torch.baddbmm`, and the floor, which is the larger of half the operations (all
for the last product) at the matrix rate and of the bytes at the copy rate, both measured on the same card. Launches are
replayed from a CUDA graph, so that the host's time does not count. --tiles times a list of tiles instead of the one
that `tuning` names.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.bench_optim import copy_rate, matmul_rate
from benchmarks.harness import graph_ms, write_rows
from benchmarks.inputs import Sizes
from nanosprint.kernels.symmetric import Operand, product
from nanosprint.kernels.tuning import Tile, full_tile, symmetric_tile
from nanosprint.ops.symmetric import xtx, xxt

SHAPES = ((24, 256, 768), (48, 768, 768), (12, 3072, 768), (12, 768, 3072), *Sizes(tokens=1).banks)
# More blocks of small tiles on a multiprocessor, and operands read once on the diagonal: no spills on sm_90.
SQUARE = (
    *(Tile(128, 128, *rest, once=once) for once in (False, True) for rest in ((64, 3, 4), (64, 3, 8), (128, 2, 4))),
    *(Tile(64, 64, *rest, once=once) for once in (False, True) for rest in ((128, 3, 4), (64, 3, 4), (64, 4, 4))),
    Tile(128, 128, 32, 5, 4),
    Tile(128, 128, 64, 4, 8),
)
OBLONG = (Tile(128, 128, 64, 3, 4), Tile(128, 128, 64, 3, 8), Tile(128, 256, 64, 4, 8), Tile(256, 128, 64, 3, 8))


def graph_us(work):
    """(median, 20th, 80th percentile) microseconds of a launch."""
    return tuple(1e3 * ms for ms in graph_ms(work))


def cases(batch, rows, cols):
    """(name, P, Q, added or None, symmetric) of the three products for matrices of one shape."""
    X = torch.randn(batch, rows, cols, device="cuda").bfloat16() / max(rows, cols) ** 0.5
    tall = rows > cols
    gram = (X.mT, X) if tall else (X, X.mT)
    A = xtx(X) if tall else xxt(X)
    yield ("X^T X" if tall else "X X^T"), *gram, None, True
    yield "b A + c A A", A, A.mT, A, True
    yield ("a X + X B", X, A, X, False) if tall else ("a X + B X", A, X, X, False)


def measure(name, P, Q, add, symmetric, tiles, roofs):
    """Rows for one product: each tile beside cuBLAS and the floor."""
    (batch, M, K), N = P.shape, Q.shape[2]
    out = torch.empty(batch, M, N, device="cuda", dtype=torch.bfloat16)
    flops = 2 * batch * M * N * K
    operands = [Q if symmetric else P, *([] if symmetric else [Q]), out, *([] if add is None else [add])]
    traffic = 2 * sum(t.numel() for t in {t.data_ptr(): t for t in operands}.values())
    floor = 1e6 * max((0.5 if symmetric else 1.0) * flops / roofs[0], traffic / roofs[1])
    if add is None:
        cublas = graph_us(lambda: torch.bmm(P, Q, out=out))
    else:
        cublas = graph_us(lambda: torch.baddbmm(add, P, Q, beta=2.0, alpha=-1.5, out=out))
    turn = {"turn_p": P.stride(2) != 1, "turn_q": Q.stride(2) != 1}
    left, right = Operand(P.mT if turn["turn_p"] else P), Operand(Q.mT if turn["turn_q"] else Q)
    epilogue = {} if add is None else {"alpha": -1.5, "add": Operand(add), "beta": 2.0}
    target = Operand(out)
    for tile in tiles:
        us, low, high = graph_us(
            lambda t=tile: product(left, right, target, t, symmetric=symmetric, **turn, **epilogue)
        )
        shape = f"{batch} x {M} x {N}, K {K}"
        print(f"{name:12s} {shape:26s} {tuple(tile)!s:29s} {us:7.1f} us ({low:.1f} .. {high:.1f})", end="  ")
        print(f"cuBLAS {cublas[0]:6.1f} = {cublas[0] / us:.2f} x, floor {floor:5.1f} = {floor / us:.0%}")
        yield {
            "name": name, "shape": shape, "tile": tile, "us": us, "p20": low, "p80": high,
            "cublas_us": cublas[0], "floor_us": floor,
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true", help="time all candidate tiles")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    roofs, capability, rows = (matmul_rate(), copy_rate()), torch.cuda.get_device_capability(), []
    print(f"{torch.cuda.get_device_name()}: {roofs[0] / 1e12:.0f} TFLOP/s bf16, {roofs[1] / 1e12:.2f} TB/s measured")
    for shape in SHAPES:
        for name, P, Q, add, symmetric in cases(*shape):
            named = symmetric_tile(P.shape[1], capability) if symmetric else full_tile(capability)
            tiles = (SQUARE if symmetric else OBLONG) if args.tiles else (named,)
            rows += measure(name, P, Q, add, symmetric, tiles, roofs)
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
