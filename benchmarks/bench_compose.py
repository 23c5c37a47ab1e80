"""The composed maps' reading against its floor and the plain formula: `python -m benchmarks.bench_compose`, on a GPU.

6 heads of 128, a window of 112, documents of web-like lengths, as in the record. For each number of tokens: forward and
forward + backward of the operator, and of the reference compiled, with the ratio to the floor: the bytes that must move
(q, k, v, result; backward q, k, v, g and three gradients) at the copy rate measured on the same card. Both are compiled
and replayed from a CUDA graph, so that the host's time does not count. The reference takes long to compile: --seconds
bounds the start of new work.

--sweep times candidates for each kernel at 49,152 tokens, all other kernels as `tuning` has them, a line each: the
forward pass for maps and read, the backward pass for the rest. What it prints last is the best of each.
--profile shows each kernel's own time.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.bench_attention import timer_cuda
from benchmarks.bench_optim import copy_rate
from benchmarks.bench_symmetric import graph_us
from benchmarks.harness import write_rows
from benchmarks.inputs import Sizes, heads
from nanosprint.kernels.compose import backward, forward
from nanosprint.kernels.tuning import Band, ComposeBands, compose_bands
from nanosprint.ops.attention_backends.contract import first_key
from nanosprint.ops.compose import composed_read, composed_read_reference

TOKENS, HEADS, HEAD_DIM, WINDOW, SCALE = (16_384, 49_152, 196_608), 6, 128, 112, 0.1
SWEPT = 49_152

# What Triton 3.6 compiles for Hopper within its shared memory and without heavy spills, at the sizes above. `maps` and
# `dmaps` keep whole bands: few queries, or many warps to share them.
_BANDS = [Band(16, 128, stages, warps) for stages in (1, 2, 3) for warps in (4, 8)]
_BANDS += [Band(32, 64, stages, 8) for stages in (1, 2)]
_BANDS += [Band(64, 64, stages, warps) for stages in (1, 2, 3) for warps in (8, 16)]
_BANDS += [Band(64, 128, stages, 16) for stages in (1, 2)]
_TILES = [Band(64, 64, stages, 4) for stages in (1, 2, 3)]
_TILES += [Band(*tile, stages, 4) for tile in ((64, 32), (32, 64)) for stages in (1, 2)]
_WIDE = [Band(*tile, stages, 8) for tile in ((64, 64), (128, 64), (64, 128)) for stages in (1, 2)]
CANDIDATES = ComposeBands(
    maps=_BANDS,
    read=_TILES + _WIDE,
    dmaps=_BANDS,
    dq=_TILES + _WIDE[2:4],  # eight warps in front of 64 queries would do everything twice
    dk=_TILES + _WIDE[4:],
    dv=_TILES + _WIDE,
)


def inputs(tokens):
    """(q, k, v, w1, w2), documents, gradient of the result."""
    leaves, grad, documents = heads(Sizes(tokens=tokens), weights=2)
    return leaves, documents, grad


def floors_ms(tokens, rate):
    """(forward, forward + backward)."""
    tensor = 2 * tokens * HEADS * HEAD_DIM
    return 1e3 * 4 * tensor / rate, 1e3 * 11 * tensor / rate


def measure(name, function, tokens, rate):
    """One line and one row for a function at one size."""
    leaves, documents, grad = inputs(tokens)
    torch._dynamo.reset()
    begin = time.perf_counter()
    compiled = torch.compile(function, dynamic=False)

    def run():
        return compiled(*leaves, SCALE, WINDOW, documents)

    def run_both():
        return torch.autograd.grad(run(), leaves, grad)

    with torch.no_grad():
        run()
    run_both()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_both()
    peak_mb = (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.no_grad():
        forward_ms, _ = timer_cuda(run)
    both_ms, how = timer_cuda(run_both)
    floors = floors_ms(tokens, rate)
    print(
        f"{name:10s} {tokens:7d} tokens  forward {1e3 * forward_ms:8.1f} us = {forward_ms / floors[0]:5.2f} x floor  "
        f"both {1e3 * both_ms:8.1f} us = {both_ms / floors[1]:5.2f} x floor  {how}  {peak_mb:7.0f} MB  "
        f"first call {first_s:.1f} s",
        flush=True,
    )
    return {
        "name": name, "tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "window": WINDOW, "how": how,
        "forward_ms": forward_ms, "both_ms": both_ms, "floor_forward_ms": floors[0], "floor_both_ms": floors[1],
        "peak_mb": peak_mb, "first_s": first_s,
    }  # fmt: skip


def passes(tokens, bands):
    """The forward and the backward pass of the kernels alone, as functions without arguments."""
    leaves, documents, grad = inputs(tokens)
    tensors = [t.detach() for t in leaves]
    first = first_key(1, tokens, WINDOW - 1, documents, grad.device)
    _, *kept = forward(*tensors, first, SCALE, WINDOW, bands)
    return (
        lambda: forward(*tensors, first, SCALE, WINDOW, bands),
        lambda: backward(grad, *tensors, first, *kept, SCALE, WINDOW, bands),
    )


def sweep(bands, deadline):
    """A row for each candidate; the best of each kernel is printed last."""
    rows, best = [], bands
    for name in bands._fields:
        timed = {}
        for band in dict.fromkeys((getattr(bands, name), *getattr(CANDIDATES, name))):
            if time.monotonic() > deadline:
                break
            try:
                work = passes(SWEPT, bands._replace(**{name: band}))[name not in ("maps", "read")]
                timed[band], low, high = graph_us(work)
            except Exception as error:  # more shared memory than there is, most likely: not a candidate here
                print(f"{name:6s} {tuple(band)!s:18s} {type(error).__name__}: {str(error).strip()[:100]}", flush=True)
                continue
            mark = " (as it is)" if band == getattr(bands, name) else ""
            print(f"{name:6s} {tuple(band)!s:18s} {timed[band]:7.1f} us ({low:.1f} .. {high:.1f}){mark}", flush=True)
            rows.append({"kernel": name, "band": band, "us": timed[band], "p20": low, "p80": high})
        if timed:
            best = best._replace(**{name: min(timed, key=timed.get)})
    print(f"best: {best}")
    total = [graph_us(work)[0] for work in passes(SWEPT, best)]
    print(f"with these: forward {total[0]:.1f} us, backward {total[1]:.1f} us")
    return rows


def profile(bands):
    """Prints each kernel's microseconds."""
    both = passes(SWEPT, bands)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            for work in both:
                work()
        torch.cuda.synchronize()
    for event in trace.key_averages():
        if event.key.startswith("_"):
            print(f"{event.key:16s} {event.self_device_time_total / event.count:7.1f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time the candidates for each kernel")
    parser.add_argument("--profile", action="store_true", help="time each kernel by itself")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing new after that long")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    bands, rate, rows = compose_bands(torch.cuda.get_device_capability()), copy_rate(), []
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.2f} TB/s measured")
    for tokens in TOKENS:
        rows.append(measure("kernels", composed_read, tokens, rate))
    if args.profile:
        profile(bands)
    if args.sweep:
        rows += sweep(bands, deadline)
    for tokens in TOKENS:
        if time.monotonic() < deadline:
            rows.append(measure("reference", composed_read_reference, tokens, rate))
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
