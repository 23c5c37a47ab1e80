"""Shared by all tests. Small tensors on one thread: with more, tests that run side by side wait for each other."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import forked

try:
    import torch
except ImportError:  # the lint environment
    torch = None  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """A folder with the shards of the data set "tiny"."""
    from nanosprint.data import ensure_dataset

    return ensure_dataset("tiny", root=tmp_path_factory.mktemp("data"))


@pytest.fixture
def nanosprint(tmp_path, monkeypatch):
    """Run `nanosprint WORDS` in a fresh folder; the result has returncode, stdout and stderr."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words, timeout=120) -> subprocess.CompletedProcess:
        return forked.run("nanosprint", *words, cwd=tmp_path, environment=os.environ, timeout=timeout)

    return run
