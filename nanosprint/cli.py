"""The command `nanosprint`. Handlers are short and import what they need when they run, so that help is instant."""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanosprint.errors import EXIT_FAILED, exit_code, tell

if TYPE_CHECKING:
    from nanosprint.config.recipe import Execution, Recipe
    from nanosprint.results.record import RunRecord
    from nanosprint.results.runs import RunDir
    from nanosprint.training.request import RunRequest
    from nanosprint.training.reuse import Kept

STARTED = time.time()
DEBUG = "NANOSPRINT_DEBUG"  # in the environment, so that the processes of --gpus see it, too


def main() -> None:
    """Entry point of `nanosprint` and of `python -m nanosprint`."""
    if _is_main():
        talk()
    sys.exit(guarded(lambda: cli.main(standalone_mode=False)))


def talk() -> None:
    """Show what the program logs: choices, fallbacks, what takes long."""
    logger = logging.getLogger("nanosprint")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


def guarded(work: Callable[[], Any]) -> int:
    """Run `work` and return an exit code; what a user can understand is printed as one line, without a traceback.

    Of several processes only one prints.
    """
    try:
        result = work()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nobody is to be told
        return EXIT_FAILED
    except SystemExit:
        raise
    except BaseException as error:
        silent = _silent(error)
        if silent is not None:
            return silent
        if isinstance(error, click.ClickException):
            error.show()
            return error.exit_code
        said = KeyboardInterrupt("stopped") if isinstance(error, KeyboardInterrupt | click.Abort) else error
        code = exit_code(said)
        if code is None:
            raise
        if DEBUG in os.environ:
            traceback.print_exception(error)
        tell(said)
        return code


def _silent(error: BaseException) -> int | None:
    """The code to end with where another process tells of it; None where this one does."""
    if not _is_launched():
        return None
    from nanosprint.training.watch import may_tell

    return may_tell(error)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="nanosprint")
def cli(debug: bool) -> None:
    """Train GPT-2-class language models to a target loss in the least wall-clock time, and prove it."""
    if debug:
        os.environ[DEBUG] = "1"


