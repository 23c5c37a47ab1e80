"""Accepts or refuses the claim that a recipe reaches a target loss, by the rules of the benchmark.

A claim is a whole series of runs. Nothing is taken from a run's summary: steps, tokens, time and loss are read again
from `metrics.jsonl` and held against `record.json`. The two are tied together twice: the record has the checksum of
the log, and the log ends with what the record says. So a number that is edited in either file shows, and so does one
that is edited in both, unless every line that leads to it is made up as well.

What files cannot prove: that the code which wrote them was this code, and that no other series was thrown away.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from nanosprint.config.edit import from_dict
from nanosprint.config.recipe import Recipe
from nanosprint.errors import UserError
from nanosprint.results import jsonfile, stats
from nanosprint.results.metrics import effective_lines, metrics_sha256
from nanosprint.results.record import OUTCOME, RunRecord, mean_watts, outcome_of, tokens_per_kwh
from nanosprint.results.runs import RunDir

TARGET, ALPHA = 3.28, 0.01  # nats on FineWeb's validation tokens, and the p-value that the benchmark asks for
SLACK_MS = 1e-3  # between clocks of host and device
_LINE = {"train": ("tokens", "loss", "train_ms"), "val": ("tokens", "loss", "train_ms", "val_tokens")}
_PLURAL = 3  # so many runs are named in a complaint, the others counted


@dataclass(frozen=True)
class Rule:
    """One rule, whether the claim keeps it, and what was found."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """Whether a claim is accepted: if every rule is kept. `losses` is None where there are not two of them."""

    accepted: bool
    target: float
    alpha: float
    runs: tuple[str, ...]
    losses: stats.Summary | None
    p: float | None
    rules: tuple[Rule, ...]


def verify(paths: Sequence[str | Path], target: float = TARGET, alpha: float = ALPHA) -> Verdict:
    """Judge the claim that the runs under `paths`, run directories or folders of them, have a mean loss below `target`.

    Raises ValueError where a path holds no run; whatever is wrong with a run is a rule that is not kept.
    """
    _check_numbers(target, alpha)
    found = find_runs(paths)
    names = tuple(str(run.path) for run in found)
    runs, unreadable = [], []
    for run in found:
        try:
            runs.append(_read(run))
        except UserError as error:
            unreadable.append(str(error))
    readable = Rule("readable", not unreadable, "; ".join(unreadable) or f"{len(runs)} runs with log and record")
    if unreadable:
        return Verdict(False, target, alpha, names, None, None, (readable,))
    losses = [loss for run in runs if (loss := run.loss) is not None]
    rules = (readable, *(_apply(name, check, runs) for name, check in RULES), _beats(losses, len(runs), target, alpha))
    several = len(losses) > 1
    return Verdict(
        accepted=all(rule.passed for rule in rules),
        target=target,
        alpha=alpha,
        runs=names,
        losses=stats.summarize(losses) if several else None,
        p=stats.test_below(losses, target).p if several else None,
        rules=rules,
    )


def find_runs(paths: Iterable[str | Path]) -> list[RunDir]:
    """The run directories at or below `paths`, those of a folder by name. Raises ValueError for a path without any."""
    found: list[RunDir] = []
    for path in map(Path, paths):
        if path.suffix == ".log" and path.is_file():  # beside a race's runs, where RACE/RECIPE-* names it, too
            continue
        below = [RunDir(file.parent) for file in sorted(path.rglob(RunDir(path).request_path.name))]
        if not below:
            RunDir(path).require()
        found += [RunDir(path)] if RunDir(path).has_run else below
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: no run among them")
    return found


def show(verdict: Verdict) -> None:
    """Print a verdict as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("rule", "", "found", box=None, pad_edge=False, header_style="bold")
    for rule in verdict.rules:
        mark = Text("pass", "green") if rule.passed else Text("FAIL", "bold red")
        table.add_row(rule.name, mark, Text(rule.detail))
    console = Console(highlight=False)
    console.print(table)
    claim = f"mean validation loss below {verdict.target:g} at p < {verdict.alpha:g}, {len(verdict.runs)} runs"
    broken = [rule.name for rule in verdict.rules if not rule.passed]
    if verdict.accepted:
        console.print(Text(f"accepted: {claim}", "bold green"))
    else:
        console.print(Text(f"refused ({', '.join(broken)}): {claim}", "bold red"))


