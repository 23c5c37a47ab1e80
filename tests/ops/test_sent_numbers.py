"""Numbers that the host sends and does not wait for."""

import pytest
import torch

from nanosprint.kernels.host import sent


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_they_arrive_in_their_dtype(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    large = 2**53 + 1
    assert sent((3, large), torch.int64, torch.device(device)).tolist() == [3, large]
    table = sent([(0.5, 2.0), (1.0, -1.0)], torch.float32, torch.device(device))
    assert (table.dtype, table.device.type, table.tolist()) == (torch.float32, device, [[0.5, 2.0], [1.0, -1.0]])


@pytest.mark.gpu
def test_what_is_under_way_is_not_overwritten():
    """Behind a device that is far behind, each copy still brings its own numbers, whatever the host writes next."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    ready = [torch.empty(7, dtype=torch.int64, pin_memory=True) for _ in range(300)]  # making these would wait
    del ready
    torch.cuda._sleep(1_000_000_000)
    arrived = [sent([i] * 7, torch.int64, device) for i in range(300)]
    assert not torch.cuda.current_stream().query()  # the host has not waited
    assert [t.tolist() for t in arrived] == [[i] * 7 for i in range(300)]
