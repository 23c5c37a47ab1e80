"""What a person sees of a run: two lines that stay in place in a terminal, plain lines everywhere else.

A display is fed the same lines that go to `metrics.jsonl`. It shows what they carry: `step`, `loss`, `tokens`,
`train_ms`, and where present `mfu` (0 .. 1), `memory_bytes` and `watts`. Speed and time left come from the last few
lines, so that they follow changes of batch size.
"""

import importlib.util
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

PLAIN_SECONDS = 5.0  # shortest time between two plain lines
LIVE_SECONDS = 0.1  # and between two pictures of the live display: drawing costs about a millisecond
RECENT = 20  # training lines over which the speed is measured
HIDDEN = frozenset({"kind", "name", "step", "tokens", "train_ms", "time", "message"})  # of an event, from its text


class Display(Protocol):
    """Shows the lines of a run. `total_steps` may be set anew when a budget has been calibrated."""

    total_steps: int

    def show(self, line: Mapping[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_display(
    title: str, total_steps: int, *, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
) -> Display:
    """Live progress where `stream` (standard output by default) is a terminal that can, else plain lines."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return PlainDisplay(total_steps, stream=stream, now=now)
    if importlib.util.find_spec("rich") is None:
        plain = PlainDisplay(total_steps, stream=stream, now=now)
        plain.message("no live progress: the Python package rich is not installed (pip install rich)")
        return plain
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    if console.is_dumb_terminal:  # TERM=dumb cannot move the cursor
        return PlainDisplay(total_steps, stream=stream, now=now)
    return LiveDisplay(title, total_steps, console=console, now=now)


class Status:
    """The figures of the moment, gathered from the lines."""

    def __init__(self) -> None:
        self.train: Mapping[str, Any] = {}
        self.val: Mapping[str, Any] = {}
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=RECENT)  # step, tokens, train_ms

    def update(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "val":
            self.val = line
        elif line["kind"] == "train":
            self.train = line
            self._recent.append((line["step"], line["tokens"], line["train_ms"]))

    @property
    def step(self) -> int:
        return self.train.get("step", 0)

    @property
    def tokens_per_s(self) -> float | None:
        """Training tokens per second of the clock over the last lines; None before there is a difference."""
        tokens, ms = self._gain(1), self._gain(2)
        return tokens / ms * 1e3 if ms > 0 else None

    def seconds_left(self, total_steps: int) -> float | None:
        """Training seconds to the last step, at the speed of the last lines."""
        steps, ms = self._gain(0), self._gain(2)
        return max(0, total_steps - self.step) * ms / steps / 1e3 if steps > 0 else None

    def _gain(self, column: int) -> float:
        if not self._recent:
            return 0.0
        return self._recent[-1][column] - (self._recent[0][column] if len(self._recent) > 1 else 0)

    def figures(self) -> list[str]:
        """Loss, speed, MFU, memory, power and the last validation loss, as far as they are known."""
        train, out = self.train, []
        if "loss" in train:
            out.append(f"loss {train['loss']:.4f}")
        if self.val:
            out.append(f"val {self.val['loss']:.4f} @ {self.val['step']}")
        if self.tokens_per_s is not None:
            out.append(f"{format_count(self.tokens_per_s)} tokens/s")
        if train.get("mfu") is not None:
            out.append(f"MFU {train['mfu']:.1%}")
        if train.get("memory_bytes") is not None:
            out.append(f"{train['memory_bytes'] / 2**30:.1f} GiB")
        if train.get("watts") is not None:
            out.append(f"{train['watts']:.0f} W")
        return out

    def times(self, total_steps: int) -> list[str]:
        """Training time so far and left."""
        if not self.train:
            return []
        left = self.seconds_left(total_steps)
        return [format_seconds(self.train["train_ms"] / 1e3)] + ([f"{format_seconds(left)} left"] if left else [])


class PlainDisplay:
    """Lines for files and pipes: training at most every 5 s, every validation and event, and always the last line."""

    def __init__(
        self, total_steps: int, *, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_steps = total_steps
        self._stream: TextIO | None = stream or sys.stdout
        self._now = now
        self._status = Status()
        self._printed_at = -math.inf
        self._pending = False

    def show(self, line: Mapping[str, Any]) -> None:
        if line["kind"] != "train":
            self._print_progress()  # the step before, so that the lines tell the story in order
            self._status.update(line)
            self._print(describe(line))
            return
        self._status.update(line)
        self._pending = True
        if self._now() - self._printed_at >= PLAIN_SECONDS:
            self._print_progress()

    def message(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        self._print_progress()

    def _print_progress(self) -> None:
        if not self._pending:
            return
        self._pending = False
        self._printed_at = self._now()
        parts = [f"step {self._status.step}/{self.total_steps}", *self._status.figures()]
        self._print("  ".join(parts + self._status.times(self.total_steps)))

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:  # `nanosprint train ... | head`: the reader left, the run goes on
            self._stream = None


class LiveDisplay:
    """Two lines that stay in place: how far, and the figures. Validations and events scroll by above them."""

    def __init__(
        self, title: str, total_steps: int, *, console: Any, now: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.live import Live

        self.total_steps = total_steps
        self._title = title
        self._now = now
        self._status = Status()
        self._drawn_at = -math.inf
        self._console = console
        # no refresh thread: on two cores it would take time from the training it reports on
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._picture)
        self._live.start()

    def show(self, line: Mapping[str, Any]) -> None:
        self._status.update(line)
        if line["kind"] != "train":
            self.message(describe(line))
        elif self._now() - self._drawn_at >= LIVE_SECONDS:
            self._draw()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._draw()

    def close(self) -> None:
        if self._live.is_started:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        self._live.refresh()
        self._drawn_at = self._now()

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status, total = self._status, self.total_steps
        bar = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        bar.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=max(total, 1), completed=status.step),
            Text(f"{status.step}/{total}"),
            Text("  ".join(status.times(total)), style="cyan"),
        )
        figures = Text("  ".join(status.figures()) or "starting", no_wrap=True, overflow="ellipsis", style="dim")
        return Group(bar, figures)


def describe(line: Mapping[str, Any]) -> str:
    """A validation or an event as one line of text."""
    step = f"step {line['step']}  " if "step" in line else ""
    if line["kind"] == "val":
        seconds = format_seconds(line["train_ms"] / 1e3)
        return f"{step}validation loss {line['loss']:.4f} after {seconds} of training"
    if "message" in line:
        return f"{step}{line['message']}"
    shown = {key: value for key, value in line.items() if key not in HIDDEN}
    details = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())
    return f"{step}{line['name']}" + (f"  {details}" if details else "")


def format_seconds(seconds: float) -> str:
    """12.3 s below a minute, then 4:05 and 1:02:03."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(count: float) -> str:
    """Three digits and a letter, always as many, so that a live figure does not jump about: 812, 16.1k, 1.42M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            value = count / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{letter}"
    return f"{count:.0f}"