# --- what a run left --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """The files of a run, read and well-formed; nothing of it is believed yet."""

    name: str
    request: dict[str, Any]
    raw: dict[str, Any]  # of record.json
    record: RunRecord
    recipe: Recipe
    sha256: str  # of the log as it is
    lines: list[dict[str, Any]]
    trains: list[Mapping[str, Any]]
    vals: list[Mapping[str, Any]]

    @property
    def loss(self) -> float | None:
        """That of the last validation, if it was at the end of training and is a number."""
        if not self.vals or self.vals[-1]["step"] != self.recipe.train.num_steps:
            return None
        loss = float(self.vals[-1]["loss"])
        return loss if math.isfinite(loss) else None


def _read(run: RunDir) -> _Run:
    """Raises UserError, which names the file, for anything missing or damaged."""
    record = RunRecord.load(run)
    lines = run.read_metrics(on_torn=_refuse)
    for line in lines:
        for key in _LINE.get(line["kind"], ()):
            if isinstance(line.get(key), bool) or not isinstance(line.get(key), int | float):
                where = f"{run.metrics_path}: the {line['kind']} line of step {line['step']}"
                raise UserError(f"{where} has {key}={line.get(key)!r}, which is not a number")
    try:
        recipe: Recipe = from_dict(Recipe, record.recipe, "recipe").validate()
    except ValueError as error:
        raise UserError(f"{run.record_path}: {error}") from None
    return _Run(
        name=run.name,
        request=run.read_request(),
        raw=jsonfile.read_object(run.record_path),
        record=record,
        recipe=recipe,
        sha256=metrics_sha256(run.metrics_path),
        lines=lines,
        trains=effective_lines(lines, "train"),
        vals=effective_lines(lines, "val"),
    )


def _refuse(message: str) -> None:
    raise UserError(message)


# --- rules: each returns what holds, and what speaks against it -------------------------------------------------------

Finding = tuple[str, list[str]]


def _apply(name: str, check: Callable[[Sequence[_Run]], Finding], runs: Sequence[_Run]) -> Rule:
    holds, complaints = check(runs)
    return Rule(name, not complaints, _listed(complaints) if complaints else holds)


def _unedited(runs: Sequence[_Run]) -> Finding:
    """The checksum of the log, its last line and the request all say what the record says."""
    complaints = []
    for run in runs:
        last = run.lines[-1] if run.lines else {}
        if run.sha256 != run.record.metrics_sha256:
            complaints.append(f"{run.name}: metrics.jsonl is not the one that record.json was made from")
        if last.get("name") != OUTCOME or not isinstance(last.get("record"), dict):
            complaints.append(f"{run.name}: metrics.jsonl does not end with the outcome; older runs cannot be verified")
        elif keys := _differing(last["record"], outcome_of(run.raw)):
            complaints.append(f"{run.name}: record.json and the end of metrics.jsonl differ in {', '.join(keys)}")
        asked = {key: run.request.get(key) for key in ("recipe", "recipe_hash", "seed", "series", "created")}
        if keys := _differing(asked, {key: run.raw.get(key) for key in asked}):
            complaints.append(f"{run.name}: record.json and run.json differ in {', '.join(keys)}")
    return "checksums of the logs hold; record, log and request agree", complaints


def _finished(runs: Sequence[_Run]) -> Finding:
    bad = [f"{run.name} has {_ENDED[run.record.status]}" for run in runs if run.record.status != "finished"]
    return "every run finished its schedule", bad


