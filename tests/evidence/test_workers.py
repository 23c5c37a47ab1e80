"""Workers from outside, with small programs in their place: who waits, who is ended, what a death looks like."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanosprint.evidence import jobs, workers
from nanosprint.evidence.jobs import Preparation, Runner
from nanosprint.evidence.workers import STEPS, Workers

# Runs called large-* fail where another worker lives, huge-* always, dead-* kill their worker, bad-* are mistakes, and
# so are lost-*, while they are prepared. hung-* are never prepared. Two go steps side by side, or wait for each other.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
alive = Path(sys.argv[1])
me = alive / str(os.getpid())
me.touch()
events = alive.parent / "events"
def tell(what):
    with events.open("a") as file:
        print(what, file=file)
def go(run, step):
    tell(f"+ {step}")
    deadline = time.monotonic() + 20
    while step in ("load", "compile") and events.read_text().count(f"+ {step}") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    if run.name.startswith("hung"):
        time.sleep(60)
    if run.name.startswith("dead") and step == "compile":
        os.kill(os.getpid(), signal.SIGKILL)
    tell(f"- {step}")
    return 2 * (run.name.startswith("lost") and step == "choose")
for line in sys.stdin:
    task = json.loads(line)
    run = Path(task["run"])
    if task["step"]:
        print(json.dumps({"code": go(run, task["step"]), "lacks_memory": False, "goes_on": True}), flush=True)
        continue
    with open(f"{run}.log", "a") as log:
        print(os.getpid(), file=log)
    if run.name.startswith("dead"):
        me.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    short = run.name.startswith("huge") or run.name.startswith("large") and len(list(alive.iterdir())) > 1
    bad = run.name.startswith("bad")
    print(json.dumps({"code": 2 * bad or int(short), "lacks_memory": short, "goes_on": not short}), flush=True)
    if short:
        break
me.unlink()
"""


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.children = folder, [], set()
        self.started = []
        (folder / "alive").mkdir()
        self.workers = Workers(self.start, self.children.remove, self.said.append)

    def start(self, log):
        command = [sys.executable, "-c", PROGRAM, str(self.folder / "alive")]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.add(child)
        self.started.append(child)
        return child

    def run(self, name, group):
        return self.workers.carry_out(self.folder / name, group)

    def by_whom(self, name):
        return (self.folder / f"{name}.log").read_text().split()


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.workers.close()
    assert not made.children
    assert all(child.returncode is not None for child in made.started)


def test_a_group_keeps_its_worker_while_others_take_turns(bench):
    for name, group in (("a-1", "a"), ("b-1", "b"), ("a-2", "a"), ("b-2", "b")):
        assert bench.run(name, group) == 0
    assert bench.by_whom("a-1") == bench.by_whom("a-2") != bench.by_whom("b-1") == bench.by_whom("b-2")
    bench.workers.end("a")
    assert len(bench.children) == 1
    bench.workers.end("nobody")
    bench.run("a-3", "a")
    assert bench.by_whom("a-3") != bench.by_whom("a-1")


def test_a_mistake_does_not_end_its_worker(bench):
    assert bench.run("bad-1", "a") == 2
    assert bench.run("a-2", "a") == 0
    assert bench.by_whom("bad-1") == bench.by_whom("a-2")


def test_no_more_wait_than_there_is_room_for(bench, monkeypatch):
    bench.workers._most = 2
    for name in "abc":
        bench.run(f"{name}-1", name)
    assert len(bench.children) == 2
    for name in "abc":
        bench.run(f"{name}-2", name)
    changed = [bench.by_whom(f"{name}-1") != bench.by_whom(f"{name}-2") for name in "abc"]
    assert changed == [False, False, True]  # those that have waited longest are next again
    assert workers.MOST >= 2


def test_where_memory_is_short_those_that_wait_make_room(bench):
    for name in "abc":
        bench.run(f"{name}-1", name)
    assert bench.run("large-1", "d") == 0
    assert len(bench.by_whom("large-1")) == 2  # two processes have tried
    assert len(bench.children) == 1
    assert bench.said == ["large-1: out of memory: ending 3 waiting workers and trying once more"]
    for name in "abc":
        assert bench.run(f"{name}-2", name) == 0
    assert len(bench.children) == 2  # three beside one were too many


def test_it_is_tried_once_more_and_only_where_that_is_another_case(bench):
    assert bench.run("huge-1", "a") == 1
    assert len(bench.by_whom("huge-1")) == 1  # alone in a fresh process already
    bench.run("b-1", "b")
    assert bench.run("huge-2", "a") == 1
    assert len(bench.by_whom("huge-2")) == 2
    bench.workers._most = 1
    bench.run("c-1", "c")
    assert bench.run("huge-3", "c") == 1  # its own worker was not fresh
    assert len(bench.by_whom("huge-3")) == 2
    assert not bench.children


def test_the_dead_are_replaced(bench):
    assert bench.run("dead-1", "a") == -9
    assert bench.run("a-2", "a") == 0
    (waiting,) = bench.children
    waiting.kill()
    waiting.wait()
    assert bench.run("a-3", "a") == 0
    assert bench.by_whom("a-3") != bench.by_whom("a-2")


