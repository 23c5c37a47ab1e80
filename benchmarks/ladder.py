"""What every rung of the ladder costs and what it is worth, by runs of nanosprint; the table in docs/ladder.md.

    python -m benchmarks.ladder full --data DIR                    tokens/s, MFU, memory and start-up at full batch
    python -m benchmarks.ladder worth --data DIR --gpus-parallel 2 loss at equal time and at equal tokens, two seeds
    python -m benchmarks.ladder table                              docs/ladder.md from the results that there are

Words KEY=VALUE after the command are overrides of every rung. A finished run is never run again: its row lies in
--results, one small JSON file each. A run that fails says why and costs no other; after --stop-after seconds none is
started any more. The runs of a rung follow each other on one GPU in one process, and share what it has compiled; those
with --cold have a process each. "full" trains the rung's whole schedule shrunk to --steps, so that its windows are
those of a real run on average. In "worth" a step is --step-tokens, of 8 lanes, whatever the recipe has; schedules
shrink in proportion to the budget, rates stay. Rungs whose row is a whole lane get rows as long as that, and from sub3
on rungs are validated on rows of four times as many tokens, as in record #21. Stages shrink with the batch:
--step-tokens is the mean of the three that paired and record have.
"""

import argparse
from pathlib import Path

from benchmarks.ladder_runs import Job, run_jobs
from benchmarks.ladder_table import write_table
from nanosprint.config.edit import parse_overrides

RUNGS = (
    "gpt2", "gpt2-rotary", "muon", "modern", "residuals", "soap", "longwindow", "sub3", "normuon", "paired", "record",
)  # fmt: skip
LONG_ROWS = ("longwindow", "sub3", "normuon")  # whose row is a whole lane,
STAGED = ("paired", "record")  # and of these in each stage
FOUR_FOLD = ("sub3", "normuon", *STAGED)  # validated on rows of four times as many tokens
LANES = 8
RESULTS = Path("benchmarks/results/ladder")
DOC = Path("docs/ladder.md")
COMMON = {"eval.every": "0", "eval.tokens": str(2**20)}


def small_batch(rung: str, step_tokens: int) -> dict[str, str]:
    """Overrides that give a rung steps of so many tokens, on average where its stages have batches of their own.

    Those grow as 1 : 2 : 3, so that the largest is half as much again, and all lanes stay whole multiples of 128, which
    products in FP8 need.
    """
    staged = rung in STAGED
    batch = step_tokens * 3 // 2 if staged else step_tokens
    words = {"train.batch_tokens": str(batch)}
    if rung in LONG_ROWS or staged:
        words["model.seq_len"] = str(batch // LANES)
    if rung in FOUR_FOLD:
        words |= {"eval.seq_len": str(step_tokens // LANES * 4), "eval.batch_tokens": str(2**16)}
    return words


def full_jobs(args: argparse.Namespace, words: dict[str, str]) -> list[Job]:
    """One run of each rung as its recipe has it, over the whole of a schedule of few steps."""
    overrides = {**COMMON, "train.num_steps": str(args.steps), **words}
    return [
        Job(
            kind="full",
            rung=rung,
            setting=f"{args.steps} steps",
            seed=args.seeds[0],
            overrides=overrides,
            cold=args.cold,
            data=args.data,
        )
        for rung in args.rungs
    ]


def worth_jobs(args: argparse.Namespace, words: dict[str, str]) -> list[Job]:
    """Every rung under both budgets with every seed; a rung's own runs follow each other, in one process."""
    budgets = [budget for budget in (args.seconds, args.tokens) if budget != "none"]
    return [
        Job(
            kind="worth",
            rung=rung,
            setting=budget,
            seed=seed,
            overrides={**COMMON, **small_batch(rung, args.step_tokens), **words},
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
    top.add_argument(
        "--processes",
        choices=("shared", "each"),
        default="shared",
        help="let a rung's runs share a process and its compiled graphs, or give each run its own",
    )
    top.add_argument(
        "--prepare",
        type=int,
        default=1,
        metavar="N",
        help="rungs on a GPU whose graphs are compiled side by side before any run there begins; costs memory, see "
        "nanosprint race --help",
    )
    top.add_argument("--stop-after", type=float, default=float("inf"), metavar="S", help="start no run later")
    top.add_argument("--steps", type=int, default=30, help="full: steps of each run")
    top.add_argument("--cold", action="store_true", help="full: compile everything anew, for honest start-up times")
    top.add_argument("--seconds", default="60s", metavar="60s|none", help="worth: budget of training time")
    top.add_argument(
        "--step-tokens", type=int, default=65_536, metavar="65536|32768", help="worth: tokens of a step, on average"
    )
    top.add_argument("--tokens", default="20M", metavar="20M|none", help="worth: budget of tokens")
    return top


def main() -> None:
    args = parser().parse_intermixed_args()
    if args.command != "table":
        words = parse_overrides(args.words)
        jobs = full_jobs(args, words) if args.command == "full" else worth_jobs(args, words)
        run_jobs(
            jobs,
            args.results,
            args.runs,
            parallel=args.gpus_parallel,
            share=args.processes == "shared",
            stop_after_s=args.stop_after,
            prepare=args.prepare,
        )
    print(write_table(args.results, args.doc))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    main()
