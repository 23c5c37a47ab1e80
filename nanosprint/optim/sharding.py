"""Who updates what, and how gradients get there and weights get back.

    shard         reduce-scatter: the owner of a shard gets its gradient's sum · it updates · all-gather to everybody
    shard_sparse  the same, but of the gradient only the rows that are not zero are sent, each to its owner
    replicate     all-reduce: everybody gets the sum · everybody does the same update · nothing to send back

All work in place on a bank's flat storages and are launched without waiting. Sharding spares state and arithmetic, and
for expensive rules time; replicating spares the second message, which is what small tensors are about.

The order of messages must be the same on all processes, or they wait for each other for ever. So it follows the order
of the recipe's groups and never depends on data: `LaunchOrder` lets a reduction start during the backward pass, as soon
as its gradients are complete, but only behind all those before it; a gradient that does not arrive counts as zero. Rows
are the exception: how many there are the host must know, so they leave when they are waited for, which is in the order
of updates.

Gloo, the back end on CPUs, does all of this too, in place and for every dtype used here. One process sends nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanosprint.optim.bank import Bank

SPARSE_BELOW = 0.5  # of the rows in a dense message, sent or received by any process: above, sending all is as fast

# torch 2.13 renamed both; the old names warn there and are the only ones before.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def place() -> tuple[int, int]:
    """(rank, number of processes); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def reduce_bank(bank: Bank) -> Any:
    """Launch the sum of the gradients over all processes, in place; returns a handle with `wait`, or None.

    Afterwards a process's own shard of `bank.grad` holds the sum. The rest is whatever was left there.
    """
    rank, size = place()
    if size == 1:
        return None
    if bank.shards == 1:
        return dist.all_reduce(bank.grad, async_op=True)
    return reduce_scatter(bank.shard(bank.grad, rank), bank.grad, async_op=True)


def reduce_rows(bank: Bank) -> Any:
    """`reduce_bank` for a gradient most of whose rows are zero: a process sends the others to their owners.

    For tables of which a step looks up a part. Rows are the bank's units, and are found in the gradient itself, by a
    pass over it. The host must know how many there are, and waits for that only in the handle's `wait`: by then the
    device has other parts' updates to do. All processes learn all numbers, so that they agree on when sending
    everything is as fast. Source: the speedrun's record #68 and #71.
    """
    rank, size = place()
    if size == 1 or bank.shards == 1:
        return reduce_bank(bank)
    found = bank.grad.view(size * bank.per_shard, bank.unit_size).any(dim=1).view(size, bank.per_shard)
    found[rank] = False  # they are where they belong; of the others also NaN is found, which is not zero
    return _Rows(bank, _places_of(found.flatten()), _on_its_way(found.sum(dim=1)))


def _busiest(counts: list[list[int]]) -> int:
    """The most rows that a process sends or receives; counts[i][j] go from i to j."""
    return max(sum(line) for line in (*counts, *zip(*counts, strict=True)))


class _Rows:
    """Rows that have been found; `wait` sends them, and adds those that arrive to a process's own."""

    def __init__(self, bank: Bank, rows: Tensor, counts: Callable[[], list[int]]) -> None:
        """rows: where they lie, in front of a longer tensor. counts: waits for how many go to each process."""
        self._bank, self._rows, self._counts = bank, rows, counts

    def wait(self) -> None:
        """On a GPU the host waits until the gradient is complete, and its stream for the rows."""
        (rank, size), bank = place(), self._bank
        counts = _tell_all(self._counts())
        if _busiest(counts) > SPARSE_BELOW * (size - 1) * bank.per_shard:
            reduce_bank(bank).wait()
            return
        grad = bank.grad.view(size * bank.per_shard, bank.unit_size)
        rows, arriving = self._rows[: sum(counts[rank])], [to[rank] for to in counts]
        places = torch.empty(sum(arriving), dtype=torch.int32, device=grad.device)
        values = grad.new_empty(sum(arriving), bank.unit_size)
        sent = (rows % bank.per_shard).int(), grad[rows]  # which must live until it has arrived
        pairs = zip((places, values), sent, strict=True)
        for handle in [dist.all_to_all_single(to, of, arriving, counts[rank], async_op=True) for to, of in pairs]:
            handle.wait()
        own = grad[rank * bank.per_shard : (rank + 1) * bank.per_shard]
        # One sender after the other, none of which names a row twice: so the order of additions is fixed, which in bf16
        # decides the last bits.
        for there, arrived in zip(places.split(arriving), values.split(arriving), strict=True):
            own.index_add_(0, there, arrived)


