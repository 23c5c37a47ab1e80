"""AdamW as one pass over memory for what torch's fused kernel does not take: bf16 parameters with fp32 averages, and
decay that looks at the step first. 22 bytes an element with bf16 parameters and gradients.

`adam_step` takes a launch a tensor: meant for the few large shards of a bank or a table. `adam_steps` takes one for all
tensors of a kind, each with numbers of its own: for the many small ones, gates and scalars of groups with other rates.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanosprint.kernels.host import sent
from nanosprint.kernels.parts import FLOATS, ceil_div, upload

_BLOCK = 2048  # elements of a program, as in `kernels.muon`; not measured yet
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**31 - 2**16  # elements of a tensor: offsets are 32 bits wide


@triton.jit
def _move(
    weights, grads, exp_avgs, exp_avg_sqs, size, fresh1, beta2, fresh2, root_scale, eps, step_size, decay,
    CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's block of a tensor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
    average = tl.load(exp_avgs + at, mask=inside, other=0.0)
    average += fresh1 * (grad - average)
    square = beta2 * tl.load(exp_avg_sqs + at, mask=inside, other=0.0) + fresh2 * grad * grad
    tl.store(exp_avgs + at, average, mask=inside)
    tl.store(exp_avg_sqs + at, square, mask=inside)
    update = step_size * average / (tl.sqrt(square) * root_scale + eps)
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    shrink = decay * weight
    if CAUTIOUS:
        shrink = tl.where(update * weight > 0.0, shrink, 0.0)
    tl.store(weights + at, (weight - shrink - update).to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _adam_kernel(
    weights, grads, exp_avgs, exp_avg_sqs, size, fresh1, beta2, fresh2, root_scale, eps, step_size, decay,
    CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _move(
        weights, grads, exp_avgs, exp_avg_sqs, size, fresh1, beta2, fresh2, root_scale, eps, step_size, decay,
        CAUTIOUS, BLOCK,
    )  # fmt: skip


@triton.jit
def _adam_all_kernel(
    table, numbers, WEIGHT: tl.constexpr, GRAD: tl.constexpr, CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (block, i) works on tensor i: the i-th five of the table, addresses and size, and seven numbers."""
    table += tl.program_id(1) * 5
    numbers += tl.program_id(1) * 7
    _move(
        tl.load(table).to(tl.pointer_type(WEIGHT)), tl.load(table + 1).to(tl.pointer_type(GRAD)),
        tl.load(table + 2).to(tl.pointer_type(tl.float32)), tl.load(table + 3).to(tl.pointer_type(tl.float32)),
        tl.load(table + 4).to(tl.int32),
        tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4),
        tl.load(numbers + 5), tl.load(numbers + 6), CAUTIOUS, BLOCK,
    )  # fmt: skip


class Numbers(NamedTuple):
    """Of one update: w <- w - decay w - step_size m / (root_scale sqrt(v) + eps).

    cautious: decay only where step * weight > 0.
    """

    betas: tuple[float, float]
    root_scale: float
    eps: float
    step_size: float
    decay: float
    cautious: bool

    def scalars(self) -> tuple[float, ...]:
        """As the kernels take them. 1 - beta comes from the host: in fp32, 1 - 0.999 would lose four digits."""
        beta1, beta2 = self.betas
        return (1 - beta1, beta2, 1 - beta2, self.root_scale, self.eps, self.step_size, self.decay)


Row = tuple[Tensor, Tensor, Tensor, Tensor]  # parameter, gradient, m and v


def adam_step(rows: Sequence[Row], numbers: Numbers) -> None:
    """m and v as in `optim.adam`, then the update that `numbers` describes, in fp32; all with the same numbers.

    Parameters and gradients fp32, bf16 or fp16, averages fp32, all as `can_fuse` wants them; all but gradients change
    in place and are rounded once.
    """
    scalars = [float(x) for x in numbers.scalars()]
    for row in rows:
        size = row[0].numel()
        if size:
            with torch.cuda.device_of(row[0]):
                _adam_kernel[(ceil_div(size, _BLOCK),)](
                    *row, size, *scalars, CAUTIOUS=numbers.cautious, BLOCK=_BLOCK, num_warps=8
                )
    torch.autograd.graph.increment_version([row[0] for row in rows])  # autograd did not see the change


def adam_steps(jobs: Sequence[tuple[Row, Numbers]]) -> None:
    """`adam_step` for tensors with numbers of their own, in one launch for all that agree in dtypes and `cautious`."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[Row, Numbers]]] = {}
    for row, numbers in jobs:
        kinds.setdefault((row[0].dtype, row[1].dtype, numbers.cautious), []).append((row, numbers))
    for (weight, grad, cautious), alike in kinds.items():
        first = alike[0][0][0]
        blocks = ceil_div(max(row[0].numel() for row, _ in alike), _BLOCK)
        addresses = chain.from_iterable((*(t.data_ptr() for t in row), row[0].numel()) for row, _ in alike)
        scalars = [numbers.scalars() for _, numbers in alike]
        if blocks:
            with torch.cuda.device_of(first):
                _adam_all_kernel[(blocks, len(alike))](
                    upload(tuple(addresses), first.device), sent(scalars, torch.float32, first.device),
                    WEIGHT=FLOATS[weight], GRAD=FLOATS[grad], CAUTIOUS=cautious, BLOCK=_BLOCK, num_warps=8,
                )  # fmt: skip
    torch.autograd.graph.increment_version([row[0] for row, _ in jobs])


def can_fuse(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor]
) -> bool:
    """Whether `adam_step` takes these: contiguous, fp32 averages, parameters and gradients no wider."""
    columns = (params, grads, exp_avgs, exp_avg_sqs)
    return (
        all(t.is_contiguous() and t.numel() <= _MOST for column in columns for t in column)
        and all(t.dtype in _NARROW for t in (*params, *grads))
        and all(t.dtype == torch.float32 for t in (*exp_avgs, *exp_avg_sqs))
    )
