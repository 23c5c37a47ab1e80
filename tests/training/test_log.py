"""The log of a run: what lands in the file, on which rank, after which accident."""

import json
import math
import os
import subprocess
import sys
import types

import pytest

from nanosprint.results import RunDir, TornLine, read_metrics, series
from nanosprint.training.log import RunLog, train_line, val_line


class Screen:
    total_steps = 10

    def __init__(self):
        self.lines, self.closed = [], 0

    def show(self, line):
        self.lines.append(line)

    def message(self, text):
        self.lines.append(text)

    def close(self):
        self.closed += 1


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.write_request({"recipe": {"name": "tiny"}, "seed": 1, "created": "2026-01-01T00:00:00+00:00"})
    return run


def text_lines(run):
    return run.metrics_path.read_text().splitlines()


def test_lines_and_their_fields(run):
    screen = Screen()
    with RunLog(run, rank=0, console=screen) as log:
        log.train(step=1, tokens=512, loss=4.5, train_ms=10.0, lr=0.1)
        log.val(step=1, tokens=512, loss=4.0, train_ms=10.0)
        log.event("resume", step=1)
    raw = [json.loads(line) for line in text_lines(run)]
    assert raw[0] == {"kind": "train", "step": 1, "tokens": 512, "loss": 4.5, "train_ms": 10.0, "lr": 0.1}
    assert raw[1] == {"kind": "val", "step": 1, "tokens": 512, "loss": 4.0, "train_ms": 10.0}
    assert raw[2]["kind"] == "event"
    assert raw[2]["name"] == "resume"
    assert raw[2]["step"] == 1
    assert "T" in raw[2]["time"]
    assert [line["kind"] for line in screen.lines] == ["train", "val", "event"]
    assert screen.closed == 1


def test_a_batch_is_one_write_and_is_there_at_once(run, monkeypatch):
    writes = []
    real = os.write
    with RunLog(run, rank=0, console=None) as log:
        monkeypatch.setattr(os, "write", lambda fd, data: (writes.append(bytes(data)), real(fd, data))[1])
        log.write(train_line(step=s, tokens=s, loss=1.0, train_ms=1.0) for s in range(100))
        assert len(writes) == 1
        assert len(text_lines(run)) == 100  # not closed, not flushed by hand
        log.write([])
    assert len(list(read_metrics(run.metrics_path))) == 100


def test_nonfinite_loss_is_valid_json(run):
    with RunLog(run, rank=0, console=None) as log:
        log.train(step=1, tokens=1, loss=math.nan, train_ms=1.0)
        log.val(step=1, tokens=1, loss=-math.inf, train_ms=1.0)
    assert '"loss": null' in text_lines(run)[0]
    assert '"nonfinite": "nan"' in text_lines(run)[0]
    assert "NaN" not in run.metrics_path.read_text()
    assert series(read_metrics(run.metrics_path), "val", "loss") == {1: -math.inf}


def test_other_ranks_write_and_show_nothing(run):
    screen = Screen()
    with RunLog(run, rank=1, console=screen, wandb=True, tensorboard=True) as log:
        log.train(step=1, tokens=1, loss=1.0, train_ms=1.0)
        log.event("x")
        log.once("y")
        log.sync()
    assert not run.metrics_path.exists()
    assert screen.lines == []


def test_once(run):
    screen = Screen()
    with RunLog(run, rank=0, console=screen) as log:
        for message in ("a", "b", "a", "a"):
            log.once(message)
    assert [line["message"] for line in screen.lines] == ["a", "b"]
    assert len(text_lines(run)) == 2


def test_reopening_cuts_a_torn_line_and_says_so(run):
    with RunLog(run, rank=0, console=None) as log:
        log.train(step=1, tokens=1, loss=1.0, train_ms=1.0)
    with run.metrics_path.open("a") as file:
        file.write('{"kind": "tra')
    with pytest.warns(TornLine):
        run.read_metrics()
    screen = Screen()
    with RunLog(run, rank=0, console=screen) as log:
        log.train(step=2, tokens=2, loss=2.0, train_ms=2.0)
    assert "13 bytes" in screen.lines[0]["message"]
    assert [line["kind"] for line in run.read_metrics()] == ["train", "event", "train"]


