"""Muon: momentum, then replace each update matrix by its nearest semi-orthogonal one.

    M <- mu M + (1 - mu) G          running mean of the gradient
    U  = mu M + (1 - mu) G          Nesterov: look one step ahead
    W <- (1 - lr wd) W - lr * s * orthogonalize(U)

A gradient matrix is dominated by a few directions. Setting all its singular values to 1 lets the rare directions
learn as fast, and bounds the step's spectral norm by lr * s. The rule is for matrices that map activations to
activations: hidden layers. Embeddings, output head, gains, biases and gates go to AdamW (`split_parameters` sorts a
model). `s` makes one lr fit all shapes: "spectral" sqrt(max(1, rows/cols)), lr about 0.02; "rms" sqrt(max(rows,
cols)), which gives entries of size 1, so lr is tiny, as for Adam.

What counts as one matrix matters: Q, K and V stored in one (3 D, D) tensor are three (`split=3` in their group).
Matrices of one shape are stacked and orthogonalised in one batch, which is what makes this cheap. A parameter may also
be such a stack from the start: (k, M, N) with `stacked=True` is k tensors of (M, N).
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nanosprint.kernels import has_triton
from nanosprint.ops.polar import orthogonalizer as find_orthogonalizer
from nanosprint.optim.dtensor import gather, layout, local, local_like, scatter
from nanosprint.optim.shell import Shell, as_dtype, check_unit, number, state_dtype, subtract_

Scale = Literal["spectral", "rms"]


def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float | Tensor = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    scale: Scale = "spectral",
    orthogonalizer: str = "ns5",
    dtype: torch.dtype = torch.bfloat16,
    split: int = 1,
    stacked: bool = False,
) -> None:
    """One Muon update of several tensors of the same shape, dtype and device.

    params, grads: (M, N), or (M, ...) taken as (M, product of the rest), of `split` blocks of M / split rows each;
    `stacked`: (k, M, ...), k such tensors.
    exp_avgs: the same shape, fp32 or wider, in which momentum and decay are computed; `dtype` is that of the
    orthogonalisation. params and exp_avgs are updated in place; grads are only read. lr and momentum may be 0-D
    tensors. DTensors, all spread alike, are gathered for the orthogonalisation. Extra memory: about 14 bytes an
    element of the batch in bf16. Source: Jordan et al. 2024; "rms" from the speedrun's records 3-7 and Liu et al. 2025,
    arXiv:2502.16982.
    """
    shape = params[0].shape
    averages = [local(m) for m in exp_avgs]
    wide = averages[0].dtype
    locals_ = [local_like(g, p) for g, p in zip(grads, params, strict=True)]
    stack = gather(_directions(averages, locals_, momentum, nesterov, dtype), params[0])
    rows, cols = matrix_shape(shape, split, stacked)
    stack = find_orthogonalizer(orthogonalizer)(stack.reshape(-1, rows, cols), dtype=dtype)
    updates = scatter(stack.view(len(params), *shape), params[0])
    keep = 1 - lr * weight_decay if weight_decay else 1.0
    _apply_([local(p) for p in params], updates, lr * scale_factor(scale, rows, cols), keep, wide)


def _directions(
    averages: list[Tensor], grads: list[Tensor], momentum: Any, nesterov: bool, dtype: torch.dtype
) -> Tensor:
    """(k, *shape) in `dtype`: what momentum makes of the gradients; averages are updated."""
    if _fusible([momentum], averages, grads):
        from nanosprint.kernels.muon import momentum_stack

        return momentum_stack(averages, grads, momentum, nesterov, dtype)
    return _stack(momentum_(averages, as_dtype(grads, averages[0].dtype), momentum, nesterov), dtype)


def _apply_(params: list[Tensor], updates: Tensor, step_size: Any, keep: Any, wide: torch.dtype) -> None:
    """params <- keep params - step_size updates, computed in `wide`; updates: (k, *shape)."""
    if wide == torch.float32 and _fusible([step_size, keep], params, [updates]):
        from nanosprint.kernels.muon import apply_stack

        apply_stack(params, updates, step_size, keep)
        return
    weights = as_dtype(params, wide)
    if isinstance(keep, Tensor) or keep != 1:
        torch._foreach_mul_(weights, keep)
    subtract_(weights, list(updates.to(wide).unbind(0)), step_size)
    if params[0].dtype != wide:
        torch._foreach_copy_(params, weights)


def _fusible(numbers: list[Any], *columns: list[Tensor]) -> bool:
    """Whether to take the one-pass Triton kernels: eagerly on a GPU (a compiler fuses the plain form by itself)."""
    if torch.compiler.is_compiling() or not columns[0][0].is_cuda or any(isinstance(n, Tensor) for n in numbers):
        return False
    if not has_triton():
        return False
    from nanosprint.kernels.muon import can_fuse

    return can_fuse(*columns)


def momentum_(averages: list[Tensor], grads: list[Tensor], momentum: Any, nesterov: bool = True) -> list[Tensor]:
    """Move the running means toward the gradients and return the update directions, before orthogonalisation.

    The textbook's mu M + G is this divided by 1 - mu, a factor that orthogonalisation removes; as a mean, the buffer
    keeps its scale when momentum changes from step to step. averages are updated in place (and are themselves
    returned without Nesterov).
    """
    if isinstance(momentum, Tensor):  # torch's lerp over lists wants numbers
        fresh = torch._foreach_mul(grads, 1 - momentum)
        torch._foreach_mul_(averages, momentum)
        torch._foreach_add_(averages, fresh)
        return list(torch._foreach_add(torch._foreach_mul(averages, momentum), fresh)) if nesterov else averages
    torch._foreach_lerp_(averages, grads, 1 - momentum)
    return list(torch._foreach_lerp(grads, averages, momentum)) if nesterov else averages


def matrix_shape(shape: Sequence[int], split: int = 1, stacked: bool = False) -> tuple[int, int]:
    """(rows, cols) of each of the `split` matrices that a tensor of this shape holds.

    More than two axes are flattened to (first, rest): a convolution (out, in, kh, kw) is out x (in kh kw). `stacked`
    sets the first axis aside: it counts tensors. Raises ValueError for fewer than two axes (three if stacked) and for
    a split that does not divide the rows.
    """
    if stacked:
        if len(shape) < 3:
            raise ValueError(f"a parameter of shape {tuple(shape)} is no stack (k, M, N): leave out stacked=True")
        shape = shape[1:]
    if len(shape) < 2:
        raise ValueError(
            f"a parameter of shape {tuple(shape)} is not a matrix: Muon orthogonalises the weight matrices of hidden "
            "layers; give gains, biases and scalars to AdamW (split_parameters sorts a model's parameters)"
        )
    rows, cols = shape[0], 1
    for size in shape[1:]:
        cols *= size
    if split < 1 or rows % split:
        raise ValueError(f"split={split} must be positive and divide the {rows} rows of shape {tuple(shape)}")
    return rows // split, cols


def scale_factor(scale: Scale, rows: int, cols: int) -> float:
    """What a semi-orthogonal (rows, cols) update is multiplied by, beside lr."""
    return max(rows, cols) ** 0.5 if scale == "rms" else max(1.0, rows / cols) ** 0.5


class Muon(Shell):
    """Orthogonalised Nesterov momentum for the matrices of hidden layers; see the module for the rule.

    params: tensors, named tensors or groups; every option may be set per group and changed between steps (schedules
    write "lr" and "momentum"). lr, momentum: floats or 0-D tensors. scale: "spectral" or "rms". orthogonalizer: a name
    in `nanosprint.ops.polar.ORTHOGONALIZERS`, "ns5" or "polar_express". orthogonalize_dtype: its working precision.
    split: the tensor stacks that many equal matrices by rows (merged QKV: 3), orthogonalised and scaled one by one.
    Tensors of more than two axes are flattened to (first, rest), unless stacked: (k, M, N) is k tensors of (M, N), each
    of `split` blocks, with the result of k parameters in the launches of one.

    State per parameter: exp_avg, fp32 at least whatever the parameter's dtype. Parameters without gradient are left
    alone. Needs no process group; under DDP every process does the same; FSDP2 and other DTensor parameters sharded
    along any axes are gathered shape by shape and give the single-process result. Raises ValueError for parameters
    with fewer than two axes, splits that do not divide, and options out of range. Source: see `muon_`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        momentum: float | Tensor = 0.95,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: Scale = "spectral",
        orthogonalizer: str = "ns5",
        orthogonalize_dtype: torch.dtype = torch.bfloat16,
        split: int = 1,
        stacked: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "scale": scale,
            "orthogonalizer": orthogonalizer, "orthogonalize_dtype": orthogonalize_dtype, "split": split,
            "stacked": stacked,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_unit("momentum", group["momentum"])
        if group["scale"] not in get_args(Scale):
            raise ValueError(f"scale={group['scale']!r} is unknown: choose one of {', '.join(get_args(Scale))}")
        find_orthogonalizer(group["orthogonalizer"])
        dtype = group["orthogonalize_dtype"]
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"orthogonalize_dtype={dtype!r} must be a float dtype such as torch.bfloat16")
        for param in group["params"]:
            matrix_shape(param.shape, group["split"], group["stacked"])

    def _init_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["exp_avg"] = torch.zeros_like(param, dtype=state_dtype(param))

    def _update(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        self._init_group(group, params, grads, exp_avgs)
        batches: dict[Any, list[int]] = {}
        for i, param in enumerate(params):
            key = (tuple(param.shape), param.dtype, param.device, layout(param))
            batches.setdefault(key, []).append(i)
        for rows in batches.values():
            muon_(
                [params[i] for i in rows],
                [grads[i] for i in rows],
                [exp_avgs[i] for i in rows],
                lr=number(group["lr"]),
                momentum=number(group["momentum"]),
                nesterov=group["nesterov"],
                weight_decay=group["weight_decay"],
                scale=group["scale"],
                orthogonalizer=group["orthogonalizer"],
                dtype=group["orthogonalize_dtype"],
                split=group["split"],
                stacked=group["stacked"],
            )

    def _init_group(self, group: dict[str, Any], *columns: list[Tensor]) -> None:
        """Append this group's tensors to the lists. The name is one that torch.compile runs outside its graph."""
        for param in self._active(group):
            row = (param, param.grad, self.state[param]["exp_avg"])
            for column, tensor in zip(columns, row, strict=True):
                column.append(tensor)


def _stack(directions: list[Tensor], dtype: torch.dtype) -> Tensor:
    """(k, *shape) in `dtype` from k tensors, each read once."""
    first = directions[0]
    stack = torch.empty((len(directions), *first.shape), dtype=dtype, device=first.device)
    torch._foreach_copy_(list(stack.unbind(0)), directions)
    return stack
