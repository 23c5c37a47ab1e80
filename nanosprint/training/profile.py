"""`--profile`: a few steps under torch's profiler, as a trace to open and a table of time by kernel group.

A kernel's group is told from its name: that of a library or of one of our kernels, or, inside `triton_poi_fused_...`,
those of the operators that the compiler put into it. To place a new kernel, add a word of its name to `_NAMES`. What
no word fits is "other" and is listed below the table, so that nothing hides. On a CPU operators take the place of
kernels.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanosprint.files import atomic_write

WAIT, WARM_UP, ACTIVE = 2, 2, 4  # steps before profiling, steps profiled but thrown away, steps kept
TOP = 15  # kernels listed

# First match wins; regular expressions on names in lower case.
_NAMES = (
    ("communication", r"nccl|all_?reduce|gloo|c10d"),
    ("composed attention", r"(^|_)compose|^_(maps|read|dmaps|dq|dk|dv)_kernel"),
    ("attention", r"flash|attention|(^|_)attend|fmha|(^|_)mha(_|$)|cudnn_generated|sdpa"),
    ("fused MLP", r"^_relu2_"),
    ("softmax and loss", r"xent|nll_loss|cross_entropy|softmax|logsumexp"),
    # Our update kernels, and the symmetric products that only the optimizer has.
    (
        "optimizer",
        r"adam|adagrad|muon|polar|^_(momentum|moment|factor|apply|divide|product)_kernel|multi_tensor",
    ),
    ("copies and transposes", r"quanti[sz]e|^_(peak|renew|turn)_kernel"),
    ("fp8 products", r"e4m3|e5m2|fp8|float8|scaled_mm|nvjet(_sm\d+)?_([a-z]*q[a-z]*|[a-z]{5})_"),
    ("fp32 products", r"sgemm|simt|gemm_f32|gemm_tf32|nvjet(_sm\d+)?_s[a-z]*_"),
    ("matrix products", r"^aten::(mm|bmm|addmm|baddbmm|matmul|linear|_mm)"),  # a name on the CPU tells no format
    ("bf16 products", r"gemm|nvjet|cutlass|xmma|splitk|gemv|_mm_|matmul"),
    (
        "embedding",
        r"^_(segments|borders)_kernel|embedding|index_(put|add|select)|index_elementwise|indexselect|indexing|scatter|gather|_sort|radixsort"
        r"|compute_grad_weight|segment_offset|table_grad|sparse|coalesce|unique",
    ),
    ("copies and transposes", r"memcpy|copy|transpose|catarray|::cat$|::clone|_to\b"),
    ("fills", r"memset|fill|zero_"),
    ("elementwise", r"elementwise|reduce_kernel|norm|rotary|gate|^triton_|^aten::"),
)
# The same for what the compiler fuses, by the operators that it lists.
_FUSED = (
    ("composed attention", r"_softmax.*masked_fill|masked_fill.*_softmax|compose"),
    ("attention", r"^tem_fused_.*(flex|attention)|flex_attention"),
    ("softmax and loss", r"nll_loss|log_softmax|cross_entropy|logsumexp|xent"),
    ("optimizer", r"adam|muon|polar|foreach"),
    ("fp8 products", r"^tem_fused_.*scaled_mm"),
    ("bf16 products", r"^tem_fused_.*mm"),
    ("embedding", r"embedding|index_put|index_add|scatter|gather"),
)
_COMPILED = re.compile(r"^triton_((?:poi|red|per|tem|mix|for|spl)_fused_?\w*)")
_ONLY_COPIES = re.compile(
    r"^poi_fused_((_to_copy|clone|copy_?|transpose|permute|cat|view|t|constant_pad_nd|split|\d+)(_|$))+$"
)
_ONLY_FILLS = re.compile(r"^poi_fused_((zeros|zeros_like|new_zeros|full|fill|zero|\d+)(_|$))+$")

OTHER = "other"
GROUPS = (*dict.fromkeys(group for group, _ in _NAMES), OTHER)


def group_of(name: str) -> str:
    """The kernel group of a kernel or operator name."""
    lowered = name.lower().removeprefix("void ").removeprefix("at::native::")
    compiled = _COMPILED.match(lowered)
    if compiled is not None:
        return _group_of_fused(compiled.group(1))
    return next((group for group, pattern in _NAMES if re.search(pattern, lowered)), OTHER)


def _group_of_fused(name: str) -> str:
    if _ONLY_FILLS.match(name):
        return "fills"
    if _ONLY_COPIES.match(name):
        return "copies and transposes"
    return next((group for group, pattern in _FUSED if re.search(pattern, name)), "elementwise")


class Kernel(NamedTuple):
    """What a kernel (an operator, on CPU) takes in a step: milliseconds of all its calls, and how many they are."""

    name: str
    ms: float
    calls: float

    @property
    def group(self) -> str:
        return group_of(self.name)


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
        self.table = table(kernels_of(profiler.key_averages(), self.device.type == "cuda", ACTIVE))
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


class Span(NamedTuple):
    """One run of a kernel on a GPU: from when to when, in ms on the profiler's time line."""

    name: str
    start: float
    end: float


