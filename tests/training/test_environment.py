"""What the environment says is compared with what the system says itself."""

import json
import os
import platform
import subprocess
import sys
import time

import pytest

from nanosprint.training import environment as env


def git(folder, *words):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "nanosprint").mkdir()
    (tmp_path / "nanosprint" / "a.py").write_text("1\n")
    git(tmp_path, "init", "-q")
    return tmp_path


def test_fields_are_json_and_true():
    got = env.environment()
    assert json.loads(json.dumps(got)) == got
    assert got["versions"]["python"] == platform.python_version()
    import numpy

    assert got["versions"]["numpy"] == numpy.__version__
    assert got["cpu"]["cores"] == os.cpu_count()
    assert 1 <= got["cpu"]["usable_cores"] <= got["cpu"]["cores"]
    assert got["cpu"]["name"]
    assert got["cpu"]["memory_bytes"] > 1e8
    assert env.environment(gpus=False)["gpus"] == []


def test_torch_version_without_importing_it():
    code = (
        "import sys\nfrom nanosprint.training.environment import environment\ne = environment()\n"
        "assert 'torch' not in sys.modules\nprint(e['versions']['torch'])"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    import torch

    assert said.split("+")[0] == torch.__version__.split("+")[0]


def test_fast():
    env.environment()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        env.environment()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1


def test_commit_and_dirty(checkout):
    assert env.commit_of(checkout) == (None, None, f"{checkout} has no commit yet")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "x")
    head = git(checkout, "rev-parse", "HEAD")
    assert env.commit_of(checkout) == (head, False, None)
    (checkout / "notes.txt").write_text("not code")
    assert env.commit_of(checkout) == (head, False, None)
    (checkout / "nanosprint" / "new.py").write_text("2\n")
    assert env.commit_of(checkout) == (head, True, None)
    (checkout / "nanosprint" / "new.py").unlink()
    (checkout / "nanosprint" / "a.py").write_text("3\n")
    assert env.commit_of(checkout) == (head, True, None)


def test_a_hooks_git_dir_does_not_mislead(checkout, tmp_path_factory, monkeypatch):
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "x")
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert env.commit_of(checkout) == (head, False, None)


def test_worktree(checkout, tmp_path_factory):
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "x")
    tree = tmp_path_factory.mktemp("w") / "tree"
    git(checkout, "worktree", "add", "-q", str(tree))
    assert env.commit_of(tree) == (git(checkout, "rev-parse", "HEAD"), False, None)


def test_no_checkout_no_git_and_slow_git(tmp_path, checkout, monkeypatch):
    (tmp_path / "plain").mkdir()
    commit, dirty, reason = env.commit_of(tmp_path / "plain")
    assert (commit, dirty) == (None, None)
    assert "is not a git checkout" in reason
    monkeypatch.setattr(env, "TIMEOUT_S", 0.05)
    slow = tmp_path / "bin"
    slow.mkdir()
    (slow / "git").write_text("#!/bin/sh\nexec sleep 5\n")
    (slow / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow}:{os.environ['PATH']}")
    start = time.perf_counter()
    assert env.commit_of(checkout) == (None, None, "git did not answer within 0.05 s")
    assert time.perf_counter() - start < 2
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert env.commit_of(checkout) == (None, None, "git cannot be run: No such file or directory")
