"""Curves against the values worked out by hand."""

import math

import pytest

from nanosprint.config import LRSchedule, MomentumSchedule, Schedule


def test_cosine_with_warmup():
    curve = LRSchedule(shape="cosine", warmup_steps=10, floor=0.1)
    assert curve.factor(0, 110) == pytest.approx(0.1)
    assert curve.factor(9, 110) == 1.0
    assert curve.factor(10, 110) == 1.0
    assert curve.factor(60, 110) == pytest.approx(0.1 + 0.9 / 2)
    assert curve.factor(109, 110) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.99)) / 2)


def test_trapezoid():
    curve = LRSchedule(warmup_steps=4, cooldown_steps=10, floor=0.2)
    assert [curve.factor(s, 30) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert curve.factor(20, 30) == 1.0
    assert curve.factor(25, 30) == pytest.approx(0.6)
    assert curve.factor(29, 30) == pytest.approx(0.28)


def test_constant_where_nothing_is_said():
    assert {LRSchedule().factor(s, 7) for s in range(7)} == {1.0}


def test_momentum_up_and_down():
    curve = MomentumSchedule(start=0.85, end=0.95, warmup_steps=300, cooldown_steps=50)
    assert curve.value(0, 1285) == pytest.approx(0.85)
    assert curve.value(150, 1285) == pytest.approx(0.90)
    assert curve.value(300, 1285) == 0.95
    assert curve.value(1235, 1285) == 0.95
    assert curve.value(1284, 1285) == pytest.approx(0.852)  # the value that the record's schedule ends with


def test_curves_must_fit():
    with pytest.raises(ValueError, match=r"schedule\.lr: 6 warm-up and 5 cool-down steps do not fit .*num_steps=10"):
        Schedule(lr=LRSchedule(warmup_steps=6, cooldown_steps=5)).validate(10)
    with pytest.raises(ValueError, match=r"schedule\.momentum"):
        Schedule(momentum=MomentumSchedule(warmup_steps=11)).validate(10)


def test_trapezoid_with_another_cooldown():
    curve = LRSchedule(warmup_steps=4, cooldown_steps=10, floor=0.2)
    assert curve.factor(15, 30, cooldown=0.5) == 1.0
    assert curve.factor(24, 30, cooldown=0.5) == pytest.approx(0.2 + 0.8 * 6 / 15)
    assert curve.factor(29, 30, cooldown=0.0) == 1.0
    assert curve.factor(3, 30, cooldown=0.5) == 1.0  # the warm-up is everybody's
    assert curve.factor(0, 30, cooldown=0.5) == 0.25


def test_a_groups_cooldown_must_fit():
    schedule = Schedule(lr=LRSchedule(warmup_steps=6))
    schedule.validate_cooldown("groups.0.cooldown", 0.4, 10)
    with pytest.raises(ValueError, match=r"groups\.0\.cooldown=0\.5 of train\.num_steps=10 and 6 warm-up steps do not"):
        schedule.validate_cooldown("groups.0.cooldown", 0.5, 10)
    with pytest.raises(ValueError, match=r"groups\.1\.cooldown=0\.5, but schedule\.lr\.shape=cosine has no cool-down"):
        Schedule(lr=LRSchedule(shape="cosine")).validate_cooldown("groups.1.cooldown", 0.5, 10)
