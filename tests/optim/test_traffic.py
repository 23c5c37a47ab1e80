"""The bytes counted are those that the engine sends, which a counter around torch's collectives sees."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from toy import GROUPS, join, spawn, toy, train

from benchmarks.comm_bytes import COMPUTE, count, step_ms
from nanosprint.optim import sharding
from nanosprint.optim.traffic import traffic
from nanosprint.recipes import load_recipe


def engine_sends(rank, processes):
    join(rank, processes)
    replicated = tuple(replace(g, comm="replicate") if g.role == "matrix" else g for g in GROUPS)
    for groups in (GROUPS, replicated):
        model, engine = toy(groups)
        seen = {"reduce_scatter": 0.0, "all_gather": 0.0, "all_reduce": 0.0}
        whole = {"reduce_scatter": 1, "all_gather": 0, "all_reduce": 0}  # which argument holds all of it
        plain = sharding.reduce_scatter, sharding.all_gather, dist.all_reduce

        def counted(name, function, seen=seen, whole=whole):
            def call(*arguments, **options):
                tensor = arguments[whole[name]]
                if options.get("async_op"):  # not the few numbers of log lines
                    factor = 2 if name == "all_reduce" else 1
                    seen[name] += factor * tensor.nbytes * (processes - 1) / processes
                return function(*arguments, **options)

            return call

        sharding.reduce_scatter, sharding.all_gather, dist.all_reduce = (
            counted(name, function) for name, function in zip(seen, plain, strict=True)
        )
        train(model, engine, range(1), lanes=8 // processes)
        sharding.reduce_scatter, sharding.all_gather, dist.all_reduce = plain
        told = traffic(engine.parts, processes)
        for name, number in seen.items():
            assert number == pytest.approx(sum(getattr(part, name) for part in told)), name
        assert seen["all_reduce"] > 0
        assert seen["all_gather"] > 0


def test_counted_bytes_are_sent():
    spawn(2, engine_sends)


def test_a_recipe_by_hand():
    """All of gpt2 is Adam's, in fp32: summed and sent back, padded to whole shares."""
    recipe = load_recipe("gpt2")
    numbers = 124_439_808
    parts = count(recipe, 8)
    sharded = [part for part in parts if part.all_gather]
    assert 0 <= sum(part.numbers for part in parts) - numbers < 200_000  # gaps and padding
    assert sum(part.sent for part in sharded) == sum(2 * 4 * part.numbers * 7 / 8 for part in sharded)
    assert sum(part.sent for part in parts) == pytest.approx(2 * 4 * numbers * 7 / 8, rel=0.001)
    assert sum(part.sent for part in count(recipe, 1)) == 0


def test_more_processes_than_matrices_send_padding():
    few, many = (sum(part.sent for part in count(load_recipe("record"), size)) for size in (8, 512))
    assert many > 5 * few
    computing, sending = step_ms(COMPUTE["record"], count(load_recipe("record"), 8), 8)
    assert computing == pytest.approx(1.424 * 393_216 / 8 / 1000)
    assert 0 < sending < computing
