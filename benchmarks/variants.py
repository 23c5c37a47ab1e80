"""Variants of a recipe, one after the other in one process, which compiles what they share once.

    python -m benchmarks.variants record-third --data DIR --seeds 1,2,3
    python -m benchmarks.variants record-third --data DIR --runs runs/batch \\
        --variant base --variant "half: train.lanes=4 train.batch_tokens=196608 train.num_steps=626"

Each variant is "NAME" or "NAME: KEY=VALUE ..."; each is run with every seed, seeds outermost, so that what drifts hits
all alike. A run is an ordinary run directory, RUNS/NAME-SEED, with its record; one that has a record already is not
repeated, one that was begun is left alone. A line says how each ended, and at the end there is a table of means and of
differences to the first variant, seed by seed.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.requests import request_of
from nanosprint.config.edit import parse_overrides
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.training.api import carry_out_in_turn
from nanosprint.training.request import RunRequest, start_run

Variant = tuple[str, dict[str, str]]


def parse_variant(text: str) -> Variant:
    """Name and overrides of "NAME: KEY=VALUE ..."; the overrides may be missing."""
    name, _, words = text.partition(":")
    if not name.strip():
        raise ValueError(f"--variant {text!r}: expected NAME or 'NAME: KEY=VALUE ...'")
    return name.strip(), parse_overrides(words.split())


def run(args: argparse.Namespace) -> dict[tuple[str, int], RunRecord]:
    """All runs that have no record yet; the records of all, by variant and seed."""
    base, records, wanted = parse_overrides(args.overrides), {}, {}
    for seed in args.seeds:
        for name, words in args.variants:
            folder = RunDir(args.runs / f"{name}-{seed}")
            if folder.has_record:
                records[name, seed] = RunRecord.load(folder)
            elif folder.has_run:
                print(f"{folder.path} was begun: `nanosprint resume {folder.path}` finishes it", flush=True)
            else:
                wanted[name, seed] = request_of(args.recipe, {**base, **words}, seed, args.data)
    for key, record in zip(wanted, _in_turn(wanted, args.runs), strict=True):
        records[key] = record
        print(line(*key, record), flush=True)
    return records


def _in_turn(wanted: dict[tuple[str, int], RunRequest], runs: Path) -> Iterator[RunRecord]:
    """Run directories are made when their turn comes: those of a series that is cut short can be started again."""
    dirs = (start_run(request, runs / f"{name}-{seed}") for (name, seed), request in wanted.items())
    yield from carry_out_in_turn(wanted.values(), dirs)


def line(name: str, seed: int, record: RunRecord) -> str:
    """How a run ended."""
    loss = "no loss" if record.val_loss is None else f"{record.val_loss:.4f}"
    energy = "" if record.energy_j is None else f"  {record.energy_j / 1000:.1f} kJ"
    return (
        f"{name:24s} seed {seed:<6d} {loss}  {record.train_ms / 1000:.1f} s  {record.steps} steps  "
        f"{record.tokens / 1e6:.1f} M tokens  {record.tokens_per_s or 0:,.0f} tokens/s{energy}  "
        f"start-up {record.startup_ms / 1000:.0f} s"
    )


def table(variants: list[Variant], seeds: list[int], records: dict[tuple[str, int], RunRecord]) -> str:
    """Means over seeds, and the mean difference to the first variant over the seeds that both have."""
    first, lines = (
        variants[0][0],
        [f"{'variant':24s} {'n':>2s} {'loss':>8s} {'sd':>7s} {'to first':>9s} {'seconds':>8s}"],
    )
    for name, _ in variants:
        losses = {seed: records[name, seed].val_loss for seed in seeds if (name, seed) in records}
        losses = {seed: loss for seed, loss in losses.items() if loss is not None}
        if not losses:
            continue
        shared = [losses[s] - records[first, s].val_loss for s in losses if _loss(records, first, s) is not None]
        seconds = statistics.mean(records[name, seed].train_ms for seed in losses) / 1000
        spread = f"{statistics.stdev(losses.values()):7.4f}" if len(losses) > 1 else f"{'-':>7s}"
        apart = f"{statistics.mean(shared):+9.4f}" if shared and name != first else f"{'-':>9s}"
        lines.append(
            f"{name:24s} {len(losses):2d} {statistics.mean(losses.values()):8.4f} {spread} {apart} {seconds:8.1f}"
        )
    return "\n".join(lines)


def _loss(records: dict[tuple[str, int], RunRecord], name: str, seed: int) -> float | None:
    return records[name, seed].val_loss if (name, seed) in records else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every variant")
    parser.add_argument(
        "--variant", action="append", dest="variants", type=parse_variant, metavar="NAME[: KEY=VALUE ...]"
    )
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[1337])
    parser.add_argument("--data", help="folder of shards; default: the recipe's own")
    parser.add_argument("--runs", type=Path, default=Path("runs/variants"), help="folder of run directories")
    args = parser.parse_intermixed_args()
    args.variants = args.variants or [(args.recipe, {})]
    records = run(args)
    print(table(args.variants, args.seeds, records))


if __name__ == "__main__":
    main()
