import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet():
    """A seed, and one thread: on matrices this small two threads mostly wait for each other."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
