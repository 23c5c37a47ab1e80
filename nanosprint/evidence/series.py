"""What a race is going to do, written down before it starts: `race.json`.

The file names every run beforehand, so that none can be left out of the count later, and it holds the recipes in full,
so that a race can go on where the program that made them has moved on.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nanosprint.config.recipe import Execution, Recipe
from nanosprint.errors import UserError
from nanosprint.results import jsonfile
from nanosprint.results.runs import RunDir, Series, new_run_dir
from nanosprint.training.request import Budget, RunRequest, load_request, timestamp

SCHEMA = 1
FILE_NAME = "race.json"
Processes = Literal["shared", "each"]  # seeds of a recipe in one, where a run is one process; or one for each run


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A recipe and the id of its series of seeds."""

    name: str
    series: str
    recipe_hash: str  # as asked for: a budget changes the recipe's length, and so its hash
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run: whose, its seed and place in the series, and its folder below the race's."""

    contestant: str
    seed: int
    index: int
    dir: str

    @property
    def name(self) -> str:
        return f"{self.contestant} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Race:
    """Every run in the order in which they are carried out, and all settings that they share."""

    contestants: tuple[Contestant, ...]
    order: tuple[Entry, ...]
    runs: int  # of each contestant
    execution: Execution
    data: str | None
    budget: Budget | None
    max_steps: int | None
    target: float | None
    processes: Processes = "shared"
    keep_checkpoints: bool = False  # of runs that are settled: gigabytes each
    baseline: str | None = None  # of an ablation: whom the others are compared with
    left_out: dict = field(default_factory=dict)  # of an ablation: switches that make no sense here, and why
    command: tuple[str, ...] = ()
    created: str = ""
    schema: int = SCHEMA

    def contestant(self, name: str) -> Contestant:
        return next(one for one in self.contestants if one.name == name)

    def entries(self, contestant: str) -> list[Entry]:
        """A contestant's runs in the order of their index."""
        return [entry for entry in self.order if entry.contestant == contestant]

    def group(self, entry: Entry) -> str | None:
        """The runs with which this one shares a process; None: with none."""
        return entry.contestant if self.processes == "shared" and self.execution.gpus == 1 else None

    def request(self, entry: Entry, folder: Path) -> RunRequest:
        """What to ask of a run that has not begun.

        A budget is spent on the contestant's first run that gets as far as to be fitted to it; the others take over
        the recipe that came out, since runs of unlike length would not be a series.
        """
        fitted = None if self.budget is None else self._fitted(entry.contestant, folder)
        return self._request(entry, fitted)

    def check(self) -> "Race":
        """Return self; raise ValueError for what every run would refuse."""
        self._request(self.order[0], None)
        return self

    def _request(self, entry: Entry, fitted: Recipe | None) -> RunRequest:
        one = self.contestant(entry.contestant)
        recipe = fitted or one.recipe
        train = replace(recipe.train, checkpoint_last=recipe.train.checkpoint_last and self.keep_checkpoints)
        return RunRequest(
            recipe=replace(recipe, train=train),
            execution=self.execution,
            seed=entry.seed,
            data=self.data,
            max_steps=self.max_steps,
            budget=None if fitted else self.budget,
            series=Series(id=one.series, index=entry.index, size=self.runs),
            command=self.command,
            created=timestamp(),
        )

    def _fitted(self, contestant: str, folder: Path) -> Recipe | None:
        """The recipe of the contestant as an earlier run was fitted to the budget, if one was."""
        for entry in self.entries(contestant):
            run = RunDir(folder / entry.dir)
            if run.has_run and (request := load_request(run)).budget is None:
                return request.recipe
        return None


def plan_race(
    recipes: Mapping[str, Recipe],
    *,
    runs: int,
    first_seed: int,
    execution: Execution,
    data: str | None = None,
    budget: Budget | None = None,
    max_steps: int | None = None,
    target: float | None = None,
    processes: Processes = "shared",
    keep_checkpoints: bool = False,
    baseline: str | None = None,
    left_out: Mapping[str, str] | None = None,
    command: tuple[str, ...] = (),
) -> Race:
    """A race between recipes by name: each with seeds first_seed .. first_seed + runs - 1, interleaved.

    Interleaved, since a machine that warms up or is shared drifts, and drift should hit all alike.
    Raises ValueError for fewer than two runs, and where no recipe or a name without a letter is given.
    """
    if runs < 2:
        raise UserError(f"--runs {runs}: how much seeds scatter takes at least 2 runs of each recipe")
    if not recipes:
        raise UserError("a race wants at least one recipe")
    folders = {name: re.sub(r"[^A-Za-z0-9._=-]+", "-", name).strip("-.") for name in recipes}
    if len(set(folders.values())) < len(folders) or not all(folders.values()):
        raise UserError(f"{', '.join(recipes)}: the names give no folder of its own to each; rename one")
    created, tag = timestamp(), secrets.token_hex(4)
    contestants = tuple(
        Contestant(name=name, series=f"{folders[name]}-{tag}", recipe_hash=recipe.hash, recipe=recipe)
        for name, recipe in recipes.items()
    )
    order = tuple(
        Entry(contestant=name, seed=first_seed + i, index=i, dir=f"{folders[name]}-{first_seed + i}")
        for i in range(runs)
        for name in recipes
    )
    return Race(
        contestants=contestants,
        order=order,
        runs=runs,
        execution=execution,
        data=data,
        budget=budget,
        max_steps=max_steps,
        target=target,
        processes=processes,
        keep_checkpoints=keep_checkpoints,
        baseline=baseline,
        left_out=dict(left_out or {}),
        command=command,
        created=created,
    ).check()


def claim_race_dir(out: Path | None, kind: str) -> Path:
    """Make the folder of a new race, by default runs/<time>-<kind>. Raises ValueError where one is there already."""
    if out is None:
        return new_run_dir("runs", kind).path
    if (out / FILE_NAME).exists():
        raise UserError(f"--out {out} already holds a race: choose another folder, or go on with --resume {out}")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {out} cannot be a folder: a file of that name is in the way") from None
    return out


def save_race(folder: Path, race: Race) -> None:
    """Write `race.json`, atomically."""
    jsonfile.write(folder / FILE_NAME, race)


def load_race(folder: Path) -> Race:
    """The race in a folder. Raises ValueError where there is none, and for one that was edited."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError(f"{folder} holds no race: there is no {path}")
    data: dict[str, Any] = jsonfile.read_object(path)
    race = jsonfile.build(Race, data, schema=SCHEMA, where=str(path))
    for one in race.contestants:
        if one.recipe.hash != one.recipe_hash:
            raise UserError(f"{path} was edited: the recipe of {one.name} has hash {one.recipe.hash}")
    return race
