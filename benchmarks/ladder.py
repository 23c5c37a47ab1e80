"""What every rung of the ladder costs and what it is worth, each run a process of its own; the table in docs/ladder.md.

    python -m benchmarks.ladder full --data DIR                    tokens/s, MFU, memory and start-up at full batch
    python -m benchmarks.ladder worth --data DIR --gpus-parallel 2 loss at equal time and at equal tokens, two seeds
    python -m benchmarks.ladder table                              docs/ladder.md from the results that there are

Words KEY=VALUE after the command are overrides of every rung. A finished run is never run again: its row lies in
--results, one small JSON file each. A run that fails says why and costs no other; after --stop-after seconds none is
started any more. "full" trains the rung's whole schedule shrunk to --steps, so that its windows are those of a real
run on average. In "worth" a step is 65,536 tokens, of 8 lanes, whatever the recipe has; schedules shrink in proportion
to the budget, rates stay. Rungs whose row is a whole lane get rows of 8,192 tokens, and sub3 is validated on four
times as many, as in record #21. Stages shrink with the batch: 65,536 is their largest.
"""

import argparse
from pathlib import Path

from benchmarks.ladder_runs import Job, job, run_jobs
from benchmarks.ladder_table import write_table
from nanosprint.config.edit import parse_overrides

RUNGS = ("gpt2", "gpt2-rotary", "muon", "modern", "residuals", "soap", "longwindow", "sub3")
RESULTS = Path("benchmarks/results/ladder")
DOC = Path("docs/ladder.md")
COMMON = {"eval.every": "0", "eval.tokens": str(2**20)}
SMALL_BATCH = {"train.batch_tokens": "65536"}
WORTH = {
    "longwindow": {"model.seq_len": "8192"},
    "sub3": {"model.seq_len": "8192", "eval.seq_len": "32768", "eval.batch_tokens": "65536"},
    "normuon": {"model.seq_len": "8192", "eval.seq_len": "32768", "eval.batch_tokens": "65536"},
}


def full_jobs(args: argparse.Namespace, words: dict[str, str]) -> list[Job]:
    """One run of each rung as its recipe has it, over the whole of a schedule of few steps."""
    return [
        job(
            "full",
            rung,
            f"{args.steps} steps",
            args.seeds[0],
            {**COMMON, "train.num_steps": str(args.steps), **words},
            data=args.data,
            cold=args.cold,
        )
        for rung in args.rungs
    ]


def worth_jobs(args: argparse.Namespace, words: dict[str, str]) -> list[Job]:
    """Every rung under both budgets with every seed; a rung's own runs follow each other, so that caches are warm."""
    budgets = [budget for budget in (args.seconds, args.tokens) if budget != "none"]
    return [
        job(
            "worth",
            rung,
            budget,
            seed,
            {**COMMON, **SMALL_BATCH, **WORTH.get(rung, {}), **words},
            data=args.data,
            budget=budget,
        )
        for rung in args.rungs
        for budget in budgets
        for seed in args.seeds
    ]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("command", choices=("full", "worth", "table"))
    top.add_argument("words", nargs="*", metavar="KEY=VALUE", help="overrides of every rung")
    top.add_argument("--rungs", type=_names, default=RUNGS, metavar="A,B")
    top.add_argument("--data", help="folder of shards; default: each recipe's own")
    top.add_argument("--seeds", type=_numbers, default=(1337, 1338), metavar="N,M", help="full: the first")
    top.add_argument("--results", type=Path, default=RESULTS, help="folder of rows")
    top.add_argument("--runs", type=Path, default=Path("runs/ladder"), help="folder of run directories")
    top.add_argument("--doc", type=Path, default=DOC, help="Markdown with the marks of the tables")
    top.add_argument("--gpus-parallel", type=int, default=1, metavar="N", help="runs at a time, a GPU each")
    top.add_argument("--stop-after", type=float, default=float("inf"), metavar="S", help="start no run later")
    top.add_argument("--steps", type=int, default=30, help="full: steps of each run")
    top.add_argument("--cold", action="store_true", help="full: compile everything anew, for honest start-up times")
    top.add_argument("--seconds", default="60s", metavar="60s|none", help="worth: budget of training time")
    top.add_argument("--tokens", default="20M", metavar="20M|none", help="worth: budget of tokens")
    return top


def main() -> None:
    args = parser().parse_intermixed_args()
    if args.command != "table":
        words = parse_overrides(args.words)
        jobs = full_jobs(args, words) if args.command == "full" else worth_jobs(args, words)
        run_jobs(jobs, args.results, args.runs, parallel=args.gpus_parallel, stop_after_s=args.stop_after)
    print(write_table(args.results, args.doc))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    main()
