"""The whole measurement of docs/scaling.md on a host of eight GPUs, or of four or two, in one go.

    python -m benchmarks.eight_gpus --data DIR --out FOLDER
    python -m benchmarks.eight_gpus --data DIR --out FOLDER --within 540
    python -m benchmarks.eight_gpus record-third:exec.compile=default --data DIR --out FOLDER

For `record-third`, and for `fast` where there is such a recipe: a whole training on all GPUs with empty compiler
caches, a second start with filled ones, steps by stage with exposed communication, and both on one GPU; for `gpt2`
steps. Every piece is a launch of `benchmarks/scaling.py`, which says what is measured; the ones that matter most come
first, and one whose rows are in FOLDER is not done again: what `--within` seconds left out, the same call takes up.
FOLDER gets rows, records and metrics, and `scaling.md`, the tables of them all; `python -m benchmarks.scaling table
--out FOLDER` puts these into docs/scaling.md.

Words KEY=VALUE are for all recipes, RECIPE:KEY=VALUE for one. The exit code is 1 where a launch failed, where
`--within` left some out, and where parameters differ between processes.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import scaling
from benchmarks.scaling_table import tables
from nanosprint.files import atomic_write
from nanosprint.recipes import all_recipes

TRAINED, STEPS_ONLY = ("record-third", "fast"), ("gpt2",)  # those that are registered
_LEAST_S = 30.0  # a launch with less time than that has no chance


@dataclass(frozen=True)
class Job:
    """One launch."""

    recipe: str
    kind: str  # "training" or "steps"
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.kind} of {self.recipe} on {self.gpus}"

    def is_done(self, out: Path) -> bool:
        """Whether its last row is in the folder."""
        last = {"training": "training", "steps": "agreement"}[self.kind]
        return any((row.get("benchmark"), row.get("gpus")) == (last, self.gpus) for row in rows_of(self.recipe, out))


def rows_of(recipe: str, out: Path) -> list[dict]:
    path = out / f"{recipe}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan(gpus: int, trained: Sequence[str], steps_only: Sequence[str]) -> list[Job]:
    """All launches, in the order of their worth: all GPUs, then one of them, then the numbers between."""
    jobs = []
    for recipe in trained:
        jobs += [Job(recipe, "training", gpus), Job(recipe, "steps", gpus), Job(recipe, "steps", 1)]
    jobs += [Job(recipe, "steps", number) for recipe in steps_only for number in (gpus, 1)]
    jobs += [Job(recipe, "training", 1) for recipe in trained]
    between = [number for number in (4, 2) if number < gpus]
    jobs += [Job(recipe, "steps", number) for recipe in (*trained, *steps_only) for number in between]
    return list(dict.fromkeys(jobs))  # one GPU is all of them on some hosts


def measure(args: argparse.Namespace) -> list[str]:
    """Carry out what is not done yet; what failed or was left."""
    deadline = time.monotonic() + args.within
    args.out.mkdir(parents=True, exist_ok=True)
    troubles = []
    for job in plan(args.gpus, args.trained, args.steps_only):
        left = deadline - time.monotonic()
        if job.is_done(args.out):
            print(f"--- {job.name}: done before", flush=True)
        elif left < _LEAST_S:
            troubles.append(f"{job.name}: left, call again")
        else:
            failed = scaling.measure_all(scaling_args(job, args, min(args.limit, left)))
            troubles += [f"{job.recipe}: {failure}" for failure in failed]
            atomic_write(args.out / "scaling.md", tables(args.out) + "\n")
    return troubles


def scaling_args(job: Job, args: argparse.Namespace, limit_s: float) -> argparse.Namespace:
    """The job as a call of `benchmarks/scaling.py`."""
    words = [job.recipe, *words_for(job.recipe, args.words), "--out", str(args.out), "--limit", f"{limit_s:.0f}"]
    words += ["--steps", str(args.steps), "--profile", str(args.profile), "--runs", str(args.runs)]
    if job.kind == "steps":
        words += ["--gpus", str(job.gpus)]
    else:
        words += ["--gpus", "none", "--train", str(job.gpus), "--seed", str(args.seed)]
        words += ["--cold"] * (job.gpus > 1) + ([] if args.data is None else ["--data", str(args.data)])
    return scaling.parser().parse_intermixed_args(words)


def words_for(recipe: str, words: Sequence[str]) -> list[str]:
    """The overrides that are for all, and those for this one."""
    split = [word.partition(":") if ":" in word.partition("=")[0] else ("", "", word) for word in words]
    return [word for owner, _, word in split if owner in ("", recipe)]


def differing(out: Path) -> list[str]:
    """The trainings and launches of steps after which parameters were not the same on all processes."""
    rows = [row for path in sorted(out.glob("*.jsonl")) for row in rows_of(path.stem, out)]
    return [f"{row['recipe']} on {row['gpus']}: {len(row['differing'])} parameters differ between processes"
            for row in rows if row.get("differing")]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("words", nargs="*", metavar="[RECIPE:]KEY=VALUE")
    top.add_argument("--gpus", type=int, help="all of the host's; default: as many as torch sees")
    top.add_argument("--trained", type=_names, default=_registered(TRAINED), metavar="A,B|none", help="trained whole")
    top.add_argument("--steps-only", type=_names, default=_registered(STEPS_ONLY), metavar="A,B|none")
    top.add_argument("--data", type=Path, metavar="DIR", help="of the trainings; default: the recipe's own")
    top.add_argument("--seed", type=int, default=1337)
    top.add_argument("--steps", type=int, default=6, help="timed, of every kind")
    top.add_argument("--profile", type=int, default=2, metavar="STEPS", help="profiled")
    top.add_argument("--runs", type=Path, default=Path("runs/scaling"), help="folder of run directories")
    top.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds for each launch")
    top.add_argument("--within", type=float, default=float("inf"), metavar="S", help="end after so many seconds")
    top.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    return top


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(","))


def _registered(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in all_recipes())


def main() -> None:
    top = parser()
    args = top.parse_intermixed_args()
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
        if args.gpus < 2:
            top.error(
                f"this host has {args.gpus} GPUs, and scaling takes several; --gpus N exec.device=cpu tries it out"
            )
    if bad := [name for name in (*args.trained, *args.steps_only) if name not in all_recipes()]:
        top.error(f"there is no recipe {', '.join(bad)}")
    try:
        troubles = measure(args)
    except ValueError as error:
        top.error(str(error))
    print(tables(args.out))
    if troubles := troubles + differing(args.out):
        raise SystemExit("; ".join(troubles))


if __name__ == "__main__":
    main()
