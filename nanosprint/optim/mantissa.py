"""bf16 weights with 16 more bits: an fp32 number as two halves (speedrun record #57).

    fp32 bits   31 | 30 .. 23 | 22 .. 16 || 15 .. 0
                sign exponent   fraction || rest of the fraction
                -------- high: bf16 ---- || -- low: int16 --

The model computes with the upper half, which is a bf16 number by itself. The optimizer keeps the lower half, joins the
two, updates in fp32 and splits again, so that steps far below a bf16 rounding step add up: fp32's precision for 4 bytes
a weight, none of which has to be cast before it is used.

The upper half is cut off, not rounded: it is nearer to zero than the master by up to one bf16 step (0.28 % on average).
Rounding could carry into the upper half, which the lower one could not undo. Where weights are overwritten (loaded,
reset) the lower half must be restored or set to zero with them: old low bits mean nothing beside new high ones.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nanosprint.optim.shell import state_dtype

LOW = torch.int16  # holds bits, not a number; torch knows few operations on uint16


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 numbers whose upper halves are `high` (bf16) and lower halves `low` (int16), all of one shape."""
    # int32 throughout: shifts of unsigned types do not exist on every device
    bits = (high.view(torch.int16).to(torch.int32) << 16) | (low.to(torch.int32) & 0xFFFF)
    return bits.view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(high bf16, low int16) of fp32 numbers, of the same shape: the inverse of `join`, bit for bit.

    Not for NaNs, whose payload may lie in the lower half alone: the upper half would read as infinity.
    """
    bits = master.view(torch.int32)
    high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return high, ((bits << 16) >> 16).to(LOW)  # sign-extended first, so that the conversion never overflows


def exact(tensor: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """A copy of a parameter as the optimizer with this state knows it: in fp32 or wider, lower halves included."""
    if "mantissa" in state:
        return join(tensor.detach(), state["mantissa"])
    return tensor.detach().to(state_dtype(tensor), copy=True)


def overwrite(tensor: Tensor, state: Mapping[str, Tensor], value: Tensor) -> None:
    """The inverse of `exact`, in place; what has no lower half is rounded."""
    if "mantissa" in state:
        for half, bits in zip((tensor, state["mantissa"]), split(value), strict=True):
            half.copy_(bits)
    else:
        tensor.copy_(value)
