"""What every attention back end computes, and the checks that they share.

Shape letters: B rows, S tokens of a row, H heads, K head size, D entries of cu_seqlens. Rows never see each other.
Query t of a row sees key j iff both lie in the same document, j <= t, and t - j <= window: `window` counts the tokens
to the left that a query sees besides itself, None means all of them. So a query sees one unbroken run of keys,
`first_key(...)[t]` to t, which is all that a back end has to know; and that first key never moves left as t grows.

Limits (the window, the longest document) are Python ints or data: int32 tensors of no axes on the CPU. The scale of
scores is a Python float or data likewise, in fp32. A compiled model has a graph for every number that it has met,
and one for all values of a tensor.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol, overload

import torch
from torch import Tensor

Limit = int | Tensor
Scale = float | Tensor


class Documents(NamedTuple):
    """Where documents end, over the B*S tokens of a batch laid end to end.

    cu_seqlens: (D,) int32 on the device of q: 0, the cumulative ends in order, then B*S repeated to the fixed length
    D. Equal neighbours are empty documents and cost nothing but a launch slot. Every row end must be among the ends.
    max_seq_len: no document is longer. Kernels size their grids by it, and one that is too small silently gives wrong
    outputs, so have `check_documents` look at whatever you build.
    """

    cu_seqlens: Tensor
    max_seq_len: Limit


@overload
def as_data(limit: int) -> Tensor: ...
@overload
def as_data(limit: None) -> None: ...
@overload
def as_data(limit: int | None) -> Tensor | None: ...
def as_data(limit: int | None) -> Tensor | None:
    """`limit` as data. A tensor of its own at each call: a graph is made anew where two arguments become one."""
    return None if limit is None else torch.tensor(limit, dtype=torch.int32, device="cpu")


def scale_as_data(scale: float) -> Tensor:
    """`scale` as data, rounded to fp32 as kernels take it. A product with a tensor that has axes keeps its dtype.

    In fp64 the compiler would take it for a Python number, and trace twice to find out that it is none (torch 2.13).
    """
    return torch.tensor(scale, dtype=torch.float32, device="cpu")


def times(limit: Limit, factor: int) -> Limit:
    """`limit` times `factor`, of the same kind. Data is multiplied on the host, without a kernel of the compiler's."""
    return _times(limit, factor) if isinstance(limit, Tensor) else limit * factor


@torch.library.custom_op("nanosprint::times_limit", mutates_args=())
def _times(limit: Tensor, factor: int) -> Tensor:
    return limit * factor


@_times.register_fake
def _(limit: Tensor, factor: int) -> Tensor:
    return torch.empty_like(limit)


def on_host(
    scale: Scale, window: Limit | None, documents: Documents | None
) -> tuple[float, int | None, Documents | None]:
    """All with numbers, for a back end whose shapes depend on limits. Not possible inside a compiled graph."""
    if documents is not None and isinstance(documents.max_seq_len, Tensor):
        documents = documents._replace(max_seq_len=int(documents.max_seq_len))
    return float(scale), window_from(window) if isinstance(window, Tensor) else window, documents


def window_from(data: Tensor) -> int:
    """A window that is data as an int. Raises ValueError where it is negative."""
    window = int(data)
    _check_window(window)
    return window


class Attention(Protocol):
    """softmax(scale q kᵀ) v over the visible keys: (B, S, H, K) three times in, once out, in the dtype of q.

    `window` is at least 0, or None. `documents` None: every row is one document.
    """

    def __call__(
        self,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        scale: Scale,
        window: Limit | None,
        documents: Documents | None = None,
    ) -> Tensor: ...


def first_key(
    rows: int, seq_len: int, window: Limit | None, documents: Documents | None, device: torch.device
) -> Tensor:
    """First key, counted from the row's start, that each query sees: int32 (rows, S), or (1, S) without documents."""
    if isinstance(window, Tensor):
        window = window.to(device, non_blocking=True)
    position = torch.arange(seq_len, device=device, dtype=torch.int32)[None, :]
    first = torch.zeros_like(position) if window is None else (position - window).clamp_min(0)
    if documents is None:
        return first
    cu_seqlens = documents.cu_seqlens
    token = torch.arange(rows * seq_len, device=device, dtype=torch.int32)
    # right=True counts the entries <= token, so that of several equal ones (empty documents) the last is meant.
    own = torch.bucketize(token, cu_seqlens, out_int32=True, right=True) - 1
    start = cu_seqlens[own].view(rows, seq_len)
    row_start = torch.arange(rows, device=device, dtype=torch.int32)[:, None] * seq_len
    return torch.maximum(start - row_start, first)


