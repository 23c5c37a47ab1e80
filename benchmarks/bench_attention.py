"""Every attention back end that runs here, forward and forward + backward: `python benchmarks/bench_attention.py`.

Packed: one row of T tokens, 6 heads of 128, documents of web-like lengths, windows as in the recipes. Dense: 64 rows of
1,024 tokens, 12 heads of 64. Beside each time stand the useful TFLOP/s (4 H K per visible pair of query and key
forward, 3.5 times that with backward) and its ratio to the floor: the larger of useful arithmetic at the matrix rate
and compulsory bytes (q, k, v, out; with backward 3 times as many) at the copy bandwidth of an H200. On a CPU, small
shapes and no floor.

On a GPU the calls are captured into a graph, so that launches from Python do not count; "eager" marks what refused
capture. `--seconds` bounds the whole run: what compiles (flex, fa4, triton) is left out once half of it is over.

`--sweep-tiles` times every candidate tile of back end triton's three kernels instead (`kernels/tuning.py`), compiled in
threads beforehand. Each kernel has its own floor: 4, 6 and 8 H K FLOPs a visible pair, and each of its tensors moved
once. What does not compile or does not fit says so and is passed over.
"""

import argparse
import contextlib
import logging
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks.floors import visible_pairs
from benchmarks.harness import graph_ms, write_rows
from nanosprint.kernels import has_gluon, has_triton, tuning
from nanosprint.ops.attention import Call, available, backend, choose, reference
from nanosprint.ops.attention_backends.measure import sample_documents
from nanosprint.ops.attention_backends.probe import relative_error
from nanosprint.ops.attention_backends.table import TABLE

MATRIX_RATE, BANDWIDTH = 790e12, 4.3e12  # measured on an H200: bf16 product of 8192³, device-to-device copy

# rows, tokens of a row, heads, head size, window, longest document (None: dense)
PACKED = [
    (1, 16_384, 6, 128, 128, 896),
    (1, 16_384, 6, 128, 384, 896),
    (1, 49_152, 6, 128, 640, 2048),
    (1, 49_152, 6, 128, 1408, 2048),
    (1, 131_072, 6, 128, 640, 2048),
    (1, 131_072, 6, 128, 1408, 2048),
    (1, 131_072, 6, 128, 128, 896),
    (1, 49_152, 6, 128, 128, 896),
    (1, 49_152, 6, 128, 384, 896),
    (1, 16_384, 6, 128, 640, 2048),
    (1, 16_384, 6, 128, 1408, 2048),
    (1, 131_072, 6, 128, 384, 896),
]
DENSE = [(64, 1024, 12, 64, None, None)]
ON_CPU = [(1, 4096, 4, 32, 128, 896), (1, 4096, 4, 32, 640, 2048), (8, 256, 4, 32, None, None)]
# tokens, heads, head size, window, longest document, heads of a token that are laid one after the other
SWEEP = [
    (16_384, 6, 128, 128, 896, 1),
    (49_152, 6, 128, 640, 2048, 1),
    (49_152, 6, 128, 1408, 2048, 1),
    (98_304, 3, 128, 640, 2048, 2),
    (196_608, 6, 128, 640, 2048, 1),
]
# kernel: (its tiles, FLOPs a visible pair and element of a head, tensors moved)
KERNELS = {
    "forward": (tuning.ATTENTION_FORWARD, 4, 4),
    "gradient_q": (tuning.ATTENTION_GRADIENT_Q, 6, 6),
    "gradient_kv": (tuning.ATTENTION_GRADIENT_KV, 8, 6),
}


def floors_ms(case, pairs, elem=2):
    """(forward, forward + backward): no version can be much faster."""
    rows, seq_len, heads, head_dim, *_ = case
    flops, nbytes = 4 * pairs * heads * head_dim, 4 * rows * seq_len * heads * head_dim * elem
    return tuple(1e3 * max(f * flops / MATRIX_RATE, b * nbytes / BANDWIDTH) for f, b in ((1, 1), (3.5, 3)))


def timer_cuda(work, repeats=20, inner=5):
    """Median milliseconds of `work`, and how it was run."""
    try:
        return graph_ms(work, inner, repeats)[0], "graph"
    except Exception:  # whatever a library does that cannot be captured: time it as it is, and say so
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times[1:]), "eager"


def timer_cpu(work, repeats=5):
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), "eager"


