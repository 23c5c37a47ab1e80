"""Peak memory of training, validation left out."""

import resource
import sys

import torch


class PeakMemory:
    """The most memory that training has held: allocated by torch on CUDA, resident in RAM on a CPU.

    What CUDA graphs compute in stays theirs between replays and counts, too, as of the last `resume`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak = self._recorded = 0

    def read(self) -> int | None:
        """Bytes so far; None where nothing is known. Call it at the end of a stretch of training, too."""
        if self.device.type == "cuda":
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device) + self._recorded)
        elif self.device.type == "cpu":
            unit = 1 if sys.platform == "darwin" else 1024  # what the system reports ru_maxrss in
            self._peak = max(self._peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
        return self._peak or None

    def resume(self) -> None:
        """Forget what validation used. A CPU's resident peak cannot be reset: there, what is read includes it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._recorded = recorded_bytes(self.device)


def recorded_bytes(device: torch.device) -> int:
    """Bytes of GPU memory that CUDA graphs hold and torch does not count as allocated: a replay allocates nothing.

    Goes through all that is allocated, which takes milliseconds.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == index]
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))
