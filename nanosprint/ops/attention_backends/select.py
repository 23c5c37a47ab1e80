"""Picks the fastest back end that passes its check on this device, within a few seconds, and keeps the outcome."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from nanosprint.ops.attention_backends import outcome, probe
from nanosprint.ops.attention_backends.measure import Call, time_ms
from nanosprint.ops.attention_backends.outcome import Outcome
from nanosprint.ops.attention_backends.table import TABLE, Needs

log = logging.getLogger(__name__)

# In the order of the speeds seen on an H200, so that what the time budget cuts off is unlikely to have won: 64 x 1,024
# tokens forward and backward took cudnn 1.33 ms, flash 1.84, fa2 2.09.
ORDER = ("fa3", "fa4", "cudnn", "fa2", "flash")
# With documents or a window: 49,152 tokens of 6 heads of 128, windows 640 and 1,408, forward and backward took fa4
# 0.699 and 0.771 ms, triton 0.766 and 0.867, fa2 1.21 and 1.40. fa4 is last as what it compiles may use up the budget.
# On dense rows triton has nothing that cuDNN lacks.
ORDER_MASKED = ("fa3", "triton", "fa2", "fa4")
# These are never first where another works: sdpa takes cuDNN's kernel for dense rows, and on documents 3 to 5 times as
# long as fa2; flex takes 1.1 to 1.4 times as long as fa2, and each window of its check some five seconds to compile.
FALLBACKS = ("sdpa",)
FALLBACKS_MASKED = ("flex", "sdpa")
BUDGET_S = 5.0  # after which no other is begun
CANDIDATE_S = 2.0  # for timing one, compilation apart


def fastest(needs: Needs, calls: Sequence[Call], *, cache: Path | None = None, budget_s: float = BUDGET_S) -> str:
    """Name of the back end with the shortest forward and backward passes of `calls`; see `ops.attention.choose`."""
    about = outcome.circumstances(needs, calls)
    path = None if cache is None else outcome.place(cache, about)
    found = None if path is None else outcome.load(path, about)
    source = f"measured before, {str(path).replace(str(Path.home()), '~', 1)}"
    if found is None:
        start, damaged = time.perf_counter(), path is not None and path.exists()
        found = _measured(needs, calls, budget_s)
        source = f"measured in {time.perf_counter() - start:.1f} s"
        if path is not None:
            # Runs that start side by side shall agree: the first to be ready speaks for all.
            other = None if damaged else outcome.load(path, about)
            if other is None:
                outcome.store(path, about, found)
            else:
                found, source = other, f"measured by another run just now, {path}"
    vary = needs.documents or needs.window
    log.info("attention %s. %s; %s", found.told(vary), _described(calls), source)
    return found.ranking(vary)[0]


def _described(calls: Sequence[Call]) -> str:
    """The workload in a few words."""
    shapes = sorted({f"{call.rows} x {call.seq_len:,}" for call in calls})
    windows = sorted({call.window for call in calls if call.window is not None})
    words = f"{sum(call.count for call in calls)} calls forward and backward on {', '.join(shapes)} tokens"
    return words + (f" with windows {', '.join(f'{window:,}' for window in windows)}" if windows else "")


def _measured(needs: Needs, calls: Sequence[Call], budget_s: float) -> Outcome:
    """Try one after the other. Raises ValueError where none works."""
    torch.empty(1, device=needs.device)  # creates the CUDA context, which is nobody's fault
    start, found = time.perf_counter(), Outcome()
    masked = needs.documents or needs.window
    order, fallbacks = (ORDER_MASKED, FALLBACKS_MASKED) if masked else (ORDER, FALLBACKS)
    for name in (*order, *fallbacks):
        spent = time.perf_counter() - start
        reason = TABLE[name].refuses(needs)
        if reason is None and found.times_ms and name in fallbacks:
            reason = "not tried, kept for where nothing else works"
        elif reason is None and found.times_ms and spent > budget_s:
            reason = f"not tried, {spent:.1f} s were spent"
        if reason is None:
            ms, reason = _try(name, needs, calls)
            if ms is not None:
                found.times_ms[name] = ms
        if reason is not None:
            found.left_out[name] = reason
    if needs.device.type == "cuda":
        torch.cuda.empty_cache()
    if not found.times_ms:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
        raise ValueError(f"no attention back end works on {needs.device}: {reasons}")
    return found


def _try(name: str, needs: Needs, calls: Sequence[Call]) -> tuple[float | None, str | None]:
    """(milliseconds, None), or (None, why not). Limits are ints or data, as training has them."""
    as_data = not TABLE[name].bakes_limits
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
        limits_as_data=as_data,
    )
    if failure is not None:
        log.warning("attention: %s is installed but failed its check on %s: %s", name, needs.device, failure)
        return None, failure
    share_ms = 1000 * CANDIDATE_S / len(calls)
    ms = 0.0
    try:
        for call in calls:
            one = time_ms(attend, call, needs.dtype, needs.device, limits_as_data=as_data, at_most_ms=share_ms)
            ms += call.count * one
    except Exception as error:  # out of memory, most likely, which is a reason to take another
        return None, f"{type(error).__name__} at the real shape: {str(error).strip()[:200]}"
    return ms, None
