"""A recipe on 1, 2, ... GPUs of one host: steps by stage, communication, a whole training; for docs/scaling.md.

    python -m benchmarks.scaling record-third exec.attention=triton --gpus 1,2 --out FOLDER
    python -m benchmarks.scaling record-third exec.attention=triton --gpus none --train 1,2 --data DIR --out FOLDER
    python -m benchmarks.scaling gpt2 --gpus 1,2,4,8 --out FOLDER
    python -m benchmarks.scaling table

Every number of GPUs is a launch of its own, so that one that fails, or takes longer than `--limit` seconds, costs no
other; what it had measured stays. Steps are timed as by `bench_step`, on random tokens that differ between processes,
in every stage of the recipe, or in its middle where it has none. With `--train` the recipe is then trained by
`nanosprint train --gpus N`: its record and metrics are copied into FOLDER. `--one-gpu RUN` puts an earlier run on one
GPU (a run directory, or a record) beside them in place of one trained here. `--cold` gives every training empty
compiler caches, and afterwards starts it once more with those that it filled.

Rows are appended to FOLDER/RECIPE.jsonl, and the tables of all rows in FOLDER are printed. "table" writes those of
benchmarks/results/scaling into docs/scaling.md.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import write_rows
from benchmarks.scaling_table import tables, write_tables
from nanosprint.config.edit import parse_overrides
from nanosprint.recipes import load_recipe
from nanosprint.results.metrics import read_metrics
from nanosprint.results.record import RunRecord

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOC = ROOT / "benchmarks/results/scaling", ROOT / "docs/scaling.md"
_GRACE_S = 30.0  # for a launcher to end its processes
# NVLink multicast stays off, also in what does not go through NCCL, unless the user says otherwise.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def steps_command(args: argparse.Namespace, gpus: int, rows: Path) -> list[str]:
    """What measures steps on so many GPUs."""
    launcher = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(gpus), "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", "--local-addr", "localhost", "-m"]
    command = [sys.executable, "-m", *(launcher if gpus > 1 else []), "benchmarks.scaling_worker"]
    command += [args.recipe, *args.overrides, "--steps", str(args.steps), "--profile", str(args.profile)]
    return [*command, "--out", str(rows)]


def train_command(args: argparse.Namespace, gpus: int, run_dir: Path) -> list[str]:
    """What trains the recipe on so many GPUs."""
    command = [sys.executable, "-m", "nanosprint", "train", args.recipe, *args.overrides, "--gpus", str(gpus)]
    command += ["--seed", str(args.seed), "--out", str(run_dir)]
    return command if args.data is None else [*command, "--data", str(args.data.resolve())]


def run(command: Sequence[str], limit_s: float, more: Mapping[str, str]) -> str | None:
    """Run it in the repository with `more` in its environment; None, or why it failed."""
    environment = {**NO_MULTICAST, **os.environ, **more}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # which the launcher passes on
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return f"took more than {limit_s:g} s"
    return f"ended with code {code}" if code else None


def measure_steps(args: argparse.Namespace, gpus: int, rows: Path) -> str | None:
    # torchrun would set one thread for each process; `set_threads` divides the machine's cores among them.
    cores = str(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return run(steps_command(args, gpus, rows), args.limit, {"OMP_NUM_THREADS": cores} if gpus > 1 else {})


def train(args: argparse.Namespace, gpus: int, rows: Path) -> str | None:
    """Train on so many GPUs and write the row; None, or why that failed."""
    name = f"{args.recipe}-{args.seed}-{gpus}gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = args.runs.resolve() / name
    with tempfile.TemporaryDirectory() as caches:
        folders = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        more = folders if args.cold else {}
        failure = run(train_command(args, gpus, run_dir), args.limit, more)
        if failure is not None:
            return failure
        row = {
            "variant": parse_overrides(args.overrides),
            **training_row(run_dir),
            "cold": args.cold,
            "warm_start_s": None,
        }
        for path in (run_dir / "record.json", run_dir / "metrics.jsonl"):
            shutil.copy(path, rows.parent / f"{args.recipe}-{args.seed}-{gpus}gpu.{path.name}")
        write_rows([row], rows)
        if args.cold:
            again = run_dir.with_name(f"{name}-warm")
            failure = run([*train_command(args, gpus, again), "--max-steps", "1"], args.limit, more)
            if failure is None:
                warm_start_s = RunRecord.load(again).startup_ms / 1000
                write_rows([{**row, "warm_start_s": warm_start_s}], rows)  # tables take the newest
            shutil.rmtree(again, ignore_errors=True)  # gigabytes of checkpoints
    return failure and f"the second start {failure}"


def training_row(run: Path) -> dict[str, Any]:
    """What a run directory, or a record with its metrics beside it, says of a whole training."""
    record = RunRecord.load(run)
    metrics = run / "metrics.jsonl" if run.is_dir() else _metrics_beside(run)
    lines = list(read_metrics(metrics)) if metrics.exists() else []
    curve = {line["step"]: line["loss"] for line in lines if line["kind"] == "val"}
    differing = [line["differing"] for line in lines if line.get("name") == "agreement"]
    return {
        "benchmark": "training", "recipe": record.recipe["name"], "gpus": record.world_size, "seed": record.seed,
        "status": record.status, "steps": record.steps, "tokens": record.tokens, "train_s": record.train_ms / 1000,
        "startup_s": record.startup_ms / 1000, "tokens_per_s": record.tokens_per_s, "energy_j": record.energy_j,
        "val_loss": record.val_loss, "val_curve": sorted(curve.items()),
        "differing": differing[-1] if differing else None, "execution": record.execution,
        "memory_gib": None if record.peak_memory_bytes is None else record.peak_memory_bytes / 2**30,
        "measured": {"commit": record.commit, "dirty": record.dirty, "versions": record.versions,
                     "devices": record.devices},
    }  # fmt: skip


def _metrics_beside(record: Path) -> Path:
    """NAME.metrics.jsonl of NAME.json or NAME.record.json."""
    return record.with_name(f"{record.name.removesuffix('.json').removesuffix('.record')}.metrics.jsonl")


def measure_all(args: argparse.Namespace) -> list[str]:
    """Everything that was asked for; what failed."""
    load_recipe(args.recipe, {k: v for k, v in parse_overrides(args.overrides).items() if not k.startswith("exec.")})
    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out.resolve() / f"{args.recipe}.jsonl"
    failures = []
    if args.one_gpu is not None:
        row = {"variant": parse_overrides(args.overrides), **training_row(args.one_gpu)}
        write_rows([{**row, "cold": None, "warm_start_s": None, "earlier": args.one_gpu.name}], rows)
    jobs = [("steps", measure_steps, gpus) for gpus in args.gpus] + [("training", train, gpus) for gpus in args.train]
    for what, work, gpus in jobs:
        start = time.perf_counter()
        print(f"--- {what} of {args.recipe} on {gpus}", flush=True)
        failure = work(args, gpus, rows)
        print(f"--- {what} on {gpus}: {failure or 'done'} after {time.perf_counter() - start:.0f} s", flush=True)
        failures += [f"{what} on {gpus}: {failure}"] * (failure is not None)
    return failures


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(word) for word in text.split(","))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("recipe", help='a recipe, or "table"')
    top.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    top.add_argument("--gpus", type=_numbers, default=(1,), metavar="1,2|none", help="measure steps on so many")
    top.add_argument("--steps", type=int, default=6, help="timed, of every kind")
    top.add_argument("--profile", type=int, default=2, metavar="STEPS", help="profiled; 0: no figures of communication")
    top.add_argument("--train", type=_numbers, default=(), metavar="1,2", help="train the whole recipe on so many")
    top.add_argument("--data", type=Path, metavar="DIR", help="of --train; default: the recipe's own")
    top.add_argument("--seed", type=int, default=1337, help="of --train")
    top.add_argument("--cold", action="store_true", help="--train with empty compiler caches, then a warm start")
    top.add_argument("--one-gpu", type=Path, metavar="RUN", help="an earlier run on one GPU, to compare with")
    top.add_argument("--runs", type=Path, default=Path("runs/scaling"), help="folder of run directories")
    top.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds for each launch")
    top.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    return top


def main() -> None:
    top = parser()
    args = top.parse_intermixed_args()
    if args.recipe == "table":
        print(write_tables(args.out, DOC))
        return
    try:
        failures = measure_all(args)
    except ValueError as error:
        top.error(str(error))
    print(tables(args.out))
    if failures:
        raise SystemExit("; ".join(failures))


if __name__ == "__main__":
    main()
