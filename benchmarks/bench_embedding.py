"""Gradients of look-ups by sorted segments: `python -m benchmarks.bench_embedding [--sweep] [--json FILE]`, on a GPU.

The record's three tables in bf16: tokens (50,304 x 768), hashed pairs (377,280 x 768) and five value tables (50,304 x
3840), looked up by 131,072 and 196,608 ids whose shares are 1 / rank, as in a text. For each of them:

    ours        the operator, which adds to a gradient that is there: rows looked up are read and written, no others;
                the sort, which look-ups of the same ids share, is timed by itself
    and fill    the same with a gradient of zeros made for it, as where autograd adds it to the parameter's
    torch       embedding_dense_backward; for the value tables with the concatenation that it needs
    inductor    the same compiled: a kernel with atomic additions (at the larger number of ids)

The floor is the bytes at the rate of a copy: for "ours" gradients, and rows looked up twice; else gradients and the
whole table. --sweep tries run lengths, columns and warps instead of what `tuning` names. "error" is the distance from
sums in fp64 over their length; one rounding to bf16 is 1.7e-3. Times are device times: median with 20th and 80th
percentile.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.bench_optim import copy_rate, time_ms
from benchmarks.harness import write_rows
from benchmarks.inputs import Sizes
from nanosprint.kernels import embedding as kernels
from nanosprint.model.techniques.bigram import bigram_rows
from nanosprint.ops.embedding import sort_rows

DIM, VOCAB, PAIRS = 768, 50_304, 377_280
NUMBERS = (131_072, 196_608)
TABLES = {"tokens": (VOCAB, 1), "pairs": (PAIRS, 1), "value tables": (VOCAB, 5)}  # rows, parts
TILES = [
    (32, 256, 1), (64, 256, 1), (128, 256, 1), (64, 128, 1), (64, 256, 2), (64, 512, 2), (64, 1024, 4), (128, 1024, 4),
]  # fmt: skip


def ours(grads, rows, table):
    """The operator: gradients added to a table."""
    torch.ops.nanosprint.add_rows(table, grads, list(range(len(grads))), rows.order, rows.sorted_ids)
    return table


def and_fill(grads, rows, size):
    """The operator with a table of its own."""
    return ours(grads, rows, torch.zeros(size, DIM * len(grads), dtype=torch.bfloat16, device="cuda"))


def dense_backward(grads, ids, size):
    """What autograd does with a look-up and a split."""
    grad = grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)
    return torch.ops.aten.embedding_dense_backward(grad, ids, size, -1, False)


def error(table, grads, ids):
    """Distance from the sums in fp64, relative, of the first part."""
    exact = torch.zeros(len(table), DIM, dtype=torch.float64, device="cuda").index_add_(0, ids, grads[0].double())
    return float((table[:, :DIM].double() - exact).norm() / exact.norm())


def measure(name, num, ids, rate, tiles, compiled):
    """Rows for one table and one number of ids."""
    size, count = TABLES[name]
    grads = [torch.randn(num, DIM, device="cuda").bfloat16() for _ in range(count)]
    rows, touched = sort_rows(ids), len(ids.unique())
    table = torch.zeros(size, DIM * count, dtype=torch.bfloat16, device="cuda")
    works = {f"ours, tile {tile}": (tile, lambda: ours(grads, rows, table)) for tile in tiles}
    if len(tiles) == 1:
        works["ours and fill"] = (None, lambda: and_fill(grads, rows, size))
    works["torch"] = (None, lambda: dense_backward(grads, ids, size))
    if num == NUMBERS[-1]:
        works["inductor"] = (None, lambda: compiled(grads, ids, size))
    for what, (tile, work) in works.items():
        if tile is not None:
            kernels.EMBEDDING = tile
        floor = 1e3 * 2 * DIM * count * (num + (size if tile is None else 2 * touched)) / rate
        ms, low, high = time_ms(work, "cuda", 15)
        table.zero_()
        off = error(work(), grads, ids)
        print(f"{name:12s} {num:7,d} ids  {what:28s} {ms:7.3f} ms ({low:.3f} .. {high:.3f})", end="  ")
        print(f"floor {floor:.3f} ms = {floor / ms:.0%}, error {off:.1e}", flush=True)
        yield {
            "name": f"{name}, {what}", "ids": num, "ms": ms, "p20": low, "p80": high, "floor_ms": floor, "error": off,
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try run lengths, columns and warps")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    rate, lines = copy_rate(), []
    tiles = TILES if args.sweep else [kernels.EMBEDDING]
    compiled = torch.compile(dense_backward, dynamic=False)
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.2f} TB/s copied")
    for num in NUMBERS:
        tokens = Sizes(tokens=num).text_ids(num)
        pairs = bigram_rows(tokens[None], PAIRS)[0]
        ms, low, high = time_ms(lambda ids=tokens: sort_rows(ids), "cuda", 15)
        hottest = float(tokens.bincount().max()) / num
        print(f"sort {num:,d} ids, the hottest {hottest:.1%} of them: {ms:.3f} ms ({low:.3f} .. {high:.3f})")
        lines.append({"name": "sort", "ids": num, "ms": ms, "p20": low, "p80": high})
        for name in TABLES:
            lines += measure(name, num, pairs if name == "pairs" else tokens, rate, tiles, compiled)
    write_rows(lines, args.json)


if __name__ == "__main__":
    main()
