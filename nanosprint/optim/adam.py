"""AdamW: each weight moves by its gradient's running mean over the root of its running mean square.

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    w <- (1 - lr wd) w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

The factors 1 - b^t undo the start of both averages at zero; t counts this parameter's updates. Decay is decoupled:
it shrinks the weight and never enters m or v. The step of a weight is about lr, whatever the gradient's size, which
is why embeddings, gains, biases and heads, whose gradients differ by orders of magnitude, go here.

`eps_form` says what eps is added to. "corrected" is the line above, as in torch.optim.AdamW; "uncorrected" adds eps
to sqrt(v) itself with the step size lr sqrt(1 - b2^t) / (1 - b1^t), as the speedrun and SOAP do. They are the same
but for the size of eps early on: uncorrected eps equals a corrected eps / sqrt(1 - b2^t).

`decay="cautious"` shrinks only weights that the step itself moves toward zero, by lr^2 wd instead of lr wd. A weight
with a step of exactly zero is left alone. `lr_scale` multiplies lr everywhere, so that cautious decay has its square.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from nanosprint.kernels import has_triton
from nanosprint.optim.dtensor import local, local_like
from nanosprint.optim.shell import Decay, Shell, as_dtype, check_unit, number, shrink_, state_dtype

if TYPE_CHECKING:
    from nanosprint.kernels.adam import Numbers

EpsForm = Literal["corrected", "uncorrected"]
Implementation = Literal["auto", "foreach", "fused"]


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: float | Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    eps_form: EpsForm = "corrected",
    decay: Decay = "plain",
) -> None:
    """One AdamW update of several tensors at once, all at their update number `step` (from 1).

    params, grads: any float dtype, any shapes, pairwise equal. exp_avgs (m), exp_avg_sqs (v): the same shapes in one
    dtype, fp32 or wider, in which all arithmetic is done; narrower parameters are rounded once at the end. params and
    both averages are updated in place; grads are only read. step and lr may be 0-D tensors. Source: Kingma & Ba 2014,
    arXiv:1412.6980; Loshchilov & Hutter 2017, arXiv:1711.05101; cautious decay Chen et al. 2025, arXiv:2510.12402.
    """
    beta1, beta2 = betas
    wide = exp_avgs[0].dtype
    weights, grads = as_dtype(params, wide), as_dtype(grads, wide)
    exp_avgs, exp_avg_sqs = list(exp_avgs), list(exp_avg_sqs)
    if isinstance(step, Tensor):
        step = step.double()  # 1 - 0.999 ** 1 would lose four digits in fp32
    root_correction2 = (1 - beta2**step) ** 0.5
    shown_eps = eps / root_correction2 if eps_form == "uncorrected" else eps

    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    updates = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(updates, root_correction2)
    torch._foreach_add_(updates, shown_eps)
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, exp_avgs)
    torch._foreach_mul_(updates, lr / (1 - beta1**step))
    if weight_decay and decay == "cautious":
        shrink_(weights, list(updates), lr * lr * weight_decay, strict=True)
    elif weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_sub_(weights, updates)
    _write_back(params, weights)


def adamw_fused_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    eps_form: EpsForm = "corrected",
    decay: Decay = "plain",
) -> None:
    """`adamw_` as one pass over memory by torch's own kernel (CPU or CUDA): all fp32, or all fp64, and plain decay."""
    assert decay == "plain"
    if eps_form == "uncorrected":
        eps = eps / (1 - betas[1] ** step) ** 0.5
    count = torch.full((), float(step), device=params[0].device)
    torch._fused_adamw_(
        list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), [], [count] * len(params),
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def adamw_triton_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    eps_form: EpsForm = "corrected",
    decay: Decay = "plain",
) -> None:
    """`adamw_` as one pass over memory on a GPU: fp32 averages, tensors as `kernels.adam.can_fuse` wants them."""
    from nanosprint.kernels.adam import adam_step

    rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True))
    adam_step(rows, _numbers(step, lr, betas, eps, weight_decay, eps_form, decay))


def _numbers(
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    eps_form: EpsForm,
    decay: Decay,
) -> "Numbers":
    """The options of `adamw_` as its kernels take them."""
    from nanosprint.kernels.adam import Numbers

    beta1, beta2 = betas
    root_correction2 = (1 - beta2**step) ** 0.5
    return Numbers(
        betas=betas,
        root_scale=1 / root_correction2,
        eps=eps / root_correction2 if eps_form == "uncorrected" else eps,
        step_size=lr / (1 - beta1**step),
        decay=lr * lr * weight_decay if decay == "cautious" else lr * weight_decay,
        cautious=decay == "cautious",
    )


def step_together(optimizers: "Sequence[AdamW]") -> None:
    """`step` of several optimizers, by the same arithmetic; what Triton's kernel updates shares its launches.

    Small ones take the GPU less time than the host.
    """
    jobs: list[Any] = []
    with torch.no_grad():
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for rule, batch, options in optimizer.prepared(group):
                    if rule is adamw_triton_:
                        jobs += [(row, _numbers(**options)) for row in zip(*batch, strict=True)]
                    else:
                        rule(*batch, **options)
        if jobs:
            from nanosprint.kernels.adam import adam_steps

            adam_steps(jobs)


