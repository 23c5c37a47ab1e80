"""Compilation on the clock is counted, and none beside it."""

import torch

from nanosprint.training.clock import Clock
from nanosprint.training.graphs import GraphCounter


def test_only_what_is_compiled_on_the_clock_counts():
    def compile_one():
        torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(2))

    counter = GraphCounter()
    clock = Clock(hooks=[counter])
    compile_one()
    clock.start()
    clock.stop()
    assert counter.count == 0
    for _ in range(2):
        clock.start()
        torch._dynamo.reset()
        compile_one()
        clock.stop()
        torch._dynamo.reset()
        compile_one()
    assert counter.count == 2


def test_recordings_count_too():
    counter, made = GraphCounter(), [2]
    counter.recorded = lambda: len(made)
    counter.start()
    made += [3, 4]
    counter.stop()
    made.append(5)
    assert counter.count == 2