_ENDED = {
    "stopped": "stopped before the end of its schedule: `nanosprint resume` finishes it",
    "failed": "failed: `nanosprint resume` goes on with it",
    "diverged": "diverged",
}


def _same_recipe(runs: Sequence[_Run]) -> Finding:
    complaints = []
    for run in runs:
        if run.recipe.hash != run.record.recipe_hash:
            stored, claimed = run.recipe.hash, run.record.recipe_hash
            complaints.append(f"{run.name}: the stored recipe has hash {stored}, the record claims {claimed}")
    complaints += _mixed("recipes", runs, lambda run: f"{run.recipe.name} {run.recipe.hash}")
    return f"{runs[0].recipe.name}, hash {runs[0].recipe.hash}, in all", complaints


def _same_precision(runs: Sequence[_Run]) -> Finding:
    def precision(run: _Run) -> str:
        return f"compute {run.record.execution.get('compute')}, fp8 {run.record.execution.get('fp8')}"

    complaints = _mixed("precisions", runs, precision)
    complaints += _mixed("validation settings", runs, lambda run: repr(run.recipe.eval))
    return f"{precision(runs[0])}; one way to validate", complaints


def _same_machine(runs: Sequence[_Run]) -> Finding:
    def machine(run: _Run) -> str:
        names = {str(device.get("name")) for device in run.record.devices}
        return f"{run.record.world_size} x {', '.join(sorted(names))}"

    return machine(runs[0]), _mixed("machines", runs, machine)


def _same_software(runs: Sequence[_Run]) -> Finding:
    def software(run: _Run) -> str:
        commit = (run.record.commit or "")[:12]
        code = f"{commit}{' with changes' if run.record.dirty else ''}" if commit else "no commit known"
        return ", ".join([code, *(f"{k} {v}" for k, v in run.record.versions.items() if v is not None)])

    return software(runs[0]), _mixed("software", runs, software)


def _same_data(runs: Sequence[_Run]) -> Finding:
    complaints = [f"{run.name} names no data" for run in runs if not run.record.data.files]
    complaints += _mixed("data", runs, lambda run: "; ".join(f"{f.name} {f.sha256}" for f in run.record.data.files))
    return f"{len(runs[0].record.data.files)} files of equal checksum in all", complaints


def _all_steps(runs: Sequence[_Run]) -> Finding:
    """Every step of the schedule is on record, with the tokens that the recipe plans."""
    complaints = []
    for run in runs:
        num_steps = run.recipe.train.num_steps
        found = {line["step"]: line["tokens"] for line in run.trains}
        if list(found) == list(range(1, num_steps + 1)):
            planned = accumulate(run.recipe.plan(step).batch_tokens for step in range(num_steps))
            wrong = [step for step, tokens in enumerate(planned, 1) if found[step] != tokens]
            if wrong:
                complaints.append(f"{run.name}: tokens other than the recipe's from step {wrong[0]} on")
        else:
            complaints.append(f"{run.name}: the log has {len(found)} steps, the recipe steps 1 to {num_steps}")
        if (run.record.steps, run.record.tokens) != (len(found), max(found.values(), default=0)):
            complaints.append(f"{run.name}: the record claims {run.record.steps} steps, {run.record.tokens:,} tokens")
    return f"{runs[0].recipe.train.num_steps:,} steps, {runs[0].record.tokens:,} tokens in each", complaints


def _validated(runs: Sequence[_Run]) -> Finding:
    """Every validation that the recipe asks for is there, over exactly its targets, and the last is the record's.

    More are harmless: one at the end of --max-steps stays when a run is resumed.
    """
    complaints = []
    for run in runs:
        expected, steps = set(run.recipe.validation_steps), {line["step"] for line in run.vals}
        targets = _val_targets(run)
        if missing := sorted(expected - steps):
            complaints.append(f"{run.name}: no validation at step {', '.join(map(str, missing))}")
        for line in run.vals:
            if line["val_tokens"] != targets:
                found = f"{line['val_tokens']:,} targets at step {line['step']}"
                complaints.append(f"{run.name}: {found}, the recipe asks for {targets:,}")
        if run.loss is None or run.loss != run.record.val_loss or run.record.data.val_tokens != targets:
            claimed = f"{run.record.val_loss} over {run.record.data.val_tokens} targets"
            complaints.append(f"{run.name}: the log has loss {run.loss} over {targets}, the record {claimed}")
    return f"{_val_targets(runs[0]):,} targets, each scored once, at every validation", complaints