def test_killed_while_writing(run):
    """A process that dies without warning leaves whole lines, and the next goes on behind them."""
    code = (
        "import os, itertools\nfrom nanosprint.training.log import RunLog\n"
        f"log = RunLog({str(run.path)!r}, rank=0, console=None)\n"
        "for s in itertools.count():\n"
        "    log.train(step=s, tokens=s, loss=1.0, train_ms=1.0)\n"
        "    if s == 500: os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert [line["step"] for line in run.read_metrics()] == list(range(501))


def test_disk_full_leaves_no_half_line(run, monkeypatch):
    real = os.write

    def full(fd, data):
        if len(data) > 20:
            return real(fd, data[:20])
        raise OSError(28, "No space left on device")

    with RunLog(run, rank=0, console=None) as log:
        log.train(step=1, tokens=1, loss=1.0, train_ms=1.0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space left"):
                log.train(step=2, tokens=2, loss=2.0, train_ms=2.0)
        log.event("failed", message="No space left on device")
    assert [line["kind"] for line in run.read_metrics()] == ["train", "event"]


def test_short_writes_are_completed(run, monkeypatch):
    real = os.write
    with RunLog(run, rank=0, console=None) as log:
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
        log.train(step=1, tokens=1, loss=1.0, train_ms=1.0)
    assert run.read_metrics()[0]["step"] == 1


def test_a_bad_batch_writes_nothing(run):
    with RunLog(run, rank=0, console=None) as log, pytest.raises(ValueError, match="kind='other'"):
        log.write([train_line(step=1, tokens=1, loss=1.0, train_ms=1.0), {"kind": "other"}])
    assert text_lines(run) == []


def test_closed_is_closed(run):
    log = RunLog(run, rank=0, console=None)
    log.close()
    log.close()
    with pytest.raises(RuntimeError, match="is closed"):
        log.event("late")


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_missing_tracker_is_an_error_at_the_start(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    screen = Screen()
    with pytest.raises(ValueError, match=rf"--{name} needs .*pip install 'nanosprint\[{name}\]'"):
        RunLog(run, rank=0, console=screen, **{name: True})
    assert screen.closed == 1  # the terminal is given back
    assert not run.metrics_path.exists()


def test_wandb(run, monkeypatch):
    class Run:
        def __init__(self, **options):
            self.options, self.logged, self.metrics, self.finished = options, [], [], False

        def define_metric(self, name, step_metric):
            self.metrics.append((name, step_metric))

        def log(self, values):
            self.logged.append(values)

        def finish(self):
            self.finished = True

    runs = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: runs.append(Run(**options)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):  # a run, and the same resumed
        with RunLog(run, rank=0, console=None, wandb=True) as log:
            log.train(step=3, tokens=30, loss=1.5, train_ms=9.0, mfu=None)
            log.event("resume", step=3)
            log.val(step=3, tokens=30, loss=1.25, train_ms=9.0)
    first, second = runs
    assert first.options["id"] == second.options["id"]
    assert first.options["resume"] == "allow"
    assert first.options["config"]["recipe"] == {"name": "tiny"}
    assert first.metrics == [("*", "step")]
    assert first.finished
    assert first.logged == [
        {"step": 3, "train/tokens": 30, "train/loss": 1.5, "train/train_ms": 9.0},
        {"step": 3, "val/tokens": 30, "val/loss": 1.25, "val/train_ms": 9.0},
    ]


def test_tensorboard(run, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, log_dir):
            calls.append(("open", log_dir))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def add_text(self, name, text, step):
            calls.append((name, text, step))

        def close(self):
            calls.append(("close",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with RunLog(run, rank=0, console=None, tensorboard=True) as log:
        log.write([val_line(step=2, tokens=20, loss=1.5, train_ms=4.0)])
        log.event("stopped", step=2, message="by hand")
    assert calls == [
        ("open", str(run.path / "tensorboard")),
        ("val/tokens", 20, 2),
        ("val/loss", 1.5, 2),
        ("val/train_ms", 4.0, 2),
        ("events", "by hand", 2),
        ("close",),
    ]
