"""Displays: plain lines by a clock that the test winds on, live ones on a real pseudo-terminal."""

import importlib.util
import io
import os
import pty
import re
import threading

import pytest

from nanosprint.training.console import (
    LiveDisplay,
    PlainDisplay,
    Status,
    format_count,
    format_seconds,
    open_display,
)


def train(step, **fields):
    return {"kind": "train", "step": step, "tokens": step * 1000, "loss": 3.0 - step / 100, "train_ms": step * 50.0,
            **fields}  # fmt: skip


def val(step, loss):
    return {"kind": "val", "step": step, "tokens": step * 1000, "loss": loss, "train_ms": step * 50.0}


class Terminal:
    """A pseudo-terminal of 100 x 24: `stream` to write to, `text()` what arrived."""

    def __init__(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("LINES", "24")
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        self._main, follower = pty.openpty()
        self.stream = os.fdopen(follower, "w")
        self._parts = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self._main, 65536)
            except OSError:  # the other side was closed
                return
            if not data:
                return
            self._parts.append(data)

    def text(self):
        self.stream.close()
        self._reader.join(timeout=5)
        os.close(self._main)
        return b"".join(self._parts).decode()


@pytest.fixture
def terminal(monkeypatch):
    return Terminal(monkeypatch)


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_plain_lines_come_every_five_seconds_and_at_the_end():
    out, clock = io.StringIO(), Time()
    display = open_display("tiny", 100, stream=out, now=clock)
    assert isinstance(display, PlainDisplay)
    for step in range(1, 101):
        display.show(train(step))
        clock.now += 0.3
    display.close()
    display.close()
    steps = [int(s) for s in re.findall(r"^step (\d+)/100", out.getvalue(), re.MULTILINE)]
    assert steps == [1, 18, 35, 52, 69, 86, 100]
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_plain_validations_and_events_always_come_with_the_step_before():
    out = io.StringIO()
    display = PlainDisplay(100, stream=out, now=Time())
    display.show(train(1))
    display.show(train(10))
    display.show(val(10, 2.5))
    display.show({"kind": "event", "name": "checkpoint", "step": 10, "time": "x", "file": "a.pt", "ms": 1.23456789})
    display.show({"kind": "event", "name": "notice", "message": "bf16 is slower here [not markup]"})
    display.message("hello")
    assert out.getvalue().splitlines() == [
        "step 1/100  loss 2.9900  20.0k tokens/s  0.1 s  5.0 s left",
        "step 10/100  loss 2.9000  20.0k tokens/s  0.5 s  4.5 s left",
        "step 10  validation loss 2.5000 after 0.5 s of training",
        "step 10  checkpoint  file=a.pt  ms=1.235",
        "bf16 is slower here [not markup]",
        "hello",
    ]


def test_plain_shows_all_figures_and_nan():
    out = io.StringIO()
    display = PlainDisplay(2, stream=out, now=Time())
    display.show(train(1, mfu=0.312, memory_bytes=3 * 2**30, watts=412.3))
    assert "MFU 31.2%  3.0 GiB  412 W" in out.getvalue()
    display.show({**train(2, mfu=None), "loss": float("nan")})
    display.close()
    assert out.getvalue().splitlines()[-1].startswith("step 2/2  loss nan  ")


def test_a_reader_that_left_does_not_end_the_run():
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    display = PlainDisplay(10, stream=stream, now=Time())
    display.show(train(1))
    display.show(val(1, 2.0))
    display.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_live_on_a_terminal(terminal):
    clock = Time()
    display = open_display("shakespeare", 200, stream=terminal.stream, now=clock)
    assert isinstance(display, LiveDisplay)
    for step in range(10, 110, 10):
        display.show(train(step, mfu=0.25, memory_bytes=2**30))
        clock.now += 1.0
    display.show(val(100, 1.875))
    display.message("[bold]as it is[/bold]")
    display.close()
    display.close()
    text = terminal.text()
    assert "\x1b[" in text  # the cursor is moved
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # hidden, and given back
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "shakespeare" in plain
    assert "100/200" in plain
    assert "loss 2.0000  val 1.8750 @ 100  20.0k tokens/s  MFU 25.0%  1.0 GiB" in plain
    assert "5.0 s  5.0 s left" in plain
    assert "step 100  validation loss 1.8750 after 5.0 s of training" in plain
    assert "[bold]as it is[/bold]" in plain


def test_live_draws_seldom_and_the_last_line_at_the_end(terminal):
    display = open_display("x", 1000, stream=terminal.stream, now=Time())  # no time passes
    for step in range(1, 1001):
        display.show(train(step))
    display.close()
    text = terminal.text()
    assert "1000/1000" in text
    assert len(re.findall(r"\d+/1000", text)) <= 4


def test_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    display = open_display("x", 10, stream=terminal.stream)
    assert isinstance(display, PlainDisplay)
    display.show(train(1))
    assert "step 1/10" in terminal.text()


def test_without_rich_it_says_so_once(terminal, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "rich" else find(name, *a))
    display = open_display("x", 10, stream=terminal.stream)
    display.show(train(1))
    display.show(val(1, 2.0))
    text = terminal.text()
    assert text.count("rich is not installed (pip install rich)") == 1
    assert "step 1/10" in text
    out = io.StringIO()
    open_display("x", 10, stream=out)
    assert out.getvalue() == ""  # nobody misses it there


def test_speed_follows_the_last_lines():
    status = Status()
    status.update({"kind": "train", "step": 1000, "tokens": 1000, "loss": 1.0, "train_ms": 1e6})
    for i in range(1, 31):
        tokens, train_ms = 1000 + 500 * i, 1e6 + 100 * i
        status.update({"kind": "train", "step": 1000 + i, "tokens": tokens, "loss": 1.0, "train_ms": train_ms})
    assert status.tokens_per_s == pytest.approx(5000.0)
    assert status.seconds_left(1130) == pytest.approx(10.0)
    assert status.seconds_left(1000) == 0


def test_formats():
    assert [format_seconds(s) for s in (0, 12.34, 59.96, 245, 3723)] == ["0.0 s", "12.3 s", "1:00", "4:05", "1:02:03"]
    got = [format_count(n) for n in (5, 812, 999.7, 16_100, 123_456, 999_960, 1_420_000, 5e5, 3.1e9)]
    assert got == ["5", "812", "1.00k", "16.1k", "123k", "1.00M", "1.42M", "500k", "3.10B"]
