"""What benchmarks share: percentiles of repeated timings, and rows of JSON that say on what they were measured."""

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanosprint.training.environment import environment


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_ms(work: Callable[[], Any], *, repeats: int = 20, warm_up: int = 3) -> dict[str, float]:
    """Milliseconds of `work`, the device idle before and after: median with the 20th and 80th percentile."""
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(1000 * (time.perf_counter() - start))
    cuts = statistics.quantiles(times, n=5)
    return {"median_ms": statistics.median(times), "p20_ms": cuts[0], "p80_ms": cuts[-1]}


def mark(device: torch.device) -> Any:
    """A moment on the device's time line: an event on CUDA, which waits for nothing, elsewhere the host's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, stop: Any) -> float:
    """Milliseconds between two marks that the device has passed."""
    return float(start.elapsed_time(stop)) if isinstance(start, torch.cuda.Event) else 1000 * (stop - start)


class Timing(NamedTuple):
    """Milliseconds of a call: median with the 20th and 80th percentile, and how they were taken."""

    ms: float
    p20: float
    p80: float
    how: str


def device_timing(work: Callable[[], Any], device: torch.device, budget_ms: float = 50.0) -> Timing:
    """The device's time for `work`, some `budget_ms` of it: 5 to 30 calls, on data as the call before left it.

    On a GPU "events": calls follow each other in the queue, with marks between them, so that the host counts only where
    it is the slower. There, "graph": many calls are recorded and replayed; or "launches", the host's pace, where
    `work` cannot be recorded. Elsewhere "host".
    """
    work()
    work()
    synchronize()
    begin, start = time.perf_counter(), mark(device)
    for _ in range(3):
        work()
    host_ms, stop = 1000 * (time.perf_counter() - begin) / 3, mark(device)
    synchronize()
    each_ms = elapsed_ms(start, stop) / 3
    repeats = int(min(30, max(5, budget_ms / each_ms)))
    launch_bound = device.type == "cuda" and host_ms > 0.8 * each_ms
    if launch_bound:
        with contextlib.suppress(Exception):  # whatever cannot be captured, for what a library may do
            return Timing(*graph_ms(work, launches=int(min(20, max(1, 2 / each_ms)))), "graph")
        synchronize()
    work()
    marks = [mark(device)]
    for _ in range(repeats):
        work()
        marks.append(mark(device))
    synchronize()
    times = [elapsed_ms(*pair) for pair in pairwise(marks)]
    cuts = statistics.quantiles(times, n=5)
    how = "host" if device.type != "cuda" else "launches" if launch_bound else "events"
    return Timing(statistics.median(times), cuts[0], cuts[-1], how)


def graph_ms(work: Callable[[], Any], launches: int = 20, repeats: int = 9) -> tuple[float, float, float]:
    """(median, 20th, 80th percentile) milliseconds of one of many launches replayed as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / launches)
    cuts = statistics.quantiles(times[1:], n=5)
    return statistics.median(times[1:]), cuts[0], cuts[-1]


def write_rows(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Append rows to a JSON-lines file, each with versions, devices and commit."""
    if out is None:
        return
    where = environment()
    about = {"versions": where["versions"], "commit": where["commit"], "dirty": where["dirty"]}
    about["devices"] = where["gpus"] or [where["cpu"]]
    with out.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **about}) + "\n")
