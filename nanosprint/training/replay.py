"""Forward and backward pass of a micro-batch as one CUDA graph: recorded once for each shape, then replayed.

Launching a step's thousand kernels one by one takes the host some 50 ms, about what a GPU needs for 32,768 tokens of
the record: smaller micro-batches wait for the host. A replay is one launch.

What a recording is made of stays where it is: weights, buffers, gradients (parts of banks, into which each replay adds)
and copies of the inputs, which each replay fills first. Numbers are part of the recording, so there is one for every
window and every scale of scores; of documents a round bound is taken. All recordings share one pool of memory, since
none leaves anything in it that another could overwrite but its loss, which is copied.

Several processes each record their own, and nothing that they send: reductions start when the replay is over
(`Engine.overlap`), whether a call replays, records or does its work as if nothing were recorded. So it matters to no
process which of these another one does. Recording them, too, would let them start earlier only where the backward pass
is made of several graphs; compiled, it is one, whose gradients all come at its end.

Where recording fails, on a process among several also for want of memory, calls go on without: `failure` says why, and
`agree` has all do so.

Source: CUDA graphs as PyTorch has them (Nguyen, Carilli and others 2021, pytorch.org/blog/accelerating-pytorch-with-
cuda-graphs); the published record's own script does without.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanosprint.errors import UserError
from nanosprint.optim.sharding import from_all, place
from nanosprint.training.batch import ModelInput, kind_of, leaves
from nanosprint.training.step import Backward

_log = logging.getLogger(__name__)

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class _Recording(NamedTuple):
    inputs: ModelInput  # whose tensors are filled before each replay
    replay: Callable[[], None]
    loss: Tensor  # what the replay writes


class Replayed:
    """`backward`, recorded at the first call with each shape and replayed from then on.

    parameters: by name, all that `backward` adds gradients to; they must have a gradient already, which stays where it
    is. record: makes a recording of work and what replays it, without doing the work; `OnGpu` by default. The first
    call with a shape does its work as `backward` would and then records it, which waits for the device. Raises
    UserError for a parameter without a place for its gradient.

    failure: why nothing is recorded or replayed any more; None while it is. on_trial: whether what is computed is
    thrown away, as in a warm-up: then, among several processes, a call for which recordings leave no memory gives them
    up and is made again.
    """

    def __init__(
        self, backward: Backward, parameters: Iterable[tuple[str, Tensor]], record: Record | None = None
    ) -> None:
        self._backward = backward
        self._parameters = [(name, p) for name, p in parameters if p.requires_grad]
        self._record = record or OnGpu()
        self._recordings: dict[Hashable, _Recording] = {}
        self.failure: str | None = None
        self.on_trial = False

    def recorded(self) -> int:
        """How many recordings there are."""
        return len(self._recordings)

    def agree(self) -> str | None:
        """The first process's failure that has one, if any: then no process replays any more. All must call it."""
        failures = [(rank, failure) for rank, failure in enumerate(from_all(self.failure)) if failure is not None]
        if not failures:
            return None
        if self.failure is None:
            self._give_up("recording failed on another process")
        where = f"process {failures[0][0]}: " if place()[1] > 1 else ""
        return f"{where}{failures[0][1]}"

    def __call__(self, arguments: ModelInput, divisor: float) -> Tensor:
        """The loss of `arguments`, a tensor of its own; its gradients over `divisor` are added to the parameters'."""
        if self.failure is not None:
            return self._backward(arguments, divisor)
        arguments = arguments._replace(context=arguments.context.with_ints())
        key = (divisor, *kind_of(arguments))
        recording = self._recordings.get(key)
        if recording is None:
            return self._first(key, _copied(arguments), divisor)
        for own, given in zip(_tensors(recording.inputs), _tensors(arguments), strict=True):
            own.copy_(given, non_blocking=True)
        recording.replay()
        return recording.loss.clone()

    def _first(self, key: Hashable, inputs: ModelInput, divisor: float) -> Tensor:
        places = self._places()
        loss = self._done(inputs, divisor)  # compiles what is not compiled yet, which a recording cannot
        recording = None if self.failure is not None else self._recording(inputs, divisor)
        if self._places() != places:
            raise RuntimeError("a gradient has moved while the step was recorded: set exec.cuda_graphs=off")
        if recording is not None:
            self._recordings[key] = recording
            _log.debug("recorded graph %d of a micro-batch", len(self._recordings))
        return loss

    def _done(self, inputs: ModelInput, divisor: float) -> Tensor:
        """The work itself; on trial, without recordings where they leave no memory for it."""
        try:
            return self._backward(inputs, divisor)
        except torch.OutOfMemoryError as error:
            if not (self.on_trial and self._recordings) or place()[1] == 1:
                raise
            self._give_up(_said(error))
        # Here, where the error no longer holds on to the tensors of its frames.
        return self._backward(inputs, divisor)

    def _recording(self, inputs: ModelInput, divisor: float) -> _Recording | None:
        """None where it cannot be made."""
        try:
            return _Recording(inputs, *self._record(lambda: self._backward(inputs, divisor)))
        except RuntimeError as error:
            # One process alone tries smaller micro-batches instead.
            if isinstance(error, torch.OutOfMemoryError) and place()[1] == 1:
                raise
            failure = _said(error)
        self._give_up(failure)
        return None

    def _give_up(self, why: str) -> None:
        """Record and replay nothing any more, and free what recordings hold."""
        self.failure = why
        if not self.on_trial:  # else who tries says what became of it
            _log.warning("steps are no longer recorded: %s", why)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a replay may be under way
        self._recordings.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def _places(self) -> list[int]:
        """Where gradients lie."""
        for name, parameter in self._parameters:
            if parameter.grad is None:
                raise UserError(
                    f"exec.cuda_graphs=on: {name} has a gradient that is made anew at each step, as sparse ones are; "
                    "a recorded step adds to one that stays: set exec.cuda_graphs=off"
                )
        return [p.grad.data_ptr() for _, p in self._parameters if p.grad is not None]


class OnGpu:
    """Records CUDA graphs, all in one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What replays `work`, and the tensor in which its result then stands."""
        # An autograd graph that a cycle of references keeps would run on the stream on which it was made.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA: the loader's, which pins memory, and NCCL's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a word'])[0]}"


def _tensors(inputs: ModelInput) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor))


def _copied(value: Any) -> Any:
    """Named tuples with tensors of their own, of the same strides, which compiled graphs depend on."""
    if isinstance(value, Tensor):
        own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return own.copy_(value)
    return type(value)(*map(_copied, value)) if isinstance(value, tuple) else value
