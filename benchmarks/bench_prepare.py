"""`nanosprint data prepare` on real text: megabytes of text a second.

    python -m benchmarks.bench_prepare --text FILE.txt
    python -m benchmarks.bench_prepare --corpus DIR [--megabytes 60]

With --corpus the text is decoded from a folder of GPT-2 shards. Prints one JSON object a row; the time is
that of the whole call, loading the tokenizer, reading, and writing the shards to disk included.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.harness import write_rows
from nanosprint.data.prepare import prepare
from nanosprint.data.shards import find_shards, open_shard
from nanosprint.data.tokenizers import load_tokenizer


def real_text(corpus: Path, target: Path, num_bytes: int) -> None:
    """Write about `num_bytes` of a folder of GPT-2 shards as text, documents separated by lines of <|endoftext|>."""
    tokenizer = load_tokenizer(None, "gpt2")
    with open(target, "wb") as file:
        for shard in find_shards(corpus, "train"):
            tokens = open_shard(shard)
            for start in range(0, len(tokens), 100_000):
                text = tokenizer.decode(tokens[start : start + 100_000].tolist())
                file.write(text.replace("<|endoftext|>", "\n<|endoftext|>\n").encode())
                if file.tell() >= num_bytes:
                    return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path)
    source.add_argument("--corpus", type=Path)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the rows to this file, with versions and commit")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = args.text or Path(folder) / "text.txt"
        if args.text is None:
            real_text(args.corpus, text, args.megabytes * 1_000_000)
        for kind in ("gpt2", "bytes", "chars"):
            for threads in (1, os.cpu_count() or 1):
                runs = [
                    prepare([text], kind, Path(folder) / "out", overwrite=True, processes=threads)
                    for _ in range(args.repeats)
                ]
                best = min(runs, key=lambda run: run.seconds)
                rates = sorted(round(run.text_bytes / run.seconds / 1e6, 1) for run in runs)
                row = {
                    "bench": "prepare",
                    "tokenizer": kind,
                    "threads": threads,
                    "text_mb": round(best.text_bytes / 1e6, 1),
                    "tokens": best.train_tokens + best.val_tokens,
                    "documents": best.documents,
                    "mb_per_s": rates[len(rates) // 2],
                    "all_mb_per_s": rates,
                    "cores": os.cpu_count(),
                }
                print(json.dumps(row), flush=True)
                write_rows([row], args.out)


if __name__ == "__main__":
    main()
