"""`--profile`: a few steps under torch's profiler, as a trace to open and a table of time by kernel group."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nanosprint.files import atomic_write

WAIT, WARM_UP, ACTIVE = 2, 2, 4  # steps before profiling, steps profiled but thrown away, steps kept

# First match wins; names of kernels and of CPU operators, in lower case.
_GROUPS = (
    ("attention", ("flash", "attention", "fmha", "cudnn_generated")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "addmm", "::mm", "::bmm", "linear", "xmma", "sgemm", "matmul")),
    ("communication", ("nccl", "all_reduce", "allreduce", "gloo", "c10d")),
    ("softmax and loss", ("nll_loss", "softmax", "cross_entropy", "logsumexp")),
    ("embedding", ("embedding", "index_put", "scatter", "gather", "index_add", "index_select")),
    ("norm", ("norm",)),
    ("optimizer", ("foreach", "multi_tensor", "adam")),
    ("copies and fills", ("memcpy", "memset", "copy_", "fill", "cat", "zero_", "_to_copy")),
)


def group_of(name: str) -> str:
    """The kernel group of a kernel or operator name."""
    lowered = name.lower()
    return next((group for group, parts in _GROUPS if any(p in lowered for p in parts)), "elementwise and other")


class StepProfiler:
    """Call `step()` after each optimizer step; writes `trace.json.gz` and `table.txt` once the kept steps are over."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.table: str | None = None
        self._steps = 0
        self._profiler = torch.profiler.profile(
            activities=_activities(device),
            schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
        )

    @property
    def writes_now(self) -> bool:
        """Whether the next `step` writes the files, which takes seconds."""
        return self._steps + 1 == WAIT + WARM_UP + ACTIVE

    def step(self) -> None:
        self._steps += 1
        self._profiler.step()

    def _write(self, profiler: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json.gz"))
        self.table = table(profiler.key_averages(), self.device.type == "cuda", ACTIVE)
        atomic_write(self.folder / "table.txt", self.table)


@contextmanager
def profiled(folder: Path | None, device: torch.device) -> Iterator[StepProfiler | None]:
    """A running `StepProfiler` that writes into `folder`, or None without a folder."""
    if folder is None:
        yield None
        return
    profiler = StepProfiler(folder, device)
    with profiler._profiler:
        yield profiler


def profile_work(work: Callable[[], None], device: torch.device, repeats: int) -> str:
    """The table of `repeats` calls of `work`, as milliseconds a call."""
    with torch.profiler.profile(activities=_activities(device)) as profiler:
        for _ in range(repeats):
            work()
    return table(profiler.key_averages(), device.type == "cuda", repeats)


def _activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


def table(events: Any, on_gpu: bool, steps: int) -> str:
    """Milliseconds a step by kernel group, and the fifteen kernels (operators, on CPU) that take longest."""
    groups: dict[str, float] = defaultdict(float)
    rows: list[tuple[float, int, str]] = []
    for event in events:
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue  # the launching operators: their time is that of the kernels
        ms = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / steps
        if ms <= 0 or event.key.startswith("ProfilerStep"):
            continue
        groups[group_of(event.key)] += ms
        rows.append((ms, event.count // steps, event.key))
    total = sum(groups.values()) or 1.0
    lines = [f"{'group':<24}{'ms/step':>10}{'share':>8}"]
    lines += [f"{g:<24}{ms:>10.3f}{ms / total:>8.1%}" for g, ms in sorted(groups.items(), key=lambda item: -item[1])]
    lines += ["", f"{'ms/step':>10}{'calls':>8}  name"]
    lines += [f"{ms:>10.3f}{count:>8}  {name[:100]}" for ms, count, name in sorted(rows, reverse=True)[:15]]
    return "\n".join(lines) + "\n"
