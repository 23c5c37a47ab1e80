"""The timed region, with a clock whose time the test decides."""

import time

import pytest

from nanosprint.training.clock import Clock


class World:
    """Time in ms, a device with work queued, and a diary of what happened."""

    def __init__(self):
        self.ms, self.queued_ms, self.diary = 0.0, 0.0, []

    def now_ns(self):
        return round(self.ms * 1e6)

    def synchronize(self):
        self.ms += self.queued_ms
        self.queued_ms = 0.0
        self.diary.append("sync")

    def start(self):
        self.ms += 100.0  # reading a counter takes time, which is not training
        self.diary.append("hook start")

    def stop(self):
        self.ms += 100.0
        self.diary.append("hook stop")


@pytest.fixture
def world():
    return World()


@pytest.fixture
def clock(world):
    return Clock(world.synchronize, hooks=[world], now_ns=world.now_ns)


def test_counts_segments_and_the_devices_work_but_no_hooks(world, clock):
    world.queued_ms = 50.0  # of before: not ours
    clock.start()
    assert world.ms == 150.0
    world.ms += 10.0
    assert clock.train_ms == 10.0
    world.queued_ms = 5.0  # asked for within the segment: ours
    assert clock.stop() == 15.0
    world.ms += 1000.0
    assert clock.train_ms == 15.0
    clock.start()
    world.ms += 1.0
    assert clock.stop() == 16.0
    assert world.diary == ["sync", "hook start", "sync", "hook stop"] * 2


def test_paused(world, clock):
    clock.start()
    world.ms += 3.0
    with clock.paused():
        assert not clock.running
        world.ms += 500.0
    assert clock.running
    world.ms += 4.0
    assert clock.stop() == 7.0
    assert world.diary.count("hook start") == world.diary.count("hook stop") == 2


def test_an_exception_in_a_pause_leaves_it_stopped(world, clock):
    clock.start()
    with pytest.raises(KeyboardInterrupt), clock.paused():
        raise KeyboardInterrupt
    assert not clock.running
    assert world.diary[-1] == "hook stop"


def test_misuse(clock):
    with pytest.raises(RuntimeError, match="not running: start it before"):
        clock.stop()
    with pytest.raises(RuntimeError, match="not running"), clock.paused():
        pass
    clock.start()
    with pytest.raises(RuntimeError, match="already running: stop it"):
        clock.start()
    with pytest.raises(RuntimeError, match="running: stop it before its time is restored"):
        clock.restore(1.0)


def test_restore(world, clock):
    clock.restore(1234.567891)
    assert clock.train_ms == 1234.567891
    clock.start()
    world.ms += 1.0
    assert clock.stop() == pytest.approx(1235.567891, abs=1e-9)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot be restored"):
            clock.restore(bad)


def test_real_time_is_monotonic_and_near_the_truth():
    clock = Clock()
    clock.start()
    reads = [clock.train_ms for _ in range(1000)]
    assert reads == sorted(reads)
    time.sleep(0.02)
    assert clock.stop() >= 20.0
    frozen = clock.train_ms
    time.sleep(0.005)
    assert clock.train_ms == frozen