class AdamW(Shell):
    """Adam with decoupled weight decay, for any parameters; defaults give the numbers of `torch.optim.AdamW`.

    params: tensors, named tensors or groups, as for any torch optimizer; a group may set any option of its own, and
    each may change between steps. lr: a float or a 0-D tensor. eps_form, decay ("plain", "cautious"), lr_scale: see the
    module. implementation: "foreach" (torch._foreach kernels), "fused" (one kernel: torch's for fp32 or fp64 parameters
    with plain decay, otherwise Triton's, on a GPU), or "auto", fused wherever it can be.
    State per parameter, in `state_dict` under torch's names: step (CPU), exp_avg and exp_avg_sq, fp32 at least
    whatever the parameter's dtype. A parameter whose gradient is None is left alone, and its step does not advance.
    DTensor parameters are updated shard by shard, without communication. Raises ValueError for options out of range
    and for sparse gradients. Source: see `adamw_`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        eps_form: EpsForm = "corrected",
        decay: Decay = "plain",
        lr_scale: float = 1.0,
        implementation: Implementation = "auto",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "eps_form": eps_form, "decay": decay, "lr_scale": lr_scale, "implementation": implementation,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_adam(group)
        for option, choices in (("eps_form", EpsForm), ("implementation", Implementation)):
            if group[option] not in get_args(choices):
                raise ValueError(f"{option}={group[option]!r} is unknown: choose one of {', '.join(get_args(choices))}")

    def _init_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        init_adam_state(param, state)

    def _update(self, group: dict[str, Any]) -> None:
        for rule, batch, options in self.prepared(group):
            rule(*batch, **options)

    def prepared(self, group: dict[str, Any]) -> list[tuple[Callable[..., None], list[list[Tensor]], dict[str, Any]]]:
        """A group's next step: functions to call with lists of tensors and options. Counters are advanced already."""
        columns: tuple[list[Tensor], ...] = ([], [], [], [], [])
        self._init_group(group, *columns)
        params, grads, exp_avgs, exp_avg_sqs, steps = columns
        if not params:
            return []
        torch._foreach_add_(steps, 1)
        options = {
            "lr": number(group["lr"]) * group["lr_scale"], "betas": group["betas"], "eps": group["eps"],
            "weight_decay": group["weight_decay"], "eps_form": group["eps_form"],
            "decay": group["decay"],
        }  # fmt: skip
        columns = (params, grads, exp_avgs, exp_avg_sqs)
        if torch.compiler.is_compiling():  # steps cannot be read while tracing; the compiler batches on its own
            return [
                (adamw_, [[column[i]] for column in columns], {"step": step, **options}) for i, step in enumerate(steps)
            ]
        prepared = []
        for (step, *_), rows in _batches(params, grads, steps).items():
            batch = [[local(column[i]) for i in rows] for column in columns]
            batch[1] = [local_like(grads[i], params[i]) for i in rows]
            prepared.append((_rule(group, batch, options["lr"]), batch, {"step": step, **options}))
        return prepared

    def _init_group(self, group: dict[str, Any], *columns: list[Tensor]) -> None:
        """Append this group's tensors to the lists. The name is one that torch.compile runs outside its graph."""
        for param in self._active(group):
            state = self.state[param]
            row = (param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for column, tensor in zip(columns, row, strict=True):
                column.append(tensor)


def check_adam(group: dict[str, Any]) -> None:
    """Raise ValueError for betas or eps out of range."""
    for i, beta in enumerate(group["betas"]):
        check_unit(f"betas[{i}]", beta)
    if not group["eps"] >= 0:
        raise ValueError(f"eps={group['eps']} must not be negative (1e-8 is usual)")


def init_adam_state(param: Tensor, state: dict[str, Any]) -> None:
    """Counter and both averages at zero, under the names that torch's AdamW uses."""
    state["step"] = torch.zeros((), dtype=torch.float32)
    state["exp_avg"] = torch.zeros_like(param, dtype=state_dtype(param))
    state["exp_avg_sq"] = torch.zeros_like(param, dtype=state_dtype(param))


def _batches(params: list[Tensor], grads: list[Tensor], steps: list[Tensor]) -> dict[tuple[Any, ...], list[int]]:
    """Indices of the tensors that one call can update: same step, device and dtypes."""
    batches: dict[tuple[Any, ...], list[int]] = {}
    for i, (param, grad, step) in enumerate(zip(params, grads, steps, strict=True)):
        batches.setdefault((int(step), param.device, param.dtype, grad.dtype), []).append(i)
    return batches


def _rule(group: dict[str, Any], batch: list[list[Tensor]], lr: Any) -> Callable[..., None]:
    """The fastest form that can take this batch, or the one asked for; ValueError if that cannot."""
    choice, param = group["implementation"], batch[0][0]
    if choice == "foreach":
        return adamw_
    if not isinstance(lr, Tensor):
        same_dtypes = len({tensors[0].dtype for tensors in batch}) == 1
        if group["decay"] == "plain" and same_dtypes and param.device.type in ("cpu", "cuda"):
            return adamw_fused_
        if _takes_triton(batch):
            return adamw_triton_
    if choice == "fused":
        raise ValueError(
            "implementation='fused' needs fp32 or fp64 parameters and gradients on cpu or cuda, plain decay and lr as "
            f"a float or a CPU tensor (or Triton on cuda), got {param.dtype} and {batch[1][0].dtype} on "
            f"{param.device} and decay={group['decay']!r}: use 'auto'"
        )
    return adamw_


def _takes_triton(batch: list[list[Tensor]]) -> bool:
    if not (batch[0][0].is_cuda and has_triton()):
        return False
    from nanosprint.kernels.adam import can_fuse

    return can_fuse(*batch)


def _write_back(params: Sequence[Tensor], weights: list[Tensor]) -> None:
    """Round the updated weights into narrower parameters; same-dtype ones were updated in place."""
    if params[0].dtype != weights[0].dtype:
        torch._foreach_copy_(list(params), weights)