def reach(seq_len: int, window: int | None, longest_document: int | None) -> int:
    """How many tokens to its left a query can see at most."""
    longest = seq_len if longest_document is None else min(seq_len, longest_document)
    return longest - 1 if window is None else min(window, longest - 1)


def check_inputs(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, window: Limit | None, documents: Documents | None
) -> None:
    """Raise ValueError for shapes, dtypes or devices that no back end can take. Looks at no tensor's values."""
    shapes = f"q {tuple(q_BSHK.shape)}, k {tuple(k_BSHK.shape)}, v {tuple(v_BSHK.shape)}"
    if not q_BSHK.ndim == k_BSHK.ndim == v_BSHK.ndim == 4:
        raise ValueError(f"attention takes (rows, tokens, heads, head size) three times, got {shapes}")
    if k_BSHK.shape != v_BSHK.shape or q_BSHK.shape[2:] != k_BSHK.shape[2:] or q_BSHK.size(0) != k_BSHK.size(0):
        raise ValueError(f"attention wants equal rows, heads and head sizes, got {shapes}")
    if q_BSHK.size(1) > k_BSHK.size(1):
        raise ValueError(f"attention wants no more queries than keys, got {shapes}")
    if not q_BSHK.dtype == k_BSHK.dtype == v_BSHK.dtype:
        raise ValueError(f"attention wants one dtype, got q {q_BSHK.dtype}, k {k_BSHK.dtype}, v {v_BSHK.dtype}")
    if isinstance(window, Tensor):
        _check_data("window", window)
    elif window is not None:
        _check_window(window)
    if documents is None:
        return
    cu_seqlens, max_seq_len = documents
    if q_BSHK.size(1) != k_BSHK.size(1):
        raise ValueError(f"documents want as many queries as keys, got {shapes}: with a cache, leave documents out")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens must be int32 of shape (D,), D >= 2, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q_BSHK.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q on {q_BSHK.device}: move it with .to(q.device)")
    if isinstance(max_seq_len, Tensor):
        _check_data("max_seq_len", max_seq_len)
    elif max_seq_len < 1:
        raise ValueError(f"max_seq_len={max_seq_len} must be at least the length of the longest document")


def _check_window(window: int) -> None:
    if window < 0:
        raise ValueError(f"window={window} must be at least 0 (only the token itself), or None (no limit)")


def _check_data(name: str, limit: Tensor) -> None:
    if limit.ndim or limit.dtype != torch.int32 or limit.device.type != "cpu":
        raise ValueError(
            f"{name} as data must be an int32 tensor of no axes on the CPU, got {limit.dtype} {tuple(limit.shape)} on "
            f"{limit.device}"
        )


def check_documents(documents: Documents, rows: int, seq_len: int) -> Documents:
    """Return `documents`, or raise ValueError if they do not describe `rows` x `seq_len` tokens. Waits for the device.

    Meant for whoever builds them (a loader, on CPU) and for tests; attention itself never looks at values.
    """
    total, ends = rows * seq_len, documents.cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != total:
        raise ValueError(f"cu_seqlens runs from {ends[0]} to {ends[-1]}, must run from 0 to rows x seq_len = {total}")
    if min(lengths) < 0:
        at = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(f"cu_seqlens falls from {ends[at]} to {ends[at + 1]} at entry {at + 1}: it must never fall")
    if max(lengths) > documents.max_seq_len:
        raise ValueError(f"a document has {max(lengths)} tokens, more than max_seq_len={documents.max_seq_len}")
    missing = sorted(set(range(0, total + 1, seq_len)) - set(ends))
    if missing:
        raise ValueError(f"a document crosses the end of a row at token {missing[0]}: cut it there")
    return documents


def pack_documents(
    lengths: list[int], *, slots: int | None = None, max_seq_len: int | None = None, device: torch.device | str = "cpu"
) -> Documents:
    """`Documents` of consecutive documents with these lengths, padded to `slots` entries (default: just enough).

    Raises ValueError if there are more documents than `slots` - 1: dropping or merging some is the caller's choice.
    """
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    slots = len(ends) if slots is None else slots
    if len(ends) > slots:
        raise ValueError(f"{len(lengths)} documents do not fit cu_seqlens of {slots} entries: use at least {len(ends)}")
    ends += ends[-1:] * (slots - len(ends))
    longest = max(lengths, default=1) if max_seq_len is None else max_seq_len
    return Documents(torch.tensor(ends, dtype=torch.int32, device=device), max(1, longest))