def measure(name, case, device, dtype):
    """One back end at one shape: a row of results."""
    rows, seq_len, heads, head_dim, window, longest = case
    documents = None if longest is None else sample_documents(rows, seq_len, longest, device)
    torch.manual_seed(0)
    q, k, v, weight = (torch.randn(rows, seq_len, heads, head_dim, device=device, dtype=dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    attend, scale, timer = backend(name), head_dim**-0.5, timer_cuda if device.type == "cuda" else timer_cpu

    def forward():
        return attend(*leaves, scale, window, documents)

    def both():
        return torch.autograd.grad(forward(), leaves, weight)

    with torch.no_grad():
        n = min(seq_len, 1024)  # the start of the first row sees nothing else, so the reference can do it alone
        first = None if documents is None else type(documents)(documents.cu_seqlens.clamp_max(n), longest)
        error = relative_error(forward()[:1, :n], reference(q[:1, :n], k[:1, :n], v[:1, :n], scale, window, first))
        forward_ms, how = timer(forward)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    both_ms, how = timer(both)
    pairs = visible_pairs(rows, seq_len, window, documents)
    floors, flops = floors_ms(case, pairs, dtype.itemsize), 4 * pairs * heads * head_dim
    return {
        "backend": name,
        "rows": rows,
        "seq_len": seq_len,
        "heads": heads,
        "head_dim": head_dim,
        "window": window,
        "keys": pairs / (rows * seq_len),
        "documents": None if documents is None else int((documents.cu_seqlens.diff() > 0).sum()),
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "forward_tflops": flops / forward_ms / 1e9,
        "both_tflops": 3.5 * flops / both_ms / 1e9,
        "forward_over_floor": forward_ms / floors[0],
        "both_over_floor": both_ms / floors[1],
        "how": how,
        "error": error,
        "peak_mb": torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None,
    }


def show(row):
    memory = "" if row["peak_mb"] is None else f"{row['peak_mb']:8.0f} MB"
    ratios = "" if memory == "" else f"  {row['forward_over_floor']:6.2f} / {row['both_over_floor']:6.2f} x floor"
    print(
        f"  {row['backend']:9s} {1e3 * row['forward_ms']:9.1f} / {1e3 * row['both_ms']:9.1f} us"
        f"  {row['forward_tflops']:7.4g} / {row['both_tflops']:7.4g} TFLOP/s{ratios}"
        f"  {row['how']:5s} error {row['error']:.1e} {memory}",
        flush=True,
    )


def run(cases, names, device, dtype, deadline, rows):
    for case in cases:
        if time.monotonic() > deadline:
            return
        B, S, H, K, window, longest = case
        documents = None if longest is None else sample_documents(B, S, longest, torch.device("cpu"))
        pairs = visible_pairs(B, S, window, documents)
        floors = floors_ms(case, pairs, dtype.itemsize)
        text = f"{B} x {S}, {H} heads of {K}, window {window}, {pairs / (B * S):.0f} keys a query"
        floor = f"; floor {1e3 * floors[0]:.1f} / {1e3 * floors[1]:.1f} us" if device.type == "cuda" else ""
        print(text + floor, flush=True)
        for name in names:
            if name in ("cudnn", "flash") and longest is not None:
                continue
            if time.monotonic() > deadline:
                continue
            torch._dynamo.reset()  # one compiled flex per shape would run into the limit on recompilations
            try:
                rows.append(measure(name, case, device, dtype))
                show(rows[-1])
            except Exception as error:
                print(f"  {name:9s} {type(error).__name__}: {str(error).strip().splitlines()[0][:150]}", flush=True)


def sweep_inputs(case, device):
    """What the three kernels take, and the documents. Paired layers have documents of twice the length."""
    from nanosprint.kernels import attention

    T, H, K, window, longest, places = case
    documents = sample_documents(1, T // places, longest, device)
    documents = documents._replace(cu_seqlens=documents.cu_seqlens * places, max_seq_len=longest * places)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(T, H, K, device=device, dtype=torch.bfloat16) for _ in range(4))
    shared = (documents.cu_seqlens, window, K**-0.5)
    default = tuning.attention_tiles(torch.cuda.get_device_capability(device), has_gluon)
    out, lse = attention.forward(q, k, v, *shared, default[0])
    _, norms = attention.gradient_q(grad, q, k, v, out, lse, *shared, default[1])
    calls = {
        "forward": partial(attention.forward, q, k, v, *shared),
        "gradient_q": partial(attention.gradient_q, grad, q, k, v, out, lse, *shared),
        "gradient_kv": partial(attention.gradient_kv, grad, q, k, v, norms, *shared),
    }
    return calls, documents


@contextlib.contextmanager
def compiled_kernels(found):
    """Within it, `found` gains every compiled kernel that is launched."""
    from nanosprint.kernels import attention

    original = attention.launch

    def launch(*args):
        found.append(original(*args))

    attention.launch = launch
    try:
        yield
    finally:
        attention.launch = original


def compile_tiles(device):
    """What is wrong with each (kernel, tile), or None. In threads; a second time, alone, where that failed."""
    calls, _ = sweep_inputs((256, 2, 128, 64, 100, 1), device)
    jobs = [(name, tile) for name, (tiles, *_) in KERNELS.items() for tile in tiles]

    def attempt(job):
        try:
            calls[job[0]](job[1])
            torch.cuda.synchronize(device)
        except Exception as error:  # a compiler and a driver have many ways to say no
            return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        return None

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        wrong = dict(zip(jobs, pool.map(attempt, jobs), strict=True))
    return {job: attempt(job) if reason else None for job, reason in wrong.items()}


def resources(call, tile):
    """Registers a thread, bytes spilled and shared memory of the compiled kernel; whether it loads ahead."""
    found = []
    with compiled_kernels(found):
        call(tile)
    (kernel,) = found
    late = "" if "cp.async" in kernel.asm["ptx"] else " NOT PIPELINED"
    return f"{kernel.n_regs:3d} regs {kernel.n_spills:3d} spilt {kernel.metadata.shared / 1024:4.0f} KiB{late}"


def sweep(device, deadline):
    """Rows of results: microseconds of every kernel, tile and shape."""
    begin, rows = time.monotonic(), []
    wrong = compile_tiles(device)
    print(f"compiled in {time.monotonic() - begin:.1f} s; microseconds, multiples of the floor", flush=True)
    for (name, tile), reason in wrong.items():
        if reason is not None:
            print(f"  {name} {tile}: {reason}", flush=True)
    for case in SWEEP:
        if time.monotonic() > deadline:
            break
        calls, documents = sweep_inputs(case, device)
        rows += sweep_case(case, calls, documents, wrong)
    return rows


def sweep_case(case, calls, documents, wrong):
    T, H, K, window, longest, places = case
    pairs, rows, best = visible_pairs(1, T, window, documents), [], []
    print(f"{T} tokens, {H} heads of {K}, window {window}, {pairs / T:.0f} keys a query", flush=True)
    for name, (tiles, flops, tensors) in KERNELS.items():
        floor = 1e6 * max(flops * pairs * H * K / MATRIX_RATE, 2 * tensors * T * H * K / BANDWIDTH)
        times = {}
        for tile in tiles:
            if wrong[name, tile] is None:
                try:
                    times[tile] = 1e3 * timer_cuda(partial(calls[name], tile), repeats=8)[0]
                except Exception as error:
                    print(f"  {name} {tile}: {type(error).__name__}: {str(error).strip()[:150]}", flush=True)
        for tile, us in times.items():
            mark = " <- best" if us == min(times.values()) else ""
            about = resources(calls[name], tile)
            print(f"  {name:11s} {tile!s:18s} {us:8.1f} us {us / floor:5.2f} x  {about}{mark}", flush=True)
            shape = {"tokens": T, "heads": H, "head_dim": K, "window": window, "longest": longest * places}
            rows.append({"kernel": name, "tile": str(tile), **shape, "us": us, "floor_us": floor})
        best.append(min(times.values(), default=float("nan")))
    print(f"  best: forward {best[0]:.1f} us, forward + backward {sum(best):.1f} us", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", help="comma-separated; default: all that run here but reference")
    parser.add_argument(
        "--choose", action="store_true", help="show what exec.attention=auto takes, and how long that is"
    )
    parser.add_argument("--sweep-tiles", action="store_true", help="time the tiles of back end triton, nothing else")
    parser.add_argument("--shapes", choices=["all", "packed", "dense"], default="all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing new after that long")
    parser.add_argument("--json", type=Path, help="append the rows here")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    start = time.monotonic()
    if args.sweep_tiles:
        if device.type != "cuda" or not has_triton():
            parser.error("--sweep-tiles wants a CUDA device and Triton")
        write_rows(sweep(device, start + args.seconds), args.json)
        return
    names = args.backends.split(",") if args.backends else []
    for name, reason in available(device, dtype, head_dim=128).items():
        if not args.backends and reason is None and name != "reference":
            names.append(name)
        print(f"{name:9s} {reason or 'runs here'}")
    quick = [name for name in names if not TABLE[name].compiles]
    slow = [name for name in names if TABLE[name].compiles]
    rows, cases = [], DENSE + PACKED if device.type == "cuda" else ON_CPU
    cases = [case for case in cases if args.shapes in ("all", "dense" if case[-1] is None else "packed")]
    if args.choose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("nanosprint").setLevel(logging.INFO)
        for B, S, H, K, window, longest in cases[:2]:
            begin = time.perf_counter()
            call = Call(rows=B, seq_len=S, num_heads=H, head_dim=K, window=window, longest=longest)
            name = choose(device, dtype, [call])
            print(f"choose: {name} for {B} x {S} in {time.perf_counter() - begin:.2f} s", flush=True)
    run(cases, quick, device, dtype, start + args.seconds / 2, rows)
    if slow:
        run(cases, slow, device, dtype, start + args.seconds, rows)
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
