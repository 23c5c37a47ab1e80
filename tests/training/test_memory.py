"""Peak memory where torch's own figures leave something out."""

import torch

from nanosprint.training.memory import PeakMemory


def segment(total, allocated, pool, device=0):
    return {"device": device, "total_size": total, "allocated_size": allocated, "segment_pool_id": pool}


def test_what_graphs_hold_between_replays_counts(monkeypatch):
    """Of this GPU's graphs, what is not allocated; the free part of the common pool is for anybody, and no peak."""
    segments = [segment(100, 20, (0, 0)), segment(50, 5, (0, 1)), segment(30, 0, (0, 2)), segment(999, 0, (0, 1), 1)]
    peaks = iter([40, 40, 90])
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))
    memory = PeakMemory(torch.device("cuda", 0))
    assert memory.read() == 40
    memory.resume()
    assert memory.read() == 40 + 45 + 30
    assert memory.read() == 90 + 45 + 30
