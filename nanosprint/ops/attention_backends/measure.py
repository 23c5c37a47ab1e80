"""What a model asks of attention in a micro-batch, call by call, and how long a back end takes for one."""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from nanosprint.ops.attention_backends.contract import Attention, Documents, Limit, as_data, pack_documents, times

LONGEST = 2048  # tokens of a document that is made up, where nothing else cuts it
REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Call:
    """Attention as `count` layers call it: `rows` of `seq_len` tokens, each of which is `places` positions.

    With paired heads a token is two positions, and half the heads are left for each. window: in positions; None: all.
    longest: tokens of the longest document, None where there are none; shortest: of all but a row's last; slots:
    entries of cu_seqlens (None: 64 at least, in steps of 64).
    """

    rows: int
    seq_len: int
    num_heads: int
    head_dim: int
    window: int | None = None
    longest: int | None = None
    shortest: int = 1
    slots: int | None = None
    places: int = 1
    count: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of q, k and v."""
        return self.rows, self.places * self.seq_len, self.num_heads // self.places, self.head_dim

    def documents(self, device: torch.device) -> Documents | None:
        """Web-like ones, the same each time."""
        if self.longest is None:
            return None
        own = sample_documents(self.rows, self.seq_len, self.longest, device, shortest=self.shortest, slots=self.slots)
        return Documents(self.places * own.cu_seqlens, times(own.max_seq_len, self.places))


def sample_documents(
    rows: int,
    seq_len: int,
    max_seq_len: int | None,
    device: torch.device,
    *,
    shortest: int = 1,
    slots: int | None = None,
) -> Documents:
    """Documents of web-like lengths, cut at `max_seq_len` and at row ends."""
    longest = min(seq_len, max_seq_len or LONGEST)
    lengths = list(chain.from_iterable(sample_lengths(rows, seq_len, longest, shortest=shortest)))
    slots = max(64, -(-(len(lengths) + 1) // 64) * 64) if slots is None else slots
    return pack_documents(lengths, slots=slots, max_seq_len=longest, device=device)


def sample_lengths(rows: int, seq_len: int, longest: int, *, shortest: int = 1, seed: int = 0) -> list[list[int]]:
    """Web-like lengths of the documents in each row (log-normal, median 424, mean 570), between the two bounds.

    A row's last document is cut at the row's end, and may so be shorter. The same lengths for the same arguments.
    """
    draw, lengths = random.Random(seed), []
    for _ in range(rows):
        left, row = seq_len, []
        while left:
            length = round(draw.lognormvariate(math.log(424), 0.77))
            row.append(min(left, longest, max(shortest, length)))
            left -= row[-1]
        lengths.append(row)
    return lengths


def time_ms(
    attend: Attention,
    call: Call,
    dtype: torch.dtype,
    device: torch.device,
    *,
    limits_as_data: bool,
    at_most_ms: float,
) -> float:
    """Median milliseconds of a forward and backward pass by CUDA events; more of them the more time they may take.

    The first pass, which may compile, and a second one do not count. limits_as_data: as training compiles it.
    """
    q, k, v, weight = (torch.randn(call.shape, dtype=dtype, device=device) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    documents, scale = call.documents(device), call.head_dim**-0.5
    window: Limit | None = as_data(call.window) if limits_as_data else call.window
    if documents is not None and limits_as_data:
        documents = documents._replace(max_seq_len=as_data(int(documents.max_seq_len)))

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, scale, window, documents), (q, k, v), weight)

    _passes_ms(both, 1)
    (once,) = _passes_ms(both, 1)
    return statistics.median(_passes_ms(both, max(1, min(REPEATS, int(at_most_ms / max(once, 1e-3))))))


def _passes_ms(work: Callable[[], None], repeats: int) -> list[float]:
    """Milliseconds of each on the device, which nobody waits for in between: launches run ahead, as in training."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]
