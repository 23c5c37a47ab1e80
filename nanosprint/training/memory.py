"""Peak memory of training, validation left out."""

import resource
import sys

import torch


class PeakMemory:
    """The most memory that training has held: allocated by torch on CUDA, resident in RAM on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak = 0

    def read(self) -> int | None:
        """Bytes so far; None where nothing is known. Call it at the end of a stretch of training, too."""
        if self.device.type == "cuda":
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device))
        elif self.device.type == "cpu":
            unit = 1 if sys.platform == "darwin" else 1024  # what the system reports ru_maxrss in
            self._peak = max(self._peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
        return self._peak or None

    def resume(self) -> None:
        """Forget what validation used. A CPU's resident peak cannot be reset: there, what is read includes it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