def _on_the_clock(runs: Sequence[_Run]) -> Finding:
    """A warm-up before the first step, no compilation on the clock, times that rise up to the record's."""
    complaints = []
    for run in runs:
        names = [line.get("name", line["kind"]) for line in run.lines]
        first = next((i for i, line in enumerate(run.lines) if line["kind"] != "event"), len(names))
        if "start" not in names[:first]:
            complaints.append(f"{run.name}: no warm-up on record before the first step")
        if run.record.clock_graphs:
            complaints.append(f"{run.name}: {_counted(run.record.clock_graphs, 'graph')} compiled on the clock")
        elif run.record.clock_graphs is None:
            complaints.append(f"{run.name}: not on record whether anything was compiled on the clock")
        complaints += _time_complaints(run)
    seconds = [run.record.train_ms / 1000 for run in runs]
    return f"warm-up before the clock, {min(seconds):,.2f} to {max(seconds):,.2f} s of training", complaints


def _time_complaints(run: _Run) -> list[str]:
    ordered = sorted([*run.trains, *run.vals], key=lambda line: (line["step"], line["kind"] == "val"))
    complaints = [
        f"{run.name}: the clock goes back at step {later['step']}"
        for earlier, later in pairwise(ordered)
        if not later["train_ms"] >= earlier["train_ms"] - SLACK_MS
    ]
    last = run.vals[-1] if run.vals else None
    if last is None or last["train_ms"] != run.record.train_ms or not 0 < run.record.train_ms < math.inf:
        found = "no time" if last is None else f"{last['train_ms']} ms"
        complaints.append(f"{run.name}: the log has {found} of training, the record {run.record.train_ms} ms")
    elif run.record.tokens_per_s != 1000 * run.record.tokens / run.record.train_ms:
        complaints.append(f"{run.name}: {run.record.tokens_per_s} tokens/s are not its tokens by its time")
    if last is not None and last.get("energy_j", run.record.energy_j) != run.record.energy_j:
        complaints.append(f"{run.name}: the log has {last['energy_j']} J, the record {run.record.energy_j} J")
    return complaints + _power_complaints(run.name, run.record)


def _power_complaints(name: str, record: RunRecord) -> list[str]:
    """What the record says of power follows from its joules; older records say nothing of it."""
    claimed = (record.mean_watts, record.tokens_per_kwh)
    computed = (mean_watts(record.energy_j, record.train_ms), tokens_per_kwh(record.tokens, record.energy_j))
    if claimed in (computed, (None, None)):
        return []
    return [f"{name}: {claimed[0]} W and {claimed[1]} tokens/kWh do not follow from its {record.energy_j} J"]


def _distinct(runs: Sequence[_Run]) -> Finding:
    complaints = [f"seed {seed} in {_names(same)}" for seed, same in _groups(runs, lambda r: r.record.seed) if same[1:]]
    complaints += [f"the same log in {_names(same)}" for _, same in _groups(runs, lambda r: r.sha256) if same[1:]]
    return f"{len(runs)} different seeds", complaints