# --- runs ---------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--gpus", type=click.IntRange(1), help="Processes on this machine, one a GPU; on a CPU, too.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory.  [default: runs/<time>-<recipe>]")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of shards.  [default: data/<data.name>]")
@click.option("--seed", type=click.IntRange(0), default=1337, show_default=True, help="Decides weights and order.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), help="[default: cuda if there is one]")
@click.option("--max-steps", type=click.IntRange(1), help="Stop early; the schedule stays that of the whole run.")
@click.option("--budget", metavar="60s|20M", help="Fit the whole schedule into a training time or number of tokens.")
@click.option("--profile", is_flag=True, help="Write a trace and a table of time by kernel group.")
@click.option("--wandb", is_flag=True, help="Log to Weights & Biases, too.")
@click.option("--tensorboard", is_flag=True, help="Log to TensorBoard, too.")
def train(
    recipe: str,
    overrides: tuple[str, ...],
    gpus: int | None,
    out: Path | None,
    data: Path | None,
    seed: int,
    device: str | None,
    max_steps: int | None,
    budget: str | None,
    profile: bool,
    wandb: bool,
    tensorboard: bool,
) -> None:
    """Train RECIPE, with single values changed where wanted.

    For example: nanosprint train gpt2 model.num_layers=6 exec.compile=off --data DIR --max-steps 100
    """
    from nanosprint.config.recipe import Execution
    from nanosprint.recipes import load_recipe
    from nanosprint.training.request import RunRequest, parse_budget, start_run, timestamp

    words, execution_words = _split_overrides(overrides)
    request = RunRequest(
        recipe=load_recipe(recipe, words),
        execution=_execution(Execution(), execution_words, device, _processes(gpus)),
        seed=seed,
        data=None if data is None else str(data),
        max_steps=max_steps,
        budget=None if budget is None else parse_budget(budget),
        profile=profile,
        wandb=wandb,
        tensorboard=tensorboard,
        command=tuple(sys.argv),
        created=timestamp(),
    )
    carry_out(request, start_run(request, out) if _is_main() else None, resume=False)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[exec.KEY=VALUE]...")
@click.option("--gpus", type=click.IntRange(1), help="Processes on this machine; may differ from before.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]))
@click.option("--max-steps", type=click.IntRange(1), help="Go on to this step, beyond an earlier --max-steps.")
def resume(run: Path, overrides: tuple[str, ...], gpus: int | None, device: str | None, max_steps: int | None) -> None:
    """Go on with the run in directory RUN from its last checkpoint, or from step 0 if it has none."""
    from nanosprint.results.record import RunRecord
    from nanosprint.results.runs import RunDir
    from nanosprint.training.request import load_request, resumed

    run_dir = RunDir(run)
    words, execution_words = _split_overrides(overrides)
    if words:
        raise ValueError(f"a run keeps its recipe: {next(iter(words))!r} cannot be changed when it is resumed")
    request = load_request(run_dir)
    if max_steps is not None:
        request = replace(request, max_steps=max_steps)
    if run_dir.has_record:
        record = RunRecord.load(run_dir)
        if record.status in ("finished", "stopped") and record.steps >= request.last_step:
            click.echo(f"{run} is finished: {record.steps} steps, validation loss {_loss(record)}")
            return
    changed = _execution(request.execution, execution_words, device, _processes(gpus))
    request = resumed(request, changed)
    carry_out(request, run_dir if _is_main() else None, resume=True)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue.  [default: a line break, or the start of a document]")
@click.option("--tokens", type=click.IntRange(1), default=300, show_default=True, help="How many to generate.")
@click.option("--temperature", type=click.FloatRange(0), default=0.8, show_default=True, help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(1), help="Draw from the K likeliest tokens only.")
@click.option("--seed", type=click.IntRange(0), default=1337, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda", "mps"]), default="cpu", show_default=True)
def sample(
    run: Path, prompt: str | None, tokens: int, temperature: float, top_k: int | None, seed: int, device: str
) -> None:
    """Generate text with the model of the last checkpoint in directory RUN."""
    from nanosprint.sample import continue_text

    pieces = continue_text(
        run, prompt=prompt, num_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, device=device
    )
    for text in pieces:
        click.echo(text, nl=False)
        sys.stdout.flush()
    click.echo()


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="PNG or SVG.  [default: loss.png in the first run]")
@click.option("--x", type=click.Choice(["step", "tokens", "seconds", "joules"]), default="step", show_default=True)
@click.option("--bands/--no-bands", default=True, help="Mean and range of 3 runs or more of a recipe.  [default: on]")
def plot(runs: tuple[Path, ...], out: Path | None, x: Any, bands: bool) -> None:
    """Draw the loss curves of RUNS."""
    from nanosprint.results.plots import plot_runs
    from nanosprint.results.runs import RunDir

    out = out or RunDir(runs[0]).require().loss_plot_path
    plot_runs(runs, out, x=x, bands=bands)
    click.echo(f"loss curve: {out}")


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", type=float, default=3.28, show_default=True, help="Validation loss to be below.")
@click.option("--alpha", type=float, default=0.01, show_default=True, help="The p-value has to be less.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def verify(runs: tuple[Path, ...], target: float, alpha: float, as_json: bool) -> int:
    """Judge the claim that RUNS, a whole series, reach the target. Exit code 1 where a rule of the benchmark is broken.

    RUNS are run directories or folders of them. Everything is computed again from their metrics.
    """
    from nanosprint.results.jsonfile import dump
    from nanosprint.results.verify import show
    from nanosprint.results.verify import verify as judge

    verdict = judge(runs, target, alpha)
    if as_json:
        click.echo(dump(verdict, "verdict"), nl=False)
    else:
        show(verdict)
    return 0 if verdict.accepted else EXIT_FAILED


@cli.command()
@click.argument("dirs", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@click.option("--target", type=float, help="Loss to stay below.  [default: 3.28 on FineWeb, else none]")
@click.option("--alpha", type=float, default=0.01, show_default=True, help="Level of the test against the target.")
def leaderboard(dirs: tuple[Path, ...], target: float | None, alpha: float) -> None:
    """Rank all runs below DIRs, by default runs and records."""
    from rich.console import Console

    from nanosprint.results.board_text import print_leaderboard
    from nanosprint.results.leaderboard import leaderboard as rank_all

    print_leaderboard(rank_all(dirs, target=target, alpha=alpha), Console())


@cli.command()
@click.argument("dirs", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@click.option("--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
@click.option("--target", type=float, help="Loss to stay below.  [default: 3.28 on FineWeb, else none]")
@click.option("--alpha", type=float, default=0.01, show_default=True, help="Level of the test against the target.")
@click.option("--title", default="nanosprint leaderboard", show_default=True)
def report(dirs: tuple[Path, ...], out: Path, target: float | None, alpha: float, title: str) -> None:
    """Rank all runs below DIRs in one HTML page that needs nothing but itself."""
    from nanosprint.recipes import base_of
    from nanosprint.results.leaderboard import leaderboard as rank_all
    from nanosprint.results.report import write_report

    write_report(rank_all(dirs, target=target, alpha=alpha), out, title=title, base_of=base_of)
    click.echo(f"report: {out} ({out.stat().st_size / 1e3:,.0f} kB)")


@cli.command("import")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="LOG...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make; one run a log below it.")
@click.option("--name", help="Name of the recipe.  [default: after the log's file or folder]")
@click.option("--batch-tokens", type=click.IntRange(1), help="Tokens of each step: gives an axis of tokens.")
@click.option("--devices", help="On what it ran, for the leaderboard: '8 x NVIDIA H100'.")
def import_(logs: tuple[Path, ...], out: Path, name: str | None, batch_tokens: int | None, devices: str | None) -> None:
    """Make runs out of text LOGs of modded-nanogpt or llm.c, to be drawn and listed beside one's own."""
    from nanosprint.results.importing import import_logs

    for run in import_logs(logs, out, name=name, batch_tokens=batch_tokens, devices=devices):
        click.echo(f"imported: {run.path}")


def set_allocator(execution: "Execution") -> None:
    """Choose how torch divides GPU memory. Before it is imported: then it reads the environment."""
    if execution.allocator in ("auto", "expandable"):
        # Segments that grow leave fewer holes; ignored on a CPU.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def carry_out(
    request: "RunRequest",
    run_dir: "RunDir | None",
    *,
    resume: bool,
    started: float = STARTED,
    kept: "Kept | None" = None,
) -> None:
    """Train in this process, or in several; the main one says how it ended. kept: see `training.api.carry_out`."""
    set_allocator(request.execution)
    if request.execution.gpus > 1 and not _is_launched():
        from nanosprint.launch import launch

        assert run_dir is not None
        code = launch(request, run_dir, resume=resume, started=started)
        if code:
            raise SystemExit(code)
    else:
        from nanosprint.training import api

        api.carry_out(request, run_dir, resume=resume, console=True, started=started, kept=kept)
    if run_dir is not None:
        _summarize(run_dir)


def _summarize(run_dir: "RunDir") -> None:
    from nanosprint.results.record import RunRecord

    record = RunRecord.load(run_dir)
    rate = f"{record.tokens_per_s:,.0f} tokens/s" if record.tokens_per_s else "no training"
    click.echo(f"validation loss {_loss(record)} over {record.data.val_tokens:,} targets")
    click.echo(f"training time {record.train_ms / 1000:.1f} s, {record.steps} steps, {rate}")
    click.echo(f"run: {run_dir.path}")


def _loss(record: "RunRecord") -> str:
    return "unknown" if record.val_loss is None else f"{record.val_loss:.4f}"


def _is_main() -> bool:
    """Whether this process writes the run directory: alone, or the first of those that torchrun started."""
    return not _is_launched() or os.environ["RANK"] == "0"


def _is_launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _processes(gpus: int | None) -> int | None:
    """The number of processes asked for; under torchrun it is what it has started."""
    if not _is_launched():
        return gpus
    world_size = int(os.environ["WORLD_SIZE"])
    if gpus not in (None, world_size):
        raise ValueError(f"--gpus {gpus}, but torchrun has started {world_size} processes: leave --gpus out")
    return world_size


def _split_overrides(words: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """Overrides of the recipe, and those of its execution."""
    from nanosprint.config.edit import parse_overrides

    overrides = parse_overrides(words)
    execution = {k: v for k, v in overrides.items() if k.startswith("exec.")}
    return {k: v for k, v in overrides.items() if k not in execution}, execution


def _execution(base: "Execution", words: dict[str, str], device: str | None, gpus: int | None) -> "Execution":
    from nanosprint.config.edit import apply_overrides
    from nanosprint.config.recipe import Execution

    @dataclass(frozen=True)
    class Holder:
        exec: Execution

    flags = {"exec.device": device, "exec.gpus": gpus}
    changes = {**words, **{k: v for k, v in flags.items() if v is not None}}
    result: Execution = apply_overrides(Holder(base), changes).exec
    return result


# --- evidence -----------------------------------------------------------------------------------------------------


def _race_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What races and ablations have in common."""
    options = [
        click.option("--runs", type=click.IntRange(2), help="Runs of each, with seeds of their own."),
        click.option("--seed", type=click.IntRange(0), default=1337, show_default=True, help="The first one's."),
        click.option("--target", type=float, help="Validation loss that the mean is tested against."),
        click.option("--budget", metavar="60s|20M", help="Fit every schedule into a training time, or into tokens."),
        click.option("--max-steps", type=click.IntRange(1), help="Stop each run early, schedules unchanged."),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"])),
        click.option("--gpus", type=click.IntRange(1), help="Processes of each run."),
        click.option(
            "--processes",
            type=click.Choice(["shared", "each"]),
            default="shared",
            show_default=True,
            help="Let seeds of a recipe share a process and its compiled graphs, or give each run its own.",
        ),
        click.option(
            "--gpus-parallel",
            "parallel",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Runs at a time, each on a GPU of its own, where a recipe's runs stay.",
        ),
        click.option(
            "--prepare",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            metavar="N",
            help="Recipes whose graphs are compiled side by side, on each GPU, before any run there begins; 1: each "
            "when its first run begins. Each of the N costs what one start does: for each of up to 4 compilers some "
            "gigabytes of the host, and on the GPU a context and a model's weights.",
        ),
        click.option("--data", type=click.Path(path_type=Path), help="Folder of shards.  [default: each recipe's]"),
        click.option("--out", type=click.Path(path_type=Path), help="Folder.  [default: runs/<time>-race]"),
        click.option("--keep-checkpoints", is_flag=True, help="Of finished runs; else they go, gigabytes each."),
        click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with a race."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@click.argument("words", nargs=-1, metavar="RECIPE... [[RECIPE:]KEY.SUB=VALUE]...")
@_race_options
def race(words: tuple[str, ...], resume: Path | None, **options: Any) -> int:
    """Train each RECIPE several times, in turns, and say what can be told about their differences.

    For example: nanosprint race modern sub3 --runs 4 --budget 30s --target 3.28 train.batch_tokens=65536

    Seeds are --seed and those after it. Overrides are for all recipes, or for one: sub3:model.seq_len=8192.
    Whatever ends a race, --resume DIR goes on.
    """
    if resume is not None:
        return _resume_race(resume, words, options["parallel"], options["prepare"])
    names = [word for word in words if "=" not in word]
    overrides, execution = _split_overrides(tuple(word for word in words if "=" in word))
    if not names:
        raise click.UsageError("give a RECIPE or more, or --resume DIR")
    if len(set(names)) < len(names):
        raise ValueError(f"recipe {next(n for n in names if names.count(n) > 1)!r} is named twice")
    from nanosprint.evidence.ablate import load_all

    return _run_race(load_all(names, overrides), execution, **options)


@cli.command()
@click.argument("recipe", required=False)
@click.argument("words", nargs=-1, metavar="[[RECIPE:]KEY.SUB=VALUE]...")
@click.option("--one-out", is_flag=True, help="Without each technique that the recipe has.  [default]")
@click.option("--switch", "switches", multiple=True, metavar="NAME[=KEY=VALUE]", help="Without this one; repeat it.")
@click.option("--ladder", is_flag=True, help="Against all its ancestors.")
@click.option("--grid", "grids", multiple=True, metavar="KEY=A,B,C", help="With these values; repeat it to combine.")
@click.option("--list", "listing", is_flag=True, help="Only say which switches there are, or those of RECIPE.")
@_race_options
def ablate(
    recipe: str | None,
    words: tuple[str, ...],
    one_out: bool,
    switches: tuple[str, ...],
    ladder: bool,
    grids: tuple[str, ...],
    listing: bool,
    resume: Path | None,
    **options: Any,
) -> int:
    """Race RECIPE against variants of itself, and say what each change is worth and which cannot be told from zero.

    For example: nanosprint ablate sub3 --one-out --runs 4 --budget 30s train.batch_tokens=65536
    """
    from nanosprint.evidence import ablate as variants

    if resume is not None:
        words = (*([recipe] if recipe else ()), *words)
        return _resume_race(resume, words, options["parallel"], options["prepare"])
    if listing:
        return _list_switches(recipe, words)
    if recipe is None:
        raise click.UsageError("give a RECIPE, or --resume DIR")
    if sum([one_out or bool(switches), ladder, bool(grids)]) > 1:
        raise click.UsageError("choose one of --one-out (or --switch), --ladder and --grid")
    overrides, execution = _split_overrides(words)
    if ladder:
        recipes, left_out = variants.ancestors(recipe, overrides)
    elif grids:
        recipes, left_out = variants.grid(recipe, overrides, grids)
    else:
        recipes, left_out = variants.without_each(recipe, overrides, switches, one_out or not switches)
    return _run_race(recipes, execution, baseline=recipe, left_out=left_out, **options)


def _list_switches(recipe: str | None, words: tuple[str, ...]) -> int:
    from nanosprint.recipes import load_recipe
    from nanosprint.recipes.switches import SWITCHES, one_out

    names = set(SWITCHES) if recipe is None else set(one_out(load_recipe(recipe, words))[0])
    for switch in SWITCHES.values():
        if switch.name in names:
            click.echo(f"{switch.name:<18}{switch.summary}")
    return 0


def _run_race(recipes: "dict[str, Recipe]", execution: dict[str, str], **options: Any) -> int:
    """Plan a race with the options of the command line, carry it out and report."""
    from nanosprint.config.recipe import Execution
    from nanosprint.evidence.race import start
    from nanosprint.evidence.series import plan_race
    from nanosprint.training.request import parse_budget

    if options["runs"] is None:
        raise click.UsageError("say how many --runs each recipe gets: 2 show a spread, 4 and more show small effects")
    budget, data, out = options.pop("budget"), options.pop("data"), options.pop("out")
    parallel, prepare = options.pop("parallel"), options.pop("prepare")
    planned = plan_race(
        recipes,
        first_seed=options.pop("seed"),
        execution=_execution(Execution(), execution, options.pop("device"), options.pop("gpus")),
        data=None if data is None else str(data),
        budget=None if budget is None else parse_budget(budget),
        command=tuple(sys.argv),
        **options,
    )
    return _carry_on(start(planned, out), parallel, prepare)


def _resume_race(folder: Path, words: tuple[str, ...], parallel: int, prepare: int) -> int:
    if words:
        raise ValueError(f"a race keeps its recipes and settings: {words[0]!r} has no place beside --resume")
    return _carry_on(folder, parallel, prepare)


def _carry_on(folder: Path, parallel: int, prepare: int) -> int:
    """Carry out a race and report; 1 where a run is missing. However it is stopped, it says how to go on."""
    from nanosprint.evidence.outcome import publish
    from nanosprint.evidence.race import carry_on

    try:
        carry_on(folder, click.echo, parallel, prepare)
    except (KeyboardInterrupt, SystemExit):
        click.echo(f"go on with `nanosprint race --resume {folder}`", err=True)
        raise
    report = publish(folder, click.echo)
    return EXIT_FAILED if report["problems"] else 0


# --- recipes ------------------------------------------------------------------------------------------------------


@cli.group()
def recipes() -> None:
    """List, print and compare recipes."""


@recipes.command("list")
def recipes_list() -> None:
    """One line for each recipe."""
    from nanosprint.recipes import all_recipes

    entries = all_recipes()
    width = max(map(len, entries))
    for name, entry in entries.items():
        parent = f"  (from {entry.parent})" if entry.parent else ""
        click.echo(f"{name:<{width}}  {entry.summary}{parent}")


@recipes.command("show")
@click.argument("name")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
def recipes_show(name: str, overrides: tuple[str, ...]) -> None:
    """Print a recipe in full, as JSON, with its hash."""
    from nanosprint.config.edit import to_dict
    from nanosprint.recipes import load_recipe

    recipe = load_recipe(name, overrides)
    click.echo(json.dumps({"hash": recipe.hash, **to_dict(recipe)}, indent=2))


@recipes.command("diff")
@click.argument("old")
@click.argument("new")
def recipes_diff(old: str, new: str) -> None:
    """Print every value in which two recipes differ."""
    from nanosprint.config.edit import diff_lines, to_dict
    from nanosprint.recipes import load_recipe

    for line in diff_lines(to_dict(load_recipe(old)), to_dict(load_recipe(new))):
        if not line.startswith(("name:", "source:")):
            click.echo(line)


@cli.command()
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--all", "everything", is_flag=True, help="Check every recipe.")
def check(recipe: str | None, overrides: tuple[str, ...], everything: bool) -> None:
    """Validate RECIPE and trace its training step on the meta device, without data or a GPU."""
    from nanosprint.recipes import all_recipes, load_recipe

    if (recipe is None) == (not everything):
        raise click.UsageError("give a RECIPE, or --all")
    from nanosprint.training.check import check_recipe

    for name in all_recipes() if recipe is None else [recipe]:
        click.echo(check_recipe(load_recipe(name, overrides)))


# --- data ---------------------------------------------------------------------------------------------------------


@cli.group()
def data() -> None:
    """Fetch, prepare and look at token shards."""


@data.command("download")
@click.argument("name")
@click.option("--shards", type=click.IntRange(1), help="Training shards of 100 M tokens.  [default: all]")
@click.option("--out", type=click.Path(path_type=Path), help="[default: data/NAME]")
def data_download(name: str, shards: int | None, out: Path | None) -> None:
    """Fetch a published token set: fineweb10B, fineweb100B or finewebedu10B. Call again to go on."""
    from nanosprint.data.download import download

    folder = out or Path("data") / name
    files = download(name, folder, shards, notify=click.echo)
    click.echo(f"{folder}: {len(files)} files, complete")


@data.command("prepare")
@click.argument("sources", nargs=-1, required=True, metavar="FILE|DIR|-...")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Dataset folder to make.")
@click.option("--tokenizer", type=click.Choice(["gpt2", "chars", "bytes"]), default="gpt2", show_default=True)
@click.option(
    "--val-tokens", type=click.IntRange(0), help="Targets to hold out.  [default: a tenth, at most 10,485,760]"
)
@click.option("--shard-tokens", type=click.IntRange(1), default=100_000_000, show_default=True)
@click.option("--text-column", help="Column of .jsonl and .parquet.  [default: text]")
@click.option("--name", help="Stem of the shards' names.  [default: that of --out]")
@click.option("--threads", type=click.IntRange(1), help="[default: one a core]")
@click.option("--overwrite", is_flag=True, help="Replace a data set that is there.")
def data_prepare(
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str,
    val_tokens: int | None,
    shard_tokens: int,
    text_column: str | None,
    name: str | None,
    threads: int | None,
    overwrite: bool,
) -> None:
    """Turn text into token shards: .txt, .jsonl, .parquet, also .gz, .zst or .xz; - reads standard input."""
    from nanosprint.data.prepare import prepare

    with _counter() as progress:
        made = prepare(
            sources,
            tokenizer,
            out,
            name=name,
            val_tokens=val_tokens,
            shard_tokens=shard_tokens,
            text_column=text_column,
            processes=threads,
            progress=progress,
            overwrite=overwrite,
        )
    rate = made.text_bytes / 1e6 / made.seconds
    click.echo(
        f"{made.train_tokens:,} training and {made.val_tokens:,} validation tokens from {made.documents:,} documents"
    )
    click.echo(
        f"{made.text_bytes / 1e6:,.1f} MB in {made.seconds:.1f} s ({rate:.1f} MB/s), vocabulary {made.vocab_size:,}"
    )
    click.echo(f"data set: {made.folder}")


@data.command("info")
@click.argument("path", type=click.Path(path_type=Path))
def data_info(path: Path) -> int:
    """Check and describe a shard or a folder of shards. Exit code 1 where something is wrong."""
    from nanosprint.data.info import format_info, info

    found = info(path)
    click.echo(format_info(found))
    return EXIT_FAILED if found.errors else 0


@contextmanager
def _counter() -> Iterator[Callable[[int, int], None]]:
    """Bytes and tokens so far, on one line that is rewritten; silence where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda num_bytes, num_tokens: None
        return
    shown = 0.0

    def show(num_bytes: int, num_tokens: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            click.echo(f"\r{num_bytes / 1e6:,.0f} MB  {num_tokens / 1e6:,.1f} M tokens", nl=False, err=True)

    yield show
    click.echo("\r", nl=False, err=True)
