"""When the average of the weights begins, moves and is blended, against lists written out by hand."""

import math
from dataclasses import replace

import pytest

from nanosprint.config import Schedule, TailAverage
from nanosprint.config.schedule import AverageStep
from nanosprint.recipes import load_recipe


def events(average, num_steps):
    """(step, kept, blend) of every step after which something happens."""
    steps = ((step, average.step(step, num_steps)) for step in range(num_steps))
    return [(step, *now) for step, now in steps if now is not None]


def test_steps_are_counted_back_from_the_last():
    average = TailAverage(share=0.3, horizon=0.2, stride=2, blend=0.4)
    kept = math.exp(-2 / 8)  # 8 steps of horizon
    assert events(average, 40) == [
        (27, 0.0, None), *((step, kept, None) for step in (29, 31, 33, 35, 37)), (39, kept, 0.4),
    ]  # fmt: skip


def test_the_default_in_the_third_schedule():
    found = events(TailAverage(), 313)
    assert [step for step, *_ in found] == list(range(276, 313, 4))  # 36 steps, nearest to 0.12 x 313 = 37.6
    assert {kept for _, kept, _ in found} == {0.0, math.exp(-4 / 37.56)}


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [(1, [(0, 0.0)]), (2, [(0, 0.0), (1, 4)]), (5, [(0, 0.0), (4, 4)]), (6, [(1, 0.0), (5, 4)])],
)
def test_short_runs_have_one_move(num_steps, expected):
    """Whatever the share; a run of a single step has nothing to average, and is blended with itself."""
    found = events(TailAverage(horizon=1.0), num_steps)
    assert [(step, kept) for step, kept, _ in found] == [
        (step, moved and math.exp(-moved / num_steps)) for step, moved in expected
    ]
    assert [blend for *_, blend in found][-1] == 0.3
    assert not any([blend for *_, blend in found][:-1])


def test_the_whole_run():
    assert [step for step, *_ in events(TailAverage(share=1.0, stride=1), 5)] == [0, 1, 2, 3, 4]


def test_roles():
    average = TailAverage(exclude=("embed", "matrix.qkv"))
    roles = ("embed", "embed.value", "matrix.qkv", "matrix", "embedding", "matrix.qkvs")
    assert [average.excludes(role) for role in roles] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": 0.0}, r"schedule\.average\.share=0\.0: it must be above 0 and at most 1"),
        ({"horizon": 0.0}, r"schedule\.average\.horizon=0\.0: it must be above 0, and finite"),
        ({"stride": 0}, r"schedule\.average\.stride=0: it must be at least 1"),
        ({"blend": 1.5}, r"schedule\.average\.blend=1\.5: it must be between 0 and 1"),
        ({"blends": (0.1, -0.1)}, r"schedule\.average\.blends\.1=-0\.1: it must be between 0 and 1"),
        ({"exclude": ("embed", "tables")}, r"schedule\.average\.exclude\.1=tables is the role of no group: there are"),
        (
            {"exclude": ("embed", "head", "matrix", "scalar")},
            r"schedule\.average\.exclude=.* leaves nothing to average",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        with_average(TailAverage(**changes)).validate()


def with_average(average):
    recipe = load_recipe("tiny")
    return replace(recipe, schedule=replace(recipe.schedule, average=average))


def test_plans_and_hash():
    plain, recipe = load_recipe("tiny"), with_average(TailAverage(share=0.2, stride=2, blends=(0.5, 0.6))).validate()
    assert [step for step in range(20) if recipe.plan(step).average is not None] == [15, 17, 19]
    assert isinstance(recipe.plan(19).average, AverageStep)
    assert recipe.hash != plain.hash
    assert recipe.hash == with_average(TailAverage(share=0.2, stride=2)).hash  # other blends change no result
    assert Schedule().average is None
    staged = load_recipe("record-third", ["schedule.average={}"])
    assert staged.plan(312).average.blend == 0.3
    assert load_recipe("record-third").plan(312).average is None
