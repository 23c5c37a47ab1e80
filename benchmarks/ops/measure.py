"""Checks and times cases: a row of plain values for each, or what went wrong in its place."""

import contextlib
import gc
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from benchmarks.floors import Ceilings
from benchmarks.harness import device_timing, synchronize
from benchmarks.inputs import Sizes
from benchmarks.ops.case import Case, Library, Operator, Work, floor_ms, memory_bound

Row = dict[str, Any]
LATER = "not compiled: --no-compile, or --seconds were over"


def warm_up(operators: Sequence[Operator], sizes: Sizes) -> None:
    """Call every operator once, many at a time: one by one, compiling their kernels would take most of a minute."""

    def once(operator: Operator) -> None:
        with contextlib.suppress(Exception):  # it comes again, and is told then
            for case in operator.make(replace(sizes)):
                case.ours()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(once, operators))
    synchronize()


def rows_of(operator: Operator, sizes: Sizes, ceilings: Ceilings | None) -> list[Row]:
    """A row for each case, without what torch compiles. A failure is told in the row it concerns, and raises nothing.

    Keys: "ms", "p20", "p80" and "how" (`harness.device_timing`) of ours; for "reference" and "library" likewise with
    that in front, or "reference_why", why there is none; "error"; and, with ceilings, "floor_ms", "share" (of the floor
    that is reached), "rate" and its "unit". "failed" in place of all that.
    """
    cases = _cases(operator, sizes)
    if isinstance(cases, str):
        return [_head(operator, sizes) | {"failed": cases}]
    return [_head(operator, sizes, case) | _measured(case, sizes, ceilings) for case in cases]


def add_compiled(operator: Operator, sizes: Sizes, rows: list[Row]) -> None:
    """Time what torch compiles of the operator's cases, and put it into those of `rows` that await it."""
    cases = _cases(operator, sizes)
    if isinstance(cases, str):  # out of memory, most likely: there were cases before
        for row in rows:
            if _head(operator, sizes).items() <= row.items() and row.get("compiled_why") == LATER:
                row["compiled_why"] = cases
        return
    for case in cases:
        head = _head(operator, sizes, case)
        row = next(row for row in rows if head.items() <= row.items())
        if row.get("compiled_why") == LATER and not isinstance(case.compiled, str):
            del row["compiled_why"]
            begin = time.perf_counter()
            row |= _timed("compiled", case.compiled, torch.device(sizes.device))
            row["compiled_first_s"] = time.perf_counter() - begin


def awaits_compiling(operator: Operator, sizes: Sizes, rows: list[Row]) -> bool:
    """Whether any of the operator's rows could have a compiled rival and has none yet."""
    head = _head(operator, sizes)
    return any(row.get("compiled_why") == LATER and head.items() <= row.items() for row in rows)


def release() -> None:
    """Give back the memory of cases that are done with."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _head(operator: Operator, sizes: Sizes, case: Case | None = None) -> Row:
    tokens = sizes.tokens if operator.by_tokens else None
    head: Row = {"operator": operator.name, "tokens": tokens}
    return head if case is None else head | {"case": case.name, "shape": case.shape}


def _cases(operator: Operator, sizes: Sizes) -> list[Case] | str:
    torch._dynamo.reset()  # one function compiled for many shapes would run into the limit on recompilations
    try:
        return list(operator.make(replace(sizes)))  # a copy draws the same numbers again
    except Exception as error:
        return told(error)


def _measured(case: Case, sizes: Sizes, ceilings: Ceilings | None) -> Row:
    device, row = torch.device(sizes.device), Row()
    try:
        row["error"] = case.check()
        if not row["error"] <= case.tolerance:
            return row | {"failed": f"WRONG by {row['error']:.1e}, where {case.tolerance:.0e} is allowed"}
        row |= device_timing(case.ours, device)._asdict()
    except Exception as error:
        return row | {"failed": told(error)}
    if ceilings is not None:
        row["floor_ms"] = floor_ms(case.costs, ceilings)
        row["share"] = row["floor_ms"] / row["ms"]
        moving = memory_bound(case.costs, ceilings)
        amount = sum(cost.nbytes if moving else cost.flops for cost in case.costs)
        row |= {"rate": amount / row["ms"] / 1e9, "unit": "TB/s" if moving else "TFLOP/s"}
    row |= _timed("reference", case.reference, device) | _timed("library", case.library, device)
    row["compiled_why"] = case.compiled if isinstance(case.compiled, str) else LATER
    return row


def _timed(column: str, rival: Work | Library | str, device: torch.device) -> Row:
    """Its time, or why there is none."""
    if isinstance(rival, str):
        return {f"{column}_why": rival}
    named = {f"{column}_name": rival.name} if isinstance(rival, Library) else {}
    work = rival.work if isinstance(rival, Library) else rival
    try:
        timing = device_timing(work, device)
    except Exception as error:
        return named | {f"{column}_why": told(error)}
    return named | {f"{column}_{key}": value for key, value in timing._asdict().items()}


def told(error: Exception) -> str:
    """The error's name and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
