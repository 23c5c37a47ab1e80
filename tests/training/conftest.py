"""Short runs of the tiny recipe."""

import pytest
import torch

from nanosprint.recipes import load_recipe
from nanosprint.training.api import train


@pytest.fixture
def train_tiny(tmp_path, tiny_data):
    """train_tiny(name, "key=value", ..., seed=...): a run directory's path after a run in this process."""

    def run(name, *overrides, **options):
        options.setdefault("execution", {"device": "cpu"})
        train(load_recipe("tiny", overrides), out=tmp_path / name, data=tiny_data, **options)
        return tmp_path / name

    return run


@pytest.fixture
def weights():
    """weights(run directory): the parameters of its newest checkpoint."""

    def load(path):
        newest = max((path / "checkpoints").glob("step-*.pt"))
        return torch.load(newest, weights_only=True)["model"]

    return load
