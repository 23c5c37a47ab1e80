"""Jobs: failures are told, signals reach children, a fault of ours is not lost."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from nanosprint.evidence.jobs import Runner, cold_caches, orderly_end


@dataclass(frozen=True)
class Job:
    name: str
    code: str = "pass"


def carried_out_by(runner, folder):
    def carry_out(job, gpu):
        runner.process([sys.executable, "-c", job.code], folder / f"{job.name}.log", gpu=gpu)
        return "done"

    return carry_out


def test_a_failure_is_told_by_the_last_words_and_costs_no_other(tmp_path):
    said = []
    runner = Runner(said.append)
    jobs = [Job("a"), Job("b", "print('much'); raise SystemExit('error: no such thing')"), Job("c")]
    assert runner.run(jobs, carried_out_by(runner, tmp_path)) == 0
    assert said == ["a: done", f"b: failed: no such thing (code 1, {tmp_path / 'b.log'})", "c: done"]
    assert (tmp_path / "b.log").read_text() == "much\nerror: no such thing\n"


def test_last_words_are_those_of_this_attempt(tmp_path):
    (tmp_path / "a.log").write_text("error: of yesterday\n")
    with pytest.raises(ValueError, match=r"nothing said \(code 3"):
        Runner(print).process([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "a.log")


def test_a_fault_of_ours_is_raised(tmp_path):
    def broken(job, gpu):
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        Runner(print).run([Job("a"), Job("b")], broken)


def test_cold_caches_are_empty_and_gone_afterwards():
    with cold_caches() as environment:
        assert len(environment) == 2
        assert all(os.path.isdir(path) and not os.listdir(path) for path in environment.values())
    assert not any(os.path.exists(path) for path in environment.values())


CHILD = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, save)
print("ready", flush=True)
time.sleep(60)
"""
PROGRAM = """
import sys
from pathlib import Path
from nanosprint.evidence.jobs import Runner, orderly_end
from test_jobs import CHILD, Job, carried_out_by
runner = Runner(lambda line: print(line, flush=True))
with orderly_end():
    runner.run([Job("a", CHILD), Job("b")], carried_out_by(runner, Path(sys.argv[1])))
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_child_save_and_starts_no_other(signum, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, log = time.monotonic() + 60, tmp_path / "a.log"
    while time.monotonic() < deadline and process.poll() is None and not (log.exists() and "ready" in log.read_text()):
        time.sleep(0.02)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=60)
    assert log.read_text() == "ready\nsaved\n"
    assert out == "a: stopped\n"
    assert process.returncode == (128 + signum if signum == signal.SIGTERM else -signum)
    assert not (tmp_path / "b.log").exists()


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with orderly_end():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