def test_steps_are_gone_side_by_side_or_alone(bench):
    names = {"a": "a-1", "b": "lost-1", "c": "dead-1", "d": "d-1"}
    failed, seconds = bench.workers.prepare({group: bench.folder / name for group, name in names.items()}, 2)
    assert failed == {"b": 2, "c": -9}
    assert list(seconds) == list(STEPS)
    events = (bench.folder / "events").read_text().splitlines()
    by_step = {step: [word[0] for word in events if word[2:] == step] for step in STEPS}
    assert by_step["load"][:2] == ["+", "+"]
    assert by_step["choose"] == ["+", "-"] * 4
    assert by_step["compile"][:2] == ["+", "+"]
    assert by_step["warm up"] == ["+", "-"] * 2
    assert [word[2:] for word in events] == [step for step, own in by_step.items() for _ in own]
    assert len(bench.children) == 2
    for group in "abd":
        assert bench.run(f"{group}-2", group) == 0
    first = [str(child.pid) for child in bench.started[:4]]
    assert [bench.by_whom(f"{group}-2")[0] in first for group in "abd"] == [True, False, True]


@dataclass(frozen=True)
class Job:
    name: str

    @property
    def group(self):
        return self.name.split("-")[0]


def prepared(folder, names, monkeypatch):
    """What a runner says that prepares two at a time, and the runs in the order of their ends."""
    (folder / "alive").mkdir()
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-c", PROGRAM, str(folder / "alive")))
    said, done = [], []
    runner = Runner(said.append)

    def carry_out(job, gpu):
        runner.train(folder / job.name, group=job.group)
        done.append(job.name)
        return "done"

    ahead = Preparation(2, lambda job: folder / job.name)
    assert runner.run([Job(name) for name in names], carry_out, group=lambda job: job.group, ahead=ahead) == 0
    assert not runner._children
    return [line for line in said if "done" not in line], done


def test_turns_stay_as_they_are_and_who_cannot_be_prepared_has_his(tmp_path, monkeypatch):
    names = ["a-1", "lost-1", "c-1", "a-2", "lost-2", "c-2"]
    said, done = prepared(tmp_path, names, monkeypatch)
    assert done == names
    assert said[0] == "preparing 3 of 3: a, lost, c"
    assert said[1].startswith("lost: could not be prepared, its runs start by themselves: nothing said (code 2")
    assert said[2].startswith("prepared 2 in ")


def test_where_not_all_can_be_kept_they_come_in_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "MOST", 2)
    said, done = prepared(tmp_path, [f"{group}-{i}" for i in (1, 2) for group in "abcde"], monkeypatch)
    assert done == ["a-1", "b-1", "a-2", "b-2", "c-1", "d-1", "c-2", "d-2", "e-1", "e-2"]
    assert said[::2] == ["preparing 2 of 5: a, b", "preparing 2 of 5: c, d"]
    users = [{(tmp_path / f"{group}-{i}.log").read_text() for i in (1, 2)} for group in "abcde"]
    assert [len(pids) for pids in users] == [1] * 5
    assert len(set.union(*users)) == 5


HANGING = """
import sys
from pathlib import Path
from nanosprint.evidence import jobs
from test_workers import PROGRAM, Job
folder = Path(sys.argv[1])
jobs.COMMAND = (sys.executable, "-c", PROGRAM, str(folder / "alive"))
runner = jobs.Runner(lambda line: print(line, flush=True))
ahead = jobs.Preparation(2, lambda job: folder / job.name)
names = [Job(f"hung{i}-1") for i in range(3)]
runner.run(names, lambda *_: "trained", group=lambda job: job.group, ahead=ahead)
"""


def test_an_interruption_ends_a_preparation(tmp_path):
    (tmp_path / "alive").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    program = [sys.executable, "-c", HANGING, str(tmp_path)]
    process = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events, deadline = tmp_path / "events", time.monotonic() + 60
    while time.monotonic() < deadline and not (events.exists() and events.read_text().count("+ load") == 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert out == "preparing 3 of 3: hung0, hung1, hung2\n", err
    assert process.returncode == -signal.SIGINT
    assert events.read_text().count("+") == 2  # the third was not started
    for pid in (tmp_path / "alive").iterdir():
        assert not Path("/proc", pid.name).exists()


SPEAKING = """
import sys
run = sys.stdin.readline().strip()
print("error: of today", file=sys.stderr)
print('{"code": 3, "lacks_memory": false, "goes_on": true}', flush=True)
sys.stdin.readline()
"""


def test_a_runner_tells_what_the_log_says_last(tmp_path, monkeypatch):
    runner, said = Runner(print), []
    runner.say = said.append
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-c", SPEAKING))
    (tmp_path / "a.log").write_text("error: of yesterday\n")

    def carry_out(job, gpu):
        runner.train(tmp_path / "a", group="a")
        return "done"

    runner.run([Job("job")], carry_out, group=lambda job: "a")
    assert said == [f"job: failed: of today (code 3, {tmp_path / 'a.log'})"]
    assert not runner._children