def _complete(runs: Sequence[_Run]) -> Finding:
    """One series, all of it: a run that went badly may not be left out."""
    alone = [run for run in runs if run.record.series is None]
    if alone:
        return "", [f"{_names(alone)} in no series, so that runs may have been left out: `nanosprint race` makes one"]
    places = [run.record.series for run in runs if run.record.series is not None]
    name, size, found = places[0].id, places[0].size, [place.index for place in places]
    complaints = []
    if len({(place.id, place.size) for place in places}) > 1:
        kinds = sorted({f"{place.id} of {_counted(place.size, 'run')}" for place in places})
        complaints.append(f"{len(kinds)} different series: {_listed(kinds)}")
    elif missing := sorted(set(range(size)) - set(found)):
        left_out = ", ".join(map(str, missing))
        complaints.append(f"run {left_out} of {size} (counted from 0) left out of series {name}")
    if twice := sorted({index for index in found if found.count(index) > 1}):
        complaints.append(f"run {', '.join(map(str, twice))} more than once")
    return f"all {size} runs of series {name}", complaints


RULES: tuple[tuple[str, Callable[[Sequence[_Run]], Finding]], ...] = (
    ("unedited", _unedited),
    ("finished", _finished),
    ("recipe", _same_recipe),
    ("precision", _same_precision),
    ("machine", _same_machine),
    ("software", _same_software),
    ("data", _same_data),
    ("steps", _all_steps),
    ("validation", _validated),
    ("clock", _on_the_clock),
    ("seeds", _distinct),
    ("series", _complete),
)


def _beats(losses: Sequence[float], num_runs: int, target: float, alpha: float) -> Rule:
    if len(losses) < num_runs:
        return Rule("target", False, f"{num_runs - len(losses)} of {num_runs} runs have no final validation loss")
    if num_runs < 2:
        return Rule("target", False, f"n={num_runs}: a claim takes at least 2 runs, since one shows no spread")
    summary, test = stats.summarize(losses), stats.test_below(losses, target)
    found = f"mean {summary.mean:.5f}, sd {summary.sd:.5f}, n={summary.n}"
    if test.p is None:
        return Rule("target", False, f"{found}: different seeds do not give equal losses")
    found += f", p={test.p:.2g}"
    if beats(losses, target, alpha):
        return Rule("target", True, found)
    if summary.mean >= target:
        return Rule("target", False, f"{found}: the mean is not below {target:g}")
    needed = stats.runs_needed(summary.sd, target - summary.mean, alpha=alpha, design="below")
    return Rule("target", False, f"{found}: a margin of {target - summary.mean:.5f} takes about {needed} runs")


def beats(losses: Sequence[float], target: float, alpha: float) -> bool:
    """The rule on losses alone: their true mean is below the target, at a one-sided p below alpha."""
    p = stats.test_below(losses, target).p
    return p is not None and p < alpha


# --- small things -----------------------------------------------------------------------------------------------------


def _val_targets(run: _Run) -> int:
    """How many targets the recipe scores; without a number of its own, all that the validation files have."""
    if run.recipe.eval.tokens is not None:
        return run.recipe.eval.tokens
    return sum(f.tokens for f in run.record.data.files if f.name.rfind("val") > f.name.rfind("train")) - 1


def _check_numbers(target: float, alpha: float) -> None:
    if not math.isfinite(target):
        raise UserError(f"target={target} is not a loss")
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha={alpha} must lie between 0 and 0.5")


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def _groups(runs: Sequence[_Run], key: Callable[[_Run], Any]) -> list[tuple[Any, list[_Run]]]:
    groups: dict[Any, list[_Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.items())


def _mixed(what: str, runs: Sequence[_Run], key: Callable[[_Run], str]) -> list[str]:
    """A complaint, if `key` is not the same for all."""
    groups = _groups(runs, key)
    described = "; ".join(f"{value} in {_names(same)}" for value, same in groups[:_PLURAL])
    return [f"{len(groups)} different {what}: {described}"] if len(groups) > 1 else []


def _names(runs: Sequence[_Run]) -> str:
    return _listed([run.name for run in runs], ", ")


def _listed(items: Sequence[str], separator: str = "; ") -> str:
    more = [f"and {len(items) - _PLURAL} more"] if len(items) > _PLURAL else []
    return separator.join([*items[:_PLURAL], *more])


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