def _places_of(mask: Tensor) -> Tensor:
    """Where a 1-D mask is true, in order, in front of a tensor one longer than it.

    `nonzero` would make the host wait for how many there are.
    """
    count = len(mask)
    order = torch.where(mask, mask.cumsum(0) - 1, count)  # all that is false goes to the last place
    places = torch.arange(count, device=mask.device)
    return places.new_zeros(count + 1).scatter_(0, order, places)


def _on_its_way(numbers: Tensor) -> Callable[[], list[int]]:
    """What waits for a copy of `numbers` to the host, which starts now, and for no work that is launched later."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> list[int]:
        arrived.synchronize()
        return copy.tolist()

    return wait


def gather_bank(bank: Bank) -> Any:
    """Launch the exchange of updated shards, in place; returns a handle with `wait`, or None where all have all."""
    if bank.shards == 1:
        return None
    return all_gather(bank.data, bank.shard(bank.data, place()[0]), async_op=True)


def gather_units(bank: Bank, own: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """From values of a process's own units, (units, *shape), to those of all, (count, *shape), on every process.

    own lies beside the bank's storage, in any `dtype`; None where a process owns no units. Every process must call it.
    """
    if bank.shards == 1:
        assert own is not None
        return own
    mine = torch.zeros(bank.per_shard, *shape, dtype=dtype, device=bank.data.device)
    if own is not None:
        mine[: len(own)] = own
    whole = torch.empty(bank.per_shard * bank.shards, *shape, dtype=dtype, device=bank.data.device)
    all_gather(_bytes(whole), _bytes(mine))  # as bytes, since back ends do not know every dtype
    return whole[: bank.count]


def from_first(value: Any) -> Any:
    """The first process's `value`, on every process."""
    if place()[1] == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: Any) -> list[Any]:
    """Every process's `value`, in the order of ranks, on every process. Every process must call it."""
    values = [value] * place()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def gather_sparse(gradient: Tensor | None, table: Tensor) -> Tensor:
    """All processes' look-ups of a table, one behind the other in the order of ranks; uncoalesced.

    gradient: sparse with one sparse axis, or None for no look-up. Processes may have made different numbers of them:
    the numbers are exchanged first, and the shorter ones padded with zeros for the way.
    """
    width = table.shape[1:]
    if gradient is None:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=table.device)
        values = torch.zeros(0, *width, dtype=table.dtype, device=table.device)
    else:
        indices, values = gradient._indices(), gradient._values()
    if place()[1] > 1:
        lengths = [count for (count,) in _tell_all([values.size(0)])]
        indices = _gather_uneven(indices.mT, lengths).mT
        values = _gather_uneven(values, lengths)
    return torch.sparse_coo_tensor(indices, values, table.shape, check_invariants=False)


def _tell_all(numbers: Sequence[int]) -> list[list[int]]:
    """Every process's numbers, as many each, in the order of ranks; between CPUs, without a wait for the device."""
    mine = torch.tensor(numbers)
    everyone = [torch.zeros_like(mine) for _ in range(place()[1])]
    dist.all_gather(everyone, mine)
    return [told.tolist() for told in everyone]


def _gather_uneven(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    longest = max(lengths)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    everything = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everything, padded)
    return torch.cat([part[:n] for part, n in zip(everything, lengths, strict=True)])


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum, in place, on every process."""
    if place()[1] > 1:
        dist.all_reduce(tensor)
    return tensor


class LaunchOrder:
    """Starts launches one after another, each when what it waits for has arrived and all before it have started."""

    def __init__(self) -> None:
        self._queue: list[tuple[set[int], Callable[[], None]]] = []
        self._waiting: dict[int, list[set[int]]] = {}  # by parameter, the sets of the queue that hold it
        self._next = 0

    def arm(self, launches: Iterable[tuple[Iterable[Tensor], Callable[[], None]]]) -> None:
        """Set up the coming backward pass: parameters to wait for and what to launch then, in order."""
        self._queue = [({id(p) for p in parameters}, launch) for parameters, launch in launches]
        self._waiting, self._next = {}, 0
        for waiting, _ in self._queue:
            for key in waiting:
                self._waiting.setdefault(key, []).append(waiting)

    def arrived(self, parameter: Tensor) -> None:
        """This parameter's gradient is complete."""
        for waiting in self._waiting.get(id(parameter), ()):
            waiting.discard(id(parameter))
        while self._next < len(self._queue) and not self._queue[self._next][0]:
            self._launch()

    def finish(self) -> None:
        """The backward pass is over: launch the rest, in order, whatever has not arrived."""
        while self._next < len(self._queue):
            self._launch()
        self._waiting.clear()

    def _launch(self) -> None:
        launch = self._queue[self._next][1]
        self._next += 1
        launch()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
