"""Feeding a training run: the same tokens at every step whatever the number of processes, and no waiting.

A step is divided into lanes, equal runs of rows. Micro-batch m of rank r holds lanes (m * world_size + r) * k and the
k - 1 that follow it, so that counting through micro-steps and ranks goes through the lanes in order; k may differ from
step to step. Every rank reads only its own rows; which rows those are is arithmetic (see `order`), so nothing needs to
be communicated.

A background thread assembles the next steps. On a GPU they are put together in a ring of pinned buffers and copied on
a stream of their own; a buffer is used again only after the event recorded behind its copy, and the consumer's stream
waits for that event, never the host. On a CPU every step gets fresh memory, which costs less than it would to share.

Legend: B rows (sequences), S tokens per row.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from nanosprint.data.documents import DocumentEnds, document_ends, slots
from nanosprint.data.order import PackedRows, Position, Rows, StepShape, make_order
from nanosprint.data.shards import ShardError, open_shard

STATE_VERSION = 1
EPSILON = 1e-9  # rounding in a number of passes


class BatchShape(Protocol):
    """What the loader needs to know of a step; `config.StepPlan` has it.

    With order "documents", `max_document` as well: the tokens of the longest document, or None.
    """

    @property
    def batch_tokens(self) -> int: ...

    @property
    def seq_len(self) -> int: ...


class Batch(NamedTuple):
    """A micro-batch. tokens: (B, history + S) int32. targets: (B, S) int64, the token after each; -1: not scored."""

    tokens: Tensor
    targets: Tensor
    documents: DocumentEnds | None = None  # where the caller gave a document_start


@dataclass
class StepData:
    """One rank's part of a step.

    state_after: all that a new loader needs to go on after this step, ready for JSON and the same on every rank.
    wait_s: seconds for which the consumer had to wait.
    """

    step: int
    micro_batches: list[Batch]
    state_after: dict[str, Any]
    wait_s: float


@dataclass
class _Assembled:
    step: int
    tokens: Tensor  # (micro-steps, B, history + S) int32
    targets: Tensor  # (micro-steps, B, S) int64
    ends: Tensor | None  # (micro-steps, D) int32
    longest: list[int]
    state_after: dict[str, Any]
    ready: "torch.cuda.Event | None" = None


class TokenLoader:
    """Iterates over the steps of a run as `StepData`; use it as a context manager, or call `close`.

    shards: training shards in order. plan: step number -> its shape, see `BatchShape`. lanes and lanes_per_microbatch
    (a number, or a step's tokens -> the number for it): see the module's head. order, seed: see `order`. epochs: passes
    over the tokens that the run may take. state: a `state_after` to go on from, at any world size and any number of
    lanes per micro-batch; start_step alone finds its place by arithmetic. prefetch: steps assembled ahead. Raises
    ValueError, before anything is read, if the lanes cannot be dealt, a step cannot be divided, the tokens are too few
    or `state` belongs to other data. A token id of vocab_size or more raises it on the way.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        plan: Callable[[int], BatchShape],
        *,
        num_steps: int,
        lanes: int,
        lanes_per_microbatch: int | Callable[[int], int],
        vocab_size: int,
        rank: int = 0,
        world_size: int = 1,
        order: str = "sequential",
        seed: int = 0,
        epochs: float = 1.0,
        history: int = 0,
        document_start: int | None = None,
        mean_document: int = 128,
        spare_documents: int = 1,
        device: torch.device | str = "cpu",
        start_step: int | None = None,
        state: dict[str, Any] | None = None,
        prefetch: int = 2,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must lie between 0 and world_size - 1 = {world_size - 1}")
        self.device = _with_index(torch.device(device))
        self._lanes, self._rank, self._world_size = lanes, rank, world_size
        k = lanes_per_microbatch
        self._lanes_of: Callable[[int], int] = k if callable(k) else lambda _: k
        self._plan, self._num_steps, self._vocab_size = plan, num_steps, vocab_size
        self._reader = _Reader(shards, vocab_size, history)
        self._document_start, self._room = document_start, (mean_document, spare_documents)
        self._order_name, self._seed = order, seed
        self._order = make_order(order, self._reader.shards, seed, document_start)
        self._identity = self._make_identity()
        self._step, self._position = self._find_start(start_step, state)
        self._check_plan(epochs)
        self._ring = _PinnedRing(self.device, prefetch + 1) if self.device.type == "cuda" else None
        self._queue: queue.Queue[_Assembled | BaseException | None] = queue.Queue(maxsize=max(1, prefetch))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._assemble_all, name="token-loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the background thread and wait for it."""
        self._stop.set()
        while self._thread.is_alive():
            _take_now(self._queue)  # it may be waiting for room
            self._thread.join(timeout=0.01)

    def __iter__(self) -> Iterator[StepData]:
        while not self._stop.is_set():
            began = time.perf_counter()
            item = self._queue.get()
            waited = time.perf_counter() - began
            if item is None:
                self._stop.set()
                return
            if isinstance(item, BaseException):
                self.close()
                raise item
            yield self._hand_out(item, waited)

    def epochs_read(self, state: dict[str, Any]) -> float:
        """Passes over the training tokens at a `state_after`."""
        return float(state["epochs_read"])

    def _hand_out(self, item: _Assembled, waited: float) -> StepData:
        tokens, targets = item.tokens, item.targets
        if item.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(item.ready)
            tokens.record_stream(stream)  # the memory was allocated on the copying stream
            targets.record_stream(stream)
        elif tokens.device.type != self.device.type:
            tokens, targets = tokens.to(self.device), targets.to(self.device)
        batches = [Batch(*pair) for pair in zip(tokens.unbind(), targets.unbind(), strict=True)]
        if item.ends is not None:
            # A few hundred numbers: their copy rides along with the step rather than in the ring.
            ends = item.ends.to(self.device, non_blocking=True).unbind()
            documents = (DocumentEnds(*pair) for pair in zip(ends, item.longest, strict=True))
            batches = [b._replace(documents=d) for b, d in zip(batches, documents, strict=True)]
        return StepData(item.step, batches, item.state_after, waited)

    # --- before the first step ---

    def _find_start(self, start_step: int | None, state: dict[str, Any] | None) -> tuple[int, Position]:
        if state is None:
            position = Position()
            for step in range(start_step or 0):
                shape = self._shape(step)
                position = self._order.advance(self._order.start(position, shape), shape)
            return start_step or 0, position
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise ValueError(
                    f"the checkpoint's data reader has {key}={state.get(key)!r}, this run {value!r}: "
                    "resume with the data and settings of the run it belongs to"
                )
        if start_step is not None and start_step != state["step"]:
            raise ValueError(f"start_step={start_step}, but the data reader's state is at step {state['step']}")
        return state["step"], Position(**state["position"])

    def _shape(self, step: int) -> StepShape:
        plan = self._plan(step)
        longest = getattr(plan, "max_document", None) if self._order_name == "documents" else None
        return StepShape(plan.batch_tokens, plan.seq_len, longest)

    def _make_identity(self) -> dict[str, Any]:
        """What must agree between a state and the loader that goes on from it."""
        return {
            "version": STATE_VERSION,
            "order": self._order_name,
            "seed": self._seed if self._order_name == "shuffled" else None,
            "shards": [[path.name, count] for path, count in zip(self._reader.paths, self._reader.counts, strict=True)],
        }

    def _check_plan(self, epochs: float) -> None:
        """Go through all steps on paper: every one must divide into lanes and rows, and the tokens must suffice."""
        position, needed = self._position, 0
        before: StepShape | None = None
        for step in range(self._step, self._num_steps):
            shape = self._shape(step)
            if shape != before:
                _check_lanes(self._lanes, self._lanes_of(shape.batch_tokens), self._world_size)
                _check_divides(step, shape, self._lanes)
            if self._order_name == "shuffled" and before is not None and before.seq_len != shape.seq_len:
                raise ValueError(
                    f"data.order=shuffled deals blocks of one length, but seq_len changes from {before.seq_len} to "
                    f"{shape.seq_len} at step {step}: use data.order=sequential"
                )
            before = shape
            position = self._order.advance(self._order.start(position, shape), shape)
            needed += shape.batch_tokens
        passes = self._order.passes(position, before) if before else 0.0
        if passes > epochs + EPSILON:
            total, cut = sum(self._reader.counts), " and of long documents" if self._order_name == "documents" else ""
            raise ValueError(
                f"not enough training tokens: steps {self._step} to {self._num_steps - 1} take {needed} targets, which "
                f"need {needed + 1} tokens and what is dropped at shard ends{cut}; there are {total} in "
                f"{len(self._reader.paths)} shards, and data.epochs={epochs:g} passes over them are allowed. Set "
                f"data.epochs={np.ceil(passes * 100) / 100:g}, lower train.num_steps, or add data"
            )

    # --- in the background thread ---

    def _assemble_all(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # the current device belongs to the thread
            for step in range(self._step, self._num_steps):
                if self._stop.is_set():
                    return
                self._put(self._assemble(step))
            self._put(None)
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(error)

    def _put(self, item: _Assembled | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _assemble(self, step: int) -> _Assembled:
        shape = self._shape(step)
        seq_len, k = shape.seq_len, self._lanes_of(shape.batch_tokens)
        start = self._order.start(self._position, shape)
        micro_steps, rows = self._lanes // (self._world_size * k), shape.batch_tokens // seq_len // self._lanes * k
        tokens, targets, slot = self._buffers((micro_steps, rows), seq_len)
        for m in range(micro_steps):
            chosen = self._order.rows(start, (m * self._world_size + self._rank) * rows, rows, shape)
            self._reader.read(chosen, tokens[m].numpy(), targets[m].numpy())
        ends, longest = self._find_documents(tokens, seq_len)
        self._position = self._order.advance(start, shape)
        state = {
            **self._identity,
            "step": step + 1,
            "position": vars(self._position).copy(),
            "epochs_read": self._order.passes(self._position, shape),
        }
        if self._ring is None or slot is None:
            return _Assembled(step, tokens, targets, ends, longest, state)
        return _Assembled(step, *self._ring.copy(slot, tokens, targets), ends, longest, state, slot.copied)

    def _find_documents(self, tokens: Tensor, seq_len: int) -> tuple[Tensor | None, list[int]]:
        if self._document_start is None:
            return None, []
        own = tokens[:, :, self._reader.history :].numpy()
        ends = torch.empty((len(own), slots(own.shape[1], seq_len, *self._room)), dtype=torch.int32)
        if self._ring is not None:
            ends = ends.pin_memory()
        longest = [document_ends(rows, self._document_start, out) for rows, out in zip(own, ends.numpy(), strict=True)]
        return ends, longest

    def _buffers(self, rows: tuple[int, int], seq_len: int) -> "tuple[Tensor, Tensor, _Slot | None]":
        tokens, targets = (*rows, self._reader.history + seq_len), (*rows, seq_len)
        if self._ring is not None:
            return self._ring.next_buffers(tokens, targets)
        return torch.empty(tokens, dtype=torch.int32), torch.empty(targets, dtype=torch.int64), None


class _Slot:
    """A pair of pinned buffers and the event behind their last copy."""

    def __init__(self) -> None:
        self.tokens = torch.empty(0, dtype=torch.int32)
        self.targets = torch.empty(0, dtype=torch.int64)
        self.copied = torch.cuda.Event()


class _PinnedRing:
    """Pinned host buffers that are filled and copied to the GPU in turn."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._next = 0

    def next_buffers(self, tokens: tuple[int, ...], targets: tuple[int, ...]) -> tuple[Tensor, Tensor, _Slot]:
        """Pinned memory of these shapes, not in use by any copy."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.copied.synchronize()  # returns at once if nothing was ever copied
        slot.copied = torch.cuda.Event()  # the consumer may still have to wait for the old one
        if slot.tokens.numel() < math.prod(tokens):
            slot.tokens = torch.empty(math.prod(tokens), dtype=torch.int32, pin_memory=True)
            slot.targets = torch.empty(math.prod(targets), dtype=torch.int64, pin_memory=True)
        flat_tokens, flat_targets = slot.tokens[: math.prod(tokens)], slot.targets[: math.prod(targets)]
        return flat_tokens.view(tokens), flat_targets.view(targets), slot

    def copy(self, slot: _Slot, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(self.stream):
            on_device = (tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True))
            slot.copied.record(self.stream)
        return on_device


class _Reader:
    """Reads rows, and the `history` tokens before each, from memory-mapped shards and checks their ids."""

    def __init__(self, paths: Sequence[Path], vocab_size: int, history: int = 0) -> None:
        if not paths:
            raise ShardError("no shards to read from")
        self.paths = list(paths)
        self.vocab_size, self.history = vocab_size, history
        self.shards = [open_shard(path).view(np.ndarray) for path in self.paths]  # slicing a memmap is slow
        self.counts = [len(shard) for shard in self.shards]

    def read(self, rows: Rows | PackedRows, tokens: np.ndarray, targets: np.ndarray) -> None:
        """Fill tokens (B, history + S) int32 and targets (B, S) int64 with the B rows of `rows`.

        Before the first token of a shard, and before a row of packed documents, the history is 0.
        """
        if isinstance(rows, PackedRows):
            self._read_packed(rows, tokens, targets)
        else:
            self._read_rows(rows.shards, rows.offsets, tokens, targets)

    def _read_packed(self, rows: PackedRows, tokens: np.ndarray, targets: np.ndarray) -> None:
        shard, pieces = self.shards[rows.shard], rows.pieces
        places = zip(pieces.offsets.tolist(), (pieces.offsets + pieces.lengths).tolist(), strict=True)
        ids = np.concatenate([shard[start:stop] for start, stop in places]).reshape(len(targets), -1)
        self.check(ids, rows.shard)
        tokens[:, : self.history] = 0
        tokens[:, self.history :] = ids[:, :-1]
        targets[:] = ids[:, 1:]

    def _read_rows(self, shards: np.ndarray, offsets: np.ndarray, tokens: np.ndarray, targets: np.ndarray) -> None:
        num_rows, seq_len = targets.shape
        if self.history:
            self._read_history(shards, offsets, tokens[:, : self.history])
            tokens = tokens[:, self.history :]
        if num_rows and shards[0] == shards[-1] and np.all(np.diff(offsets) == seq_len) and np.all(shards == shards[0]):
            start = int(offsets[0])
            run = self.shards[shards[0]][start : start + num_rows * seq_len + 1]
            self.check(run, int(shards[0]))
            tokens[:] = run[:-1].reshape(num_rows, seq_len)
            targets[:] = run[1:].reshape(num_rows, seq_len)
            return
        for shard in np.unique(shards) if len(self.shards) > 1 else (0,):
            here = np.flatnonzero(shards == shard)
            windows = np.lib.stride_tricks.sliding_window_view(self.shards[shard], seq_len + 1)
            ids = windows[offsets[here]]
            self.check(ids, int(shard))
            tokens[here] = ids[:, :-1]
            targets[here] = ids[:, 1:]

    def _read_history(self, shards: np.ndarray, offsets: np.ndarray, history: np.ndarray) -> None:
        before = offsets[:, None] + np.arange(-self.history, 0)
        for shard in np.unique(shards):
            here = np.flatnonzero(shards == shard)
            ids = self.shards[shard][np.maximum(before[here], 0)]
            self.check(ids, int(shard))
            history[here] = np.where(before[here] >= 0, ids, 0)

    def check(self, ids: np.ndarray, shard: int) -> None:
        largest = int(ids.max())
        if largest >= self.vocab_size:
            raise ShardError(
                f"{self.paths[shard]}: token id {largest}, but the model's vocabulary has {self.vocab_size}: "
                "set model.vocab_size, or use data made with the right tokenizer"
            )


def count_targets(shards: Sequence[Path], tokens: int | None) -> int:
    """How many targets validation scores: `tokens`, or all that the shards have (one fewer than their tokens).

    Raises ValueError if they have fewer than `tokens`.
    """
    total = sum(len(open_shard(path)) for path in shards)
    available = max(0, total - 1)
    if tokens is None:
        tokens = available
    if not 1 <= tokens <= available:
        raise ValueError(
            f"validation on {tokens} targets needs {tokens + 1} tokens; the validation shards have {total}: "
            f"set eval.tokens to 1 to {available}, or none for all"
        )
    return tokens


def validation_batches(
    shards: Sequence[Path],
    *,
    tokens: int | None,
    seq_len: int,
    stride: int | None = None,
    batch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    vocab_size: int,
    history: int = 0,
    document_start: int | None = None,
    mean_document: int = 128,
    spare_documents: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """This rank's part of validation: over all ranks each of the first `tokens` targets (None: all) is scored once.

    Rows are windows of seq_len over the concatenated shards, `stride` apart (None: seq_len). The first scores all its
    targets, the others their last `stride`; every other target is -1. All batches of all ranks have the same shape, and
    all ranks have as many, so that some rows, even whole batches, may have nothing to score: add losses and counts up
    over batches and ranks, and divide at the end. Raises ValueError for settings or data that cannot work, at once.
    """
    stride = stride or seq_len
    if not 1 <= stride <= seq_len:
        raise ValueError(f"eval.stride={stride} must lie between 1 and eval.seq_len={seq_len}")
    if batch_tokens < seq_len:
        raise ValueError(f"eval.batch_tokens={batch_tokens} is less than one row of eval.seq_len={seq_len}: raise it")
    num_targets = count_targets(shards, tokens)
    num_rows = 1 + -(-max(0, num_targets - seq_len) // stride)
    rows_per_rank = -(-num_rows // world_size)
    rows_per_batch = min(batch_tokens // seq_len, rows_per_rank)
    reader = _Reader(shards, vocab_size, history)
    windows = _Windows(reader, num_targets, seq_len, stride)

    def batches() -> Iterator[Batch]:
        mine = range(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        for first in mine[::rows_per_batch]:
            count = min(rows_per_batch, mine.stop - first)
            tokens, targets = windows.batch(first, count, rows_per_batch)
            documents = None
            if document_start is not None:
                ends = torch.empty(slots(rows_per_batch, seq_len, mean_document, spare_documents), dtype=torch.int32)
                longest = document_ends(tokens[:, history:].numpy(), document_start, ends.numpy())
                documents = DocumentEnds(ends.to(device), longest)
            yield Batch(tokens.to(device), targets.to(device), documents)

    return batches()


@dataclass(frozen=True)
class _Windows:
    reader: _Reader
    num_targets: int
    seq_len: int
    stride: int

    def batch(self, first: int, count: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Windows first .. first + count - 1, padded to num_rows with rows that score nothing."""
        start = first * self.stride
        span = np.full((num_rows - 1) * self.stride + self.seq_len + 1, -1, np.int64)  # -1: beyond the last target
        known = self._read(start, min(start + len(span), self.num_targets + 1))
        span[: len(known)] = known
        targets = self._cut(span[1:])
        span[max(0, self.num_targets - start) :] = 0
        history = self.reader.history
        before = np.zeros(history, np.int64)
        if history:
            known = self._read(max(0, start - history), start)
            before[history - len(known) :] = known
        tokens = self._cut(np.concatenate([before, span[:-1]]), history)
        tokens[count:] = 0
        targets[count:] = -1
        targets[1 if first == 0 else 0 :, : self.seq_len - self.stride] = -1  # scored in the row before
        return torch.from_numpy(tokens.astype(np.int32)), torch.from_numpy(targets)

    def _cut(self, span: np.ndarray, history: int = 0) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(span, history + self.seq_len)[:: self.stride].copy()

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1 of the concatenated shards, checked: (n,) uint16."""
        parts, before = [np.empty(0, np.uint16)], 0
        for i, shard in enumerate(self.reader.shards):
            part = shard[max(0, start - before) : max(0, stop - before)]
            if len(part):
                self.reader.check(part, i)
                parts.append(part)
            before += len(shard)
        return np.concatenate(parts)


def _with_index(device: torch.device) -> torch.device:
    """ "cuda" as "cuda:N", which the background thread, with a current device of its own, must know."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_lanes(lanes: int, k: int, world_size: int) -> None:
    if lanes < 1 or world_size < 1 or lanes % world_size:
        fit = [n for n in range(1, lanes + 1) if lanes % n == 0]
        raise ValueError(f"{lanes} lanes cannot be dealt to {world_size} processes: use {_either(fit)} of them")
    per_rank = lanes // world_size
    if k < 1 or per_rank % k:
        fit = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
        raise ValueError(
            f"exec.lanes_per_microbatch={k} does not divide the {per_rank} lanes that each of {world_size} processes "
            f"has: use {_either(fit)}"
        )


def _check_divides(step: int, shape: StepShape, lanes: int) -> None:
    unit = lanes * shape.seq_len
    if shape.batch_tokens < unit or shape.batch_tokens % unit:
        nearest = max(1, round(shape.batch_tokens / unit)) * unit
        raise ValueError(
            f"step {step}: batch_tokens={shape.batch_tokens} is not a multiple of lanes x seq_len = {lanes} x "
            f"{shape.seq_len}: the nearest that fits is {nearest}"
        )


def _either(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}" if len(values) > 1 else str(values[0])


def _take_now(items: queue.Queue[Any]) -> None:
    try:
        items.get_nowait()
    except queue.Empty:
        return
