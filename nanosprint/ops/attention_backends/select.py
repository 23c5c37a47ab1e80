"""Picks the fastest back end that passes its check on this device, within a few seconds."""

import logging
import math
import random
import statistics
import time
from itertools import chain

import torch

from nanosprint.ops.attention_backends import probe
from nanosprint.ops.attention_backends.contract import Attention, Documents, Limit, as_data, pack_documents
from nanosprint.ops.attention_backends.table import TABLE, Needs

log = logging.getLogger(__name__)

# In the order of the speeds seen on an H200, so that what the time budget cuts off is unlikely to have won: 64 x 1,024
# tokens forward and backward took cudnn 1.33 ms, flash 1.84, fa2 2.09; on documents fa4 took 0.6 of fa2's time.
ORDER = ("fa3", "fa4", "cudnn", "fa2", "flash")
# With documents or a window: 49,152 tokens, window 640, forward and backward took triton 754 us where fa2 took 1,190 to
# 1,196. On dense rows triton has nothing that cuDNN lacks.
ORDER_MASKED = ("fa3", "triton", "fa4", "fa2")
# These are never first where another works: sdpa takes cuDNN's kernel for dense rows, and on documents 3 to 5 times as
# long as fa2; flex takes 1.1 to 1.4 times as long as fa2, and each window of its check some five seconds to compile.
FALLBACKS = ("sdpa",)
FALLBACKS_MASKED = ("flex", "sdpa")
BUDGET_S = 3.0
LONGEST = 2048  # tokens of a document that is made up, where nothing else cuts it
_REPEATS = 5


def fastest(
    needs: Needs,
    *,
    num_heads: int,
    seq_len: int,
    rows: int = 1,
    window: int | None = None,
    max_seq_len: int | None = None,
    budget_s: float = BUDGET_S,
) -> str:
    """Name of the back end with the shortest forward and backward pass at this shape; see `ops.attention.choose`."""
    torch.empty(1, device=needs.device)  # creates the CUDA context, which is nobody's fault
    start = time.perf_counter()
    timings: dict[str, float] = {}
    said: list[str] = []
    masked = needs.documents or needs.window
    order, fallbacks = (ORDER_MASKED, FALLBACKS_MASKED) if masked else (ORDER, FALLBACKS)
    for name in (*order, *fallbacks):
        spent = time.perf_counter() - start
        reason = TABLE[name].refuses(needs)
        if reason is None and timings and spent > budget_s:
            reason = f"not tried, {spent:.1f} s were spent"
        elif reason is None and timings and name in fallbacks:
            reason = "not tried, kept for where nothing else works"
        if reason is None:
            timings_ms, reason = _try(name, needs, num_heads, seq_len, rows, window, max_seq_len)
            if timings_ms is not None:
                timings[name] = timings_ms
        if reason is not None:
            said.append(f"{name}: {reason}")
    if not timings:
        raise ValueError(f"no attention back end works on {needs.device}: {'; '.join(said)}")
    ranking = sorted(timings, key=lambda name: timings[name])
    log.info(
        "attention: %s, forward and backward on %d x %d tokens: %s. %s (%.1f s)",
        ranking[0],
        rows,
        seq_len,
        ", ".join(f"{name} {timings[name]:.3f} ms" for name in ranking),
        "; ".join(said) or "none failed",
        time.perf_counter() - start,
    )
    return ranking[0]


def _try(
    name: str, needs: Needs, num_heads: int, seq_len: int, rows: int, window: int | None, max_seq_len: int | None
) -> tuple[float | None, str | None]:
    """(milliseconds, None), or (None, why not). Limits are ints or data, as training has them."""
    as_trained = not TABLE[name].bakes_limits
    try:
        attend = TABLE[name].load()
    except ImportError as error:
        return None, str(error)
    failure = probe.failure(
        attend,
        needs.dtype,
        needs.head_dim,
        needs.device,
        documents=needs.documents,
        window=needs.window,
        windows=probe.FEW_WINDOWS if TABLE[name].compiles else probe.WINDOWS,
        limits_as_data=as_trained,
    )
    if failure is not None:
        log.warning("attention: %s is installed but failed its check on %s: %s", name, needs.device, failure)
        return None, failure
    documents = sample_documents(rows, seq_len, max_seq_len, needs.device) if needs.documents else None
    shape = (rows, seq_len, num_heads, needs.head_dim)
    try:
        limit = as_data(window) if as_trained else window
        return time_ms(attend, shape, needs.dtype, needs.device, limit, documents), None
    except Exception as error:  # out of memory, most likely, which is a reason to take another
        return None, f"{type(error).__name__} at the real shape: {str(error).strip()[:200]}"


def sample_documents(rows: int, seq_len: int, max_seq_len: int | None, device: torch.device) -> Documents:
    """Documents of web-like lengths, cut at `max_seq_len` and at row ends."""
    longest = min(seq_len, max_seq_len or LONGEST)
    lengths = list(chain.from_iterable(sample_lengths(rows, seq_len, longest)))
    slots = max(64, -(-(len(lengths) + 1) // 64) * 64)
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
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    window: Limit | None,
    documents: Documents | None,
) -> float:
    """Median milliseconds of a forward and backward pass by CUDA events, after two that warm up."""
    q, k, v, weight = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    times = []
    for _ in range(2 + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.autograd.grad(attend(q, k, v, shape[-1] ** -0.5, window, documents), (q, k, v), weight)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])
