"""An orthogonalisation recorded once as a CUDA graph: its launches then cost the host one call.

Five steps are about twenty launches, which take the host longer than small stacks take the GPU. A graph has fixed
addresses: `input` is filled in place, and the result is overwritten by the next call. Both stay allocated, with what
lies between: four stacks and two batches of squares, in the working precision.

Not run on a GPU yet: written for one, tested by `tests/ops/test_recorded.py` where there is one.
"""

import functools

import torch
from torch import Tensor

from nanosprint.ops.polar import Orthogonalizer


class Recorded:
    """`function(input, dtype=dtype)` for one shape, dtype and device, as a CUDA graph.

    Fill `input` (B, M, N) in place, then call; the result, of the same shape, holds until the next call. All on one
    stream: two streams would share the buffers without waiting for each other.
    """

    def __init__(self, function: Orthogonalizer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        with torch.cuda.device(device), torch.no_grad():
            self.input = torch.zeros(shape, dtype=dtype, device=device)
            aside, current = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                function(self.input, dtype=dtype)  # compiles kernels and makes workspaces, which a capture must not do
            current.wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            # other threads (NCCL's watchdog, a loader that pins memory) may go on using CUDA
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = function(self.input, dtype=dtype)

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._output


@functools.lru_cache(maxsize=32)
def recorded(function: Orthogonalizer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Recorded:
    """The recording for these, made at the first call; that one waits for the device."""
    return Recorded(function, shape, dtype, device)


def can_record(tensor: Tensor) -> bool:
    """Whether a graph may be recorded or replayed here: on a GPU, neither traced nor captured into another graph."""
    return not torch.compiler.is_compiling() and tensor.is_cuda and not torch.cuda.is_current_stream_capturing()
