"""Workers from outside, with small programs in their place: who waits, who is ended, what a death looks like."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanosprint.evidence import jobs, workers
from nanosprint.evidence.jobs import Runner
from nanosprint.evidence.workers import Workers

# Runs called large-* fail where another worker lives, huge-* always, dead-* kill their worker, bad-* are mistakes.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
alive = Path(sys.argv[1])
me = alive / str(os.getpid())
me.touch()
for line in sys.stdin:
    run = Path(line.strip())
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

    class Job:
        name = "job"

    def carry_out(job, gpu):
        runner.train(tmp_path / "a", group="a")
        return "done"

    runner.run([Job()], carry_out, group=lambda job: "a")
    assert said == [f"job: failed: of today (code 3, {tmp_path / 'a.log'})"]
    assert not runner._children
