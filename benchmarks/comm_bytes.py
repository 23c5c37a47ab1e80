"""Bytes that a process sends in a step, by recipe and number of processes, and a model on paper of the step's time.

    python -m benchmarks.comm_bytes                     the table for gpt2, sub3 and record
    python -m benchmarks.comm_bytes --groups record     group by group, for 8 processes
    python -m benchmarks.comm_bytes --model record      time of a step for 1 to 512 GPUs

Needs no GPU: banks are cut on the meta device. What the model takes as given is in `Links` and `COMPUTE`; which of it
was measured and which is a maker's number stands beside each.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanosprint.config.recipe import Recipe
from nanosprint.model.gpt import GPT
from nanosprint.model.roles import collect_roles
from nanosprint.optim.build import build_parts
from nanosprint.optim.traffic import Traffic, traffic
from nanosprint.recipes import load_recipe

RECIPES = ("gpt2", "sub3", "record")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Compute:
    """One GPU's work."""

    us_a_token: float
    tokens: int  # a step
    source: str


@dataclass(frozen=True)
class Links:
    """What lies between GPUs; all of it nominal. Bytes/s in one direction, seconds."""

    gpus_a_host: int = 8
    inside: float = 450e9  # NVLink 4: 900 GB/s a GPU, both directions together
    outside: float = 50e9  # InfiniBand NDR: 400 Gb/s a GPU
    latency_inside: float = 10e-6  # of a collective within a host
    latency_hop: float = 5e-6  # and for each doubling of the number of hosts, as trees take


COMPUTE = {"record": Compute(1.424, 393_216, "measured, stage 3 of a record-third run, one H200, torch 2.11")}


def count(recipe: Recipe, size: int) -> list[Traffic]:
    """What each part of the recipe's optimizers sends in a step among `size` processes, the embedding untied."""
    with torch.device("meta"):
        model = GPT(recipe.model)
        roles = collect_roles(model)
        tied = [name for name, role in roles.items() if role.name in ("embed.token", "head")]
        alone = tied if recipe.model.head_copy else []
        parts = build_parts(dict(model.named_parameters()), roles, recipe.groups, recipe.precision, alone, size)
    return traffic(parts, size)


def step_ms(compute: Compute, sent: Sequence[Traffic], size: int, links: Links = Links()) -> tuple[float, float]:
    """(computing, sending) in ms for a step of fixed tokens on `size` GPUs, nothing hidden behind anything.

    Computing is taken to divide evenly, which it does not for ever: small products fill a GPU badly, so the true time
    lies above. In a ring over several hosts, whose GPUs have an adapter each, the slower link decides; what leaves a
    host is as much as a GPU sends, through as many adapters as it has GPUs.
    """
    hosts = max(1, -(-size // links.gpus_a_host))
    total = sum(part.sent for part in sent)
    seconds = total / links.inside
    if hosts > 1:
        seconds = max(seconds, total / (links.outside * links.gpus_a_host))
    latency = links.latency_inside + 2 * links.latency_hop * (hosts - 1).bit_length()
    seconds += latency * sum(part.messages for part in sent)
    return compute.us_a_token * compute.tokens / size / 1e3, 1e3 * seconds


def table(recipes: Sequence[str], sizes: Sequence[int] = SIZES) -> str:
    """Megabytes that a process sends in a step, as Markdown."""
    lines = ["| recipe | " + " | ".join(f"N={n}" for n in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name in recipes:
        counts = [sum(part.sent for part in count(load_recipe(name), size)) / 1e6 for size in sizes]
        lines.append(f"| {name} | " + " | ".join(f"{megabytes:.1f}" for megabytes in counts) + " |")
    return "\n".join(lines)


def groups_table(name: str, size: int = 8) -> str:
    """Each part's messages, as Markdown."""
    lines = [
        "| role | numbers | messages a step | reduce-scatter, MB | all-gather, MB | all-reduce, MB |",
        "|---|---|---|---|---|---|",
    ]
    for part in count(load_recipe(name), size):
        megabytes = (part.reduce_scatter / 1e6, part.all_gather / 1e6, part.all_reduce / 1e6)
        role = f"{part.role} (at most)" if part.at_most else part.role
        cells = " | ".join(f"{value:.3f}" for value in megabytes)
        lines.append(f"| {role} | {part.numbers:,} | {part.messages:g} | {cells} |")
    return "\n".join(lines)


def model_table(name: str, sizes: Sequence[int] = SIZES) -> str:
    """Computing, sending, and what of the speed-up is left where nothing of the sending is hidden, as Markdown."""
    if name not in COMPUTE:
        raise SystemExit(f"no measured time a token of {name}: there is one of {', '.join(COMPUTE)}")
    compute, recipe = COMPUTE[name], load_recipe(name)
    lines = ["| GPUs | computing, ms | sending, ms | step, ms | speed-up | efficiency |", "|---|---|---|---|---|---|"]
    alone = compute.us_a_token * compute.tokens / 1e3
    for size in sizes:
        computing, sending = step_ms(compute, count(recipe, size), size)
        speedup = alone / (computing + sending)
        cells = (f"{computing:.2f}", f"{sending:.2f}", f"{computing + sending:.2f}", f"{speedup:.1f}")
        lines.append(f"| {size} | {' | '.join(cells)} | {speedup / size:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--groups", metavar="RECIPE")
    parser.add_argument("--model", metavar="RECIPE")
    arguments = parser.parse_args()
    if arguments.groups:
        print(groups_table(arguments.groups))
    elif arguments.model:
        print(model_table(arguments.model))
    else:
        print(table(arguments.recipes))


if __name__ == "__main__":
    main()
