"""What benchmarks share: percentiles of repeated timings, and rows of JSON that say on what they were measured."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
