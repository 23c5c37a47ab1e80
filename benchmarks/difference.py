"""Whether two outcomes are the same bits, and where they are not."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # FP8 codes from here on, the sign aside, are no numbers


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)


def copied(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]


def differs(before: Tensor, after: Tensor, tolerance: float = 0.0) -> str | None:
    """What is different, None where nothing is.

    tolerance: 0.0 compares bits; else |after - before| / |before|, whose result must be finite, may be as large.
    """
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return f"{_form(after)}, before {_form(before)}"
    if _same_bits(before, after):
        return None
    if tolerance:
        apart = _distance(before, after)
        return None if apart <= tolerance else f"off by {apart:.1e}; {where(before, after)}"
    return where(before, after)


def strange(tensor: Tensor) -> str | None:
    """How many of its numbers are none, or infinite; None where all are finite."""
    count = int(_strange(tensor).sum())
    return f"{count:,} of {tensor.numel():,} numbers of {_form(tensor)} are not finite" if count else None


def where(before: Tensor, after: Tensor) -> str:
    """Of two tensors that differ: how much, in which rows and columns, whether numbers are lost, and an example."""
    width = after.shape[-1] if after.ndim else 1
    old, new = (t.contiguous().view(-1, width) for t in (before, after))
    other = _bits(old) != _bits(new)
    rows, columns = (other.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    row = rows[0]
    column = int(other[row].nonzero()[0])
    lost = int(_strange(after).sum())
    count = f"{int(other.sum()):,} of {after.numel():,} differ" + (f", {lost:,} not finite" if lost else "")
    change = f"{float(old[row, column]):g} -> {float(new[row, column]):g}"
    places = f"in rows {_ranges(rows)} and columns {_ranges(columns)}; the first at [{row}, {column}], {change}"
    return f"{_form(after)}: {count}, {places}"


def _same_bits(before: Tensor, after: Tensor) -> bool:
    one, other = (t.contiguous().view(-1) for t in (before, after))
    if not one.numel():
        return True
    aligned = math.gcd(one.numel() * one.element_size(), one.data_ptr(), other.data_ptr())
    word = next(dtype for dtype in _WORDS if aligned % dtype.itemsize == 0)  # few large ones: `equal` makes a mask
    return torch.equal(one.view(word), other.view(word))


def _bits(tensor: Tensor) -> Tensor:
    """An integer for each number."""
    return tensor.view(next(dtype for dtype in _WORDS if dtype.itemsize == tensor.element_size()))


def _strange(tensor: Tensor) -> Tensor:
    if tensor.dtype in _NAN:
        return (tensor.contiguous().view(torch.uint8) & 0x7F) >= _NAN[tensor.dtype]
    if not tensor.is_floating_point():
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return ~tensor.isfinite()


def _distance(before: Tensor, after: Tensor) -> float:
    old, new = before.float(), after.float()
    return float((new - old).norm() / old.norm().clamp_min(1e-30))


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _ranges(numbers: list[int], most: int = 4) -> str:
    """Ascending numbers as their count and runs: "3 of 0..1, 7"."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in runs[:most]]
    return f"{', '.join(shown)}{', ...' if len(runs) > most else ''} ({len(numbers):,})"