def profile_work(work: Callable[[], None], device: torch.device, repeats: int) -> tuple[list[Kernel], list[Span]]:
    """The kernels of `work`, per call, from `repeats` calls; and on a GPU every run of one, in all of the calls.

    The device must be idle; it is when this returns.
    """
    with torch.profiler.profile(activities=_activities(device)) as profiler:
        for _ in range(repeats):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    kernels = kernels_of(profiler.key_averages(), device.type == "cuda", repeats)
    return kernels, spans_of(profiler.events()) if device.type == "cuda" else []


def _activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


def kernels_of(events: Any, on_gpu: bool, steps: int) -> list[Kernel]:
    """The profiler's averages over `steps` steps as kernels of one step, the longest first."""
    kernels = []
    for event in events:
        if (on_gpu and not _on_gpu(event)) or _is_named(event):
            continue
        ms = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / steps
        if ms > 0:
            kernels.append(Kernel(event.key, ms, event.count / steps))
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def spans_of(events: Any) -> list[Span]:
    """Every run of a kernel on the GPU among the profiler's events, in the order of their beginning."""
    spans = []
    for event in events:
        if _on_gpu(event) and not _is_named(event):
            spans.append(Span(event.key, event.time_range.start / 1000, event.time_range.end / 1000))
    return sorted(spans, key=lambda span: span.start)


def _on_gpu(event: Any) -> bool:
    """Not an operator that launches: its time is that of its kernels."""
    return bool(event.device_type == torch.autograd.DeviceType.CUDA)


def _is_named(event: Any) -> bool:
    """A stretch of time that somebody named: what is in it is counted already. Older torch does not mark them all."""
    return bool(getattr(event, "is_user_annotation", False)) or event.key.startswith(("ProfilerStep", "nccl:"))


def by_group(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds a step of each group that has any, the longest first."""
    groups: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        groups[kernel.group] += kernel.ms
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def table(
    kernels: list[Kernel], *, top: int = TOP, wall_ms: float | None = None, floors: Mapping[str, float] | None = None
) -> str:
    """Milliseconds a step by kernel group, the `top` kernels that take longest, and all that are in no group.

    wall_ms: of a step without profiler; what no kernel fills is shown as idle, and shares are of it. floors: by group,
    milliseconds that no version can beat, shown beside.
    """
    groups = by_group(kernels)
    busy = sum(groups.values())
    if wall_ms is not None:
        groups["idle"] = max(0.0, wall_ms - busy)
    whole, floors = max(busy, wall_ms or 0.0) or 1.0, floors or {}
    lines = [f"{'group':<24}{'ms/step':>10}{'share':>8}" + (f"{'floor':>10}{'ratio':>8}" if floors else "")]
    for group in (*groups, *(name for name in floors if name not in groups)):
        lines.append(_line(group, groups.get(group, 0.0), whole, floors.get(group)))
    lines.append(_line("sum", sum(groups.values()), whole, sum(floors.values()) or None))
    lines += ["", f"{'ms/step':>10}{'calls':>8}{'mean us':>10}  {'group':<22}name"]
    lines += [_kernel_line(kernel) for kernel in kernels[:top]]
    unknown = [kernel for kernel in kernels[top:] if kernel.group == OTHER]
    if unknown:
        lines += ["", f"in no group, besides the above: {len(unknown)}", *map(_kernel_line, unknown[:top])]
    return "\n".join(lines) + "\n"


def _line(group: str, ms: float, whole: float, floor: float | None) -> str:
    beside = "" if floor is None else f"{floor:>10.3f}" + (f"{ms / floor:>8.2f}" if floor > 0 else "")
    return f"{group:<24}{ms:>10.3f}{ms / whole:>8.1%}{beside}"


def _kernel_line(kernel: Kernel) -> str:
    mean_us = 1000 * kernel.ms / kernel.calls if kernel.calls else 0.0
    return f"{kernel.ms:>10.3f}{kernel.calls:>8.4g}{mean_us:>10.1f}  {kernel.group:<22}{kernel.name[:110]}"
