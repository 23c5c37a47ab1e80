"""The kernels whose asynchronous products are ordered by hand: back end "triton" with their tiles, on a CPU.

`gluon_on_cpu` stands in for the layer below Triton; on a GPU `test_attention_windowed.py` runs the kernels themselves.
"""

from pathlib import Path

import pytest
import torch

from nanosprint.kernels import has_triton
from nanosprint.kernels.tuning import AttentionTile
from nanosprint.ops.attention import check_documents, pack_documents
from nanosprint.ops.attention_backends import probe, windowed
from tests.ops.gluon_on_cpu import Descriptor, Machine, load_kernels

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs Triton")

CASES = (  # rows, tokens of a row, lengths of documents or None, windows
    (1, 137, [1, 1, 70, 0, 33, 1, 31, 0, 0], (None, 0, 40, 500)),
    (1, 256, [200, 56], (None, 100)),
    (2, 75, None, (17,)),
    (1, 3, [2, 1], (None, 1)),
)
TILES = (  # forward, gradient_q, gradient_kv as (queries, keys, stages)
    ((16, 32, 2), (32, 16, 2), (16, 32, 2)),
    ((32, 16, 3), (16, 16, 3), (32, 32, 3)),
    ((64, 16, 4), (64, 16, 4), (16, 64, 4)),
    ((16, 16, 2), (16, 32, 2), (16, 16, 3)),
)


@pytest.fixture
def machine(monkeypatch):
    """Launches of kernels.attention run on it; its `when` says when asynchronous work is done."""
    from nanosprint.kernels import attention, attention_hopper

    machine = Machine()
    kernels = load_kernels(str(Path(attention_hopper.__file__)), machine)
    machine.when = {}

    def launch(name, blocks, tile, q, *args):
        found = [
            Descriptor(a.base, a.shape, a.strides, a.block_shape)
            if isinstance(a, attention_hopper.TensorDescriptor)
            else a
            for a in args
        ]
        sizes = {"HEAD": q.size(2), "QUERIES": tile.queries, "KEYS": tile.keys, "STAGES": tile.stages}
        machine.launch(kernels[name], blocks * q.size(1), *found, **sizes, **machine.when)

    monkeypatch.setattr(attention, "launch", launch)
    return machine


def of_tiles(tiles):
    return tuple(AttentionTile(q, k, 4, stages, descriptors=True, overlap=True) for q, k, stages in tiles)


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("late_products", [False, True])
@pytest.mark.parametrize("tiles", TILES)
def test_results_do_not_depend_on_when_things_are_done(machine, monkeypatch, tiles, late_copies, late_products):
    machine.when = {"late_copies": late_copies, "late_products": late_products}
    monkeypatch.setattr(windowed, "_tiles", lambda device: of_tiles(tiles))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    for rows, seq_len, lengths, windows in CASES:
        packed = lengths and check_documents(pack_documents(lengths, slots=len(lengths) + 3), rows, seq_len)
        leaves = probe.random_inputs((rows, seq_len, 2, 16), torch.float32, torch.device("cpu"))
        for window in windows:
            worst = max(probe.errors(windowed.load(), leaves, 0.4, window, packed))
            assert worst < 1e-5, (lengths, window, worst)
