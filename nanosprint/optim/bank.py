"""Banks: parameters that are updated together lie side by side in one flat storage.

A model knows its parameters one by one; communication and update rules want few large tensors. A bank gives both: each
parameter's `.data` and `.grad` become views of two flat tensors, so that the model, autograd and state dicts see
parameters as before, while one collective, one memset and one launch of a rule serve all of them.

    units      a bank counts in units of one shape: matrices (M, N) for Muon and SOAP, single numbers for Adam
    slots      where each parameter lies: a run of units; `blocks` matrices stored one above the other are as many units
    shards     the units cut into equal runs, one a process; the last ones are padded and may be empty

Padding is never a parameter's and never a rule's: it stays zero, and checkpoints do not know of it. With one shard
there is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN_BYTES = 128  # where parameters of a bank of numbers start: vector loads and compilers want 16 at least


@dataclass(frozen=True)
class Slot:
    """A parameter's place: `units` of them from number `start` on."""

    name: str
    parameter: Tensor
    start: int
    units: int

    @property
    def stop(self) -> int:
        return self.start + self.units


class Bank:
    """One flat storage, and one for gradients, of which the parameters become views, holding what they held.

    parameters: by name, in the order in which they are laid down. unit: the shape of what is never cut apart, () for
    numbers; each parameter must be a whole number of units. dtype: of storage and gradients. shards: how many equal
    runs to cut it into. Call it when the parameters are on their device; moving the model afterwards breaks the views.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], unit: tuple[int, ...], dtype: torch.dtype, shards: int
    ) -> None:
        self.unit, self.shards = unit, shards
        self.unit_size = torch.Size(unit).numel()
        apart = 1 if unit else max(1, _ALIGN_BYTES // dtype.itemsize)
        slots: list[Slot] = []
        for name, parameter in parameters.items():
            units, rest = divmod(parameter.numel(), self.unit_size)
            if rest or not units:
                raise ValueError(f"{name} of shape {tuple(parameter.shape)} is no whole number of units {unit}")
            start = _round_up(slots[-1].stop, apart) if slots else 0
            slots.append(Slot(name, parameter, start, units))
        self.slots = tuple(slots)
        self.count = slots[-1].stop  # units in use, the gaps between parameters included
        self.per_shard = self.count if shards == 1 else _round_up(-(-self.count // shards), apart)
        device = slots[0].parameter.device
        size = self.per_shard * shards * self.unit_size
        self.data = torch.zeros(size, dtype=dtype, device=device)
        self.grad = torch.zeros(size, dtype=dtype, device=device)
        self.grads = self.views(self.grad)
        for slot, view in zip(slots, self.views(self.data).values(), strict=True):
            view.copy_(slot.parameter.detach())
            slot.parameter.grad = None  # of another dtype, perhaps
            slot.parameter.data = view
            slot.parameter.grad = self.grads[slot.name]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a storage, in its shape, detached: autograd does not know whose part it is.

        Where it knows, the compiler models each gradient as a cut out of a storage of unknown size, which takes it
        half as long again for a whole model (torch 2.13).
        """
        pieces = {s.name: flat[s.start * self.unit_size : s.stop * self.unit_size] for s in self.slots}
        return {s.name: pieces[s.name].view(s.parameter.shape).detach() for s in self.slots}

    def shard(self, flat: Tensor, index: int) -> Tensor:
        """Shard `index` of a storage, padding included: what goes over the wire. 1-D."""
        size = self.per_shard * self.unit_size
        return flat[index * size : (index + 1) * size]

    def units_of(self, index: int) -> range:
        """The units in use of a shard; none where all of it is padding."""
        first = min(index * self.per_shard, self.count)
        return range(first, min(first + self.per_shard, self.count))

    def owned(self, flat: Tensor, index: int) -> Tensor:
        """The units in use of a shard of a storage, (units, *unit)."""
        units = self.units_of(index)
        return flat[units.start * self.unit_size : units.stop * self.unit_size].view(len(units), *self.unit)

    def split(self, whole: Tensor) -> dict[str, Tensor]:
        """From values of all units, (count or more, ...), to those of each parameter.

        Values of a unit's own shape take the parameter's, unless that is a scalar; others, such as statistics of a
        matrix' rows, stay (units, ...).
        """
        parts = {}
        for slot in self.slots:
            part, shape = whole[slot.start : slot.stop], slot.parameter.shape
            parts[slot.name] = part.reshape(shape) if part.shape[1:] == self.unit and shape else part
        return parts

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split`: (count, ...), zero in the gaps. Raises ValueError where a shape does not fit."""
        pieces: dict[Slot, Tensor] = {}
        for slot in self.slots:
            part = parts[slot.name]
            if part.shape == slot.parameter.shape and part.ndim:
                part = part.reshape(slot.units, *self.unit)
            if not part.ndim or len(part) != slot.units:
                raise ValueError(
                    f"{slot.name} has shape {tuple(slot.parameter.shape)}, but a value of shape {tuple(part.shape)} "
                    "was saved for it: the checkpoint is of another model"
                )
            pieces[slot] = part
        first = pieces[self.slots[0]]
        whole = first.new_zeros(self.count, *first.shape[1:])
        for slot, piece in pieces.items():
            whole[slot.start : slot.stop] = piece
        return whole


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
