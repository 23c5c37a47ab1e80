"""The loader without a model: tokens a second, beside the memory bandwidth of one thread.

    python -m benchmarks.bench_loader --data DIR [--seconds 2]

Prints one JSON object a row. `tokens_per_s` is the median over the repeats of consuming steps as fast as they come;
`bytes_per_s` counts what a token costs at least: 2 bytes read, 4 + 8 written. The roof is numpy copying a large array.
`check_s_per_1e9` is the time to go through the run on paper before its first step, for 1e9 training tokens.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.harness import write_rows
from nanosprint.data.loader import TokenLoader
from nanosprint.data.shards import find_shards, open_shard

BYTES_PER_TOKEN = 2 + 4 + 8
DOCUMENT_START = 50_256
MAX_DOCUMENT = 2048
CASES = (  # name, order, batch_tokens, seq_len, lanes, lanes_per_microbatch
    ("gpt2", "sequential", 524_288, 1024, 8, 8),
    ("gpt2, one lane", "sequential", 524_288, 1024, 8, 1),
    ("gpt2, shuffled", "shuffled", 524_288, 1024, 8, 8),
    ("shakespeare-like", "shuffled", 16_384, 128, 8, 8),
    ("small batch", "sequential", 4_096, 64, 8, 8),
    ("documents in lanes", "documents", 393_216, 49_152, 8, 8),
    ("documents, one lane", "documents", 393_216, 49_152, 8, 1),
)
NUM_STEPS = {"sequential": 1 << 15, "shuffled": 1 << 15, "documents": 1 << 10}


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of one thread copying 256 MB."""
    source = np.ones(1 << 28, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    best = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    return 2 * source.nbytes / best


def measure(shards: list[Path], case: tuple, seconds: float, device: str) -> tuple[float, float]:
    """Tokens a second of one pass over the case, for about `seconds`; and seconds to open it, for 1e9 tokens."""
    _, order, batch_tokens, seq_len, lanes, k = case
    shape = SimpleNamespace(batch_tokens=batch_tokens, seq_len=seq_len, max_document=MAX_DOCUMENT)
    began = time.perf_counter()
    loader = TokenLoader(
        shards,
        lambda step: shape,
        num_steps=NUM_STEPS[order],
        lanes=lanes,
        lanes_per_microbatch=k,
        vocab_size=65_536,
        order=order,
        epochs=1e9,
        document_start=DOCUMENT_START if order == "documents" else None,
        device=device,
    )
    opening_s = (time.perf_counter() - began) * 1e9 / (NUM_STEPS[order] * batch_tokens)
    with loader:
        steps = iter(loader)
        for _ in range(8):
            next(steps)
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds and next(steps, None) is not None:
            count += 1
        if device == "cuda":
            torch.cuda.synchronize()
        return count * batch_tokens / (time.perf_counter() - began), opening_s


def _seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of GPT-2 shards")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="append the rows to this file, with versions and commit")
    args = parser.parse_args()
    shards = find_shards(args.data, "train")
    for shard in shards:
        open_shard(shard).max()  # into the page cache
    roof = copy_bandwidth()
    for case in CASES:
        found = [measure(shards, case, args.seconds / args.repeats, args.device) for _ in range(args.repeats)]
        rates = sorted(rate for rate, _ in found)
        row = {
            "bench": "loader",
            "case": case[0],
            "order": case[1],
            "batch_tokens": case[2],
            "seq_len": case[3],
            "tokens_per_s": round(statistics.median(rates)),
            "ms_per_step": round(1000 * case[2] / statistics.median(rates), 3),
            "check_s_per_1e9": round(statistics.median(opening_s for _, opening_s in found), 3),
            "p20": round(rates[len(rates) // 5]),
            "p80": round(rates[-1 - len(rates) // 5]),
            "bytes_per_s": round(statistics.median(rates) * BYTES_PER_TOKEN),
            "roof_bytes_per_s": round(roof),
            "device": args.device,
        }
        print(json.dumps(row), flush=True)
        write_rows([row], args.out)


if __name__ == "__main__":
    main()
