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

Options on top of that, all off by default:

- `equalize="rows"` gives the rows of U the same length before the orthogonalisation (MuonEq-R): outputs with small
  gradients then count as much as the others for the directions that come out.
- `variance_beta` evens the update out (NorMuon): singular values of 1 do not make rows equally long, so each row (of a
  wide matrix: each column) is divided by the root of its running mean square, and the matrix gets its norm back.
- `decay="cautious"` shrinks only weights that the step already moves toward zero, and by lr^2 rather than lr.
- `mantissa` keeps the lower halves of bf16 parameters: see `optim.mantissa`.
- `mixture` puts several momenta in place of the one (`optim.mixture`), `basis` whitens the direction before anything
  else is made of it (`optim.basis`), and `radius` steers the norms of the weights at the end (`optim.radius`): three
  experiments, each in a module of its own.

Shape decides more than speed: s, what is equalised and which axis is evened out follow from rows and columns *as
stored*. A projection stored transposed has another rate. And a matrix of one row has columns of one entry, each of
which would become +-1: gates do not belong here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nanosprint.config.groups import GradientBasis, MomentumMixture, RadiusControl
from nanosprint.kernels import has_triton
from nanosprint.ops.polar import Orthogonalizer, orthogonalize_stacks
from nanosprint.ops.polar import orthogonalizer as find_orthogonalizer
from nanosprint.ops.recorded import can_record, recorded
from nanosprint.optim.basis import SQUARE, State, init_basis, whiten_
from nanosprint.optim.dtensor import gather, is_sharded, layout, local, local_like, scatter
from nanosprint.optim.mantissa import LOW, join
from nanosprint.optim.mantissa import split as split_master
from nanosprint.optim.mixture import mix_all_
from nanosprint.optim.radius import Steering, steered
from nanosprint.optim.shell import Decay, Shell, as_dtype, check_unit, number, shrink_, state_dtype, subtract_

Scale = Literal["spectral", "rms"]
Equalize = Literal["none", "rows"]
FLOOR = 1e-10  # of second moments and norms
TINY = 1e-30  # of mean squares of gradients, which may be small: a row below 1e-15 stays short


class Unfinished(NamedTuple):
    """A call of `muon_` that waits for the orthogonalisation of `whole` (B, M, N) by `function`; `end` takes it."""

    function: Orthogonalizer
    dtype: torch.dtype
    whole: Tensor
    end: Callable[[Tensor], None]


def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    second_moments: Sequence[Tensor] | None = None,
    mantissas: Sequence[Tensor] | None = None,
    *,
    lr: float | Tensor,
    momentum: float | Tensor = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    scale: Scale = "spectral",
    orthogonalizer: str = "ns5",
    equalize: Equalize = "none",
    dtype: torch.dtype = torch.bfloat16,
    split: int = 1,
    stacked: bool = False,
    variance_beta: float | None = None,
    decay: Decay = "plain",
    lr_scale: float = 1.0,
    cuda_graph: bool = False,
    mixture: MomentumMixture | None = None,
    age: float | None = None,
    basis: GradientBasis | None = None,
    bases: Sequence[State] | None = None,
    radius: RadiusControl | None = None,
    later: list[Unfinished] | None = None,
) -> None:
    """One Muon update of several tensors of the same shape, dtype and device.

    params, grads: (M, N), or (M, ...) taken as (M, product of the rest), of `split` blocks of M / split rows each;
    `stacked`: (k, M, ...), k such tensors. exp_avgs: the same shape, fp32 or wider, in which momentum and decay are
    computed; `dtype` is that of the orthogonalisation. second_moments: of `variance_shape`, same dtype as exp_avgs, if
    variance_beta is given. mantissas: int16 of the params' shape, if these are the upper halves of fp32 numbers.
    All but grads are updated in place. lr and momentum may be 0-D tensors. DTensors, all spread alike, are gathered for
    the orthogonalisation. Extra memory: about 14 bytes an element of the batch in bf16.

    mixture, of the mean age `age` (None: its `start`), gives exp_avgs one axis more, of the mixture's means, after that
    of tensors (without `stacked`: in front). bases: what `init_basis` made for each parameter, if basis is given.

    later: leaves the orthogonalisation and all that follows to `finish`, which does those of several calls at once.

    The rate is lr * lr_scale. Cautious decay takes rate * s * weight_decay * lr off: lr_scale counts once.

    Source: Jordan et al. 2024; "rms" from the speedrun's records 3-7 and Liu et al. 2025, arXiv:2502.16982; variance
    from Li et al. 2025, arXiv:2510.05491 (without bias correction, which the norm cancels); cautious decay from Chen
    et al. 2025, arXiv:2510.12402; equal rows from MuonEq (reports: qlabs-eng/slowrun 71 and 75).
    """
    rows, cols = matrix_shape(params[0].shape, split, stacked)
    averages = [local(m) for m in exp_avgs]
    function = find_orthogonalizer(orthogonalizer)
    shape = local(params[0]).shape
    if cuda_graph and can_record(averages[0]) and not is_sharded(params[0]):
        matrices = len(params) * variance_shape(params[0].shape, split, stacked)[0]
        graph = recorded(function, (matrices, rows, cols), dtype, averages[0].device)
        stack = graph.input.view(len(params), *shape)
    else:
        graph = None
        stack = torch.empty((len(params), *shape), dtype=dtype, device=averages[0].device)
    locals_ = [local_like(g, p) for g, p in zip(grads, params, strict=True)]
    whole_rows = not is_sharded(params[0])  # a shard may have cut them
    equal_cols = cols if equalize == "rows" and whole_rows else None
    if mixture is None and basis is None:
        _directions(averages, locals_, momentum, nesterov, stack, equal_cols)
    else:
        if mixture is None:
            directions = momentum_(averages, as_dtype(locals_, averages[0].dtype), momentum, nesterov)
        else:
            directions = mix_all_(averages, locals_, mixture, age, stacked)
        if basis is not None:
            assert bases is not None
            directions = whiten_(directions, locals_, bases, basis, (rows, cols), tf32=dtype.itemsize == 2)
        _fill_(stack, directions, equal_cols)
    rate = lr * lr_scale
    step_size = rate * scale_factor(scale, rows, cols)
    end = partial(
        _end,
        params,
        exp_avgs,
        second_moments,
        mantissas,
        variance_beta=variance_beta,
        step_size=step_size,
        shrink=(step_size * lr if decay == "cautious" else rate) * weight_decay,
        cautious=decay == "cautious",
        radius=None if radius is None else (radius, rate, scale_factor(scale, rows, cols)),
    )
    if graph:
        end(graph())
        return
    whole = gather(stack, params[0]).reshape(-1, rows, cols)
    whole = whole if equalize == "none" or whole_rows else equal_rows(whole)
    if later is None:
        end(function(whole, dtype=dtype))
    else:
        later.append(Unfinished(function, dtype, whole, end))


def finish(updates: Sequence[Unfinished]) -> None:
    """Orthogonalise what calls of `muon_` have left for later, in common launches where possible, and apply it."""
    kinds: dict[Any, list[Unfinished]] = {}
    for update in updates:
        kinds.setdefault((update.function, update.dtype), []).append(update)
    for (function, dtype), alike in kinds.items():
        results = orthogonalize_stacks(function, [update.whole for update in alike], dtype)
        for update, result in zip(alike, results, strict=True):
            update.end(result)


def _end(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    second_moments: Sequence[Tensor] | None,
    mantissas: Sequence[Tensor] | None,
    updates: Tensor,
    *,
    variance_beta: float | None,
    step_size: Any,
    shrink: Any,
    cautious: bool,
    radius: Steering | None,
) -> None:
    """What `muon_` does with orthogonalised directions."""
    factors = None
    if variance_beta is not None:
        assert second_moments is not None
        factors = _factors(updates, list(second_moments), variance_beta)
    if is_sharded(params[0]):
        updates = updates if factors is None else updates * factors
        updates, factors = scatter(updates.view(len(params), *params[0].shape), params[0]), None
    _apply_(
        [local(p) for p in params],
        None if mantissas is None else [local(m) for m in mantissas],
        updates,
        factors,
        step_size,
        shrink,
        cautious,
        local(exp_avgs[0]).dtype,
        radius,
    )


def _directions(
    averages: list[Tensor],
    grads: list[Tensor],
    momentum: Any,
    nesterov: bool,
    stack: Tensor,
    equal_cols: int | None,
) -> None:
    """Fill `stack` (k, *shape) with what momentum makes of the gradients; averages are updated.

    equal_cols: entries of a row, where rows are to be equalised.
    """
    if _fusible([momentum], averages, grads):
        from nanosprint.kernels.muon import WIDEST, momentum_stack

        if equal_cols is None or equal_cols <= WIDEST:
            momentum_stack(averages, grads, momentum, nesterov, stack, equal_cols)
            return
    _fill_(stack, momentum_(averages, as_dtype(grads, averages[0].dtype), momentum, nesterov), equal_cols)


def _fill_(stack: Tensor, directions: list[Tensor], equal_cols: int | None) -> None:
    """Write the directions into `stack`, with equal rows where `equal_cols` says how long they are."""
    if equal_cols is not None:
        directions = [equal_rows(d.reshape(-1, equal_cols)).view(d.shape) for d in directions]
    torch._foreach_copy_(list(stack.unbind(0)), directions)


def equal_rows(matrices: Tensor) -> Tensor:
    """Rows of RMS 1, computed in fp32 or wider, in the given dtype; rows of zeros stay. Not in place.

    MuonEq gives the rows the RMS of the whole matrix instead, which is the same up to a factor of the matrix, and
    orthogonalisation removes that.
    """
    wide = matrices.to(state_dtype(matrices))
    return (wide * wide.square().mean(-1, keepdim=True).clamp_min(TINY).rsqrt()).to(matrices.dtype)


def _factors(updates: Tensor, moments: list[Tensor], beta: float) -> Tensor:
    """`variance_factors` for several parameters at once; their moments, (blocks, ...) each, are updated."""
    together = moments[0] if len(moments) == 1 else torch.cat(moments)
    if together.dtype == torch.float32 and _fusible([beta], [updates], [together]):
        from nanosprint.kernels import muon as kernels

        factors = kernels.variance_factors(updates, together, beta)
    else:
        factors = variance_factors(updates, together, beta)
    if len(moments) > 1:
        torch._foreach_copy_(moments, list(together.split([len(m) for m in moments])))
    return factors


def _apply_(
    params: list[Tensor],
    lows: list[Tensor] | None,
    updates: Tensor,
    factors: Tensor | None,
    step_size: Any,
    decay: Any,
    cautious: bool,
    wide: torch.dtype,
    radius: Steering | None,
) -> None:
    """params <- params - decay params - step_size factors updates, computed in `wide`; updates: all, in order.

    radius: with it step_size is ignored.
    """
    columns = [params, [updates], *([] if lows is None else [lows]), *([] if factors is None else [[factors]])]
    if radius is None and wide == torch.float32 and _fusible([step_size, decay], *columns):
        from nanosprint.kernels.muon import apply_stack

        apply_stack(params, updates, step_size, decay, cautious=cautious, factors=factors, lows=lows)
        return
    if factors is not None:
        updates = updates * factors
    matrix = updates.shape[-2:]
    steps = list(updates.view(len(params), *params[0].shape).to(wide).unbind(0))
    weights = as_dtype(params, wide) if lows is None else [join(p, low) for p, low in zip(params, lows, strict=True)]
    if radius is not None:
        weights = steered(weights, steps, matrix, radius, decay, cautious)
    else:
        if isinstance(decay, Tensor) or decay != 0:
            if cautious:
                shrink_(weights, steps, decay, strict=False)
            else:
                torch._foreach_mul_(weights, 1 - decay)
        subtract_(weights, steps, step_size)
    if lows is not None:
        for param, low, weight in zip(params, lows, weights, strict=True):
            for half, value in zip((param, low), split_master(weight), strict=True):
                half.copy_(value)
    elif radius is not None or params[0].dtype != wide:
        torch._foreach_copy_(params, weights)


def variance_factors(updates: Tensor, moments: Tensor, beta: float) -> Tensor:
    """What to multiply orthogonalised updates by, so that their rows (or columns) are equally long over time.

    updates (B, M, N). moments: running mean squares along the longer side's other axis, (B, M, 1) if M >= N, else
    (B, 1, N); fp32 or wider, the precision of all statistics; moved by 1 - beta toward those of `updates`. Returns
    factors of moments' shape in updates' dtype, with which each matrix keeps its Frobenius norm. All-zero updates are
    safe. Source: Li et al. 2025, arXiv:2510.05491.
    """
    axis = -1 if updates.shape[-2] >= updates.shape[-1] else -2
    squares = updates.to(moments.dtype).square().mean(axis, keepdim=True)
    moments.lerp_(squares, 1 - beta)
    inverse = moments.clamp_min(FLOOR).rsqrt()
    # Norms from the means, without reading the updates again; their common factor, the axis's length, cancels but for
    # the floor.
    length = updates.shape[axis]
    before = (length * squares.sum((-2, -1), keepdim=True)).sqrt()
    after = (length * (squares * inverse.square()).sum((-2, -1), keepdim=True)).sqrt()
    return (inverse * (before / after.clamp_min(FLOOR))).to(updates.dtype)


def variance_shape(shape: Sequence[int], split: int = 1, stacked: bool = False) -> tuple[int, int, int]:
    """Shape of the second moments of a parameter: (matrices, rows, 1), or (matrices, 1, cols) if rows < cols.

    The first axis counts matrices in the order in which the parameter stores them, k * split for k stacked tensors, so
    that it can be cut wherever the parameter is cut between matrices.
    """
    rows, cols = matrix_shape(shape, split, stacked)
    matrices = split * (shape[0] if stacked else 1)
    return (matrices, rows, 1) if rows >= cols else (matrices, 1, cols)


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

    equalize: "rows" gives the rows of a matrix, as stored, the same length before the orthogonalisation.
    variance_beta: memory of the second moments that even out rows or columns, None for none (0.9 is usual). decay:
    "plain" takes lr * weight_decay off every weight, "cautious" lr^2 * s * weight_decay off those that the step moves
    toward zero (a step of exactly zero counts). lr_scale multiplies lr, in cautious decay only once. mantissa: bf16
    parameters are the upper halves of fp32 numbers. cuda_graph: record the orthogonalisation of each shape once and
    replay it, which spares launches and costs memory (`ops.recorded`). mixture, age, basis, radius: as in `muon_`; the
    objects then stand in the state dict, whose file `torch.load` must be allowed to make them from. Not for DTensors.

    State per parameter: exp_avg, fp32 at least whatever the parameter's dtype; "second_moment" of `variance_shape`, in
    the dtype of exp_avg; what `init_basis` makes; "mantissa", int16 of the parameter's shape, zero at first. Whoever
    overwrites a parameter restores or zeroes its mantissa with it. Parameters without gradient are left alone. Needs no
    process group; under DDP every process does the same; FSDP2 and other DTensor parameters sharded along any axes are
    gathered shape by shape and give the single-process result (second moments are whole on every process). Raises
    ValueError for parameters with fewer than two axes, splits that do not divide, and options out of range. Source: see
    `muon_`.
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
        equalize: Equalize = "none",
        orthogonalize_dtype: torch.dtype = torch.bfloat16,
        split: int = 1,
        stacked: bool = False,
        variance_beta: float | None = None,
        decay: Decay = "plain",
        lr_scale: float = 1.0,
        mantissa: bool = False,
        cuda_graph: bool = False,
        mixture: MomentumMixture | None = None,
        age: float | None = None,
        basis: GradientBasis | None = None,
        radius: RadiusControl | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "scale": scale,
            "orthogonalizer": orthogonalizer, "equalize": equalize, "orthogonalize_dtype": orthogonalize_dtype,
            "split": split, "stacked": stacked, "variance_beta": variance_beta, "decay": decay, "lr_scale": lr_scale,
            "mantissa": mantissa, "cuda_graph": cuda_graph, "mixture": mixture, "age": age, "basis": basis,
            "radius": radius,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_unit("momentum", group["momentum"])
        if group["variance_beta"] is not None:
            check_unit("variance_beta", group["variance_beta"])
        for option, choices in (("scale", get_args(Scale)), ("equalize", get_args(Equalize))):
            if group[option] not in choices:
                raise ValueError(f"{option}={group[option]!r} is unknown: choose one of {', '.join(choices)}")
        find_orthogonalizer(group["orthogonalizer"])
        dtype = group["orthogonalize_dtype"]
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"orthogonalize_dtype={dtype!r} must be a float dtype such as torch.bfloat16")
        _check_experiments(group)
        for param in group["params"]:
            matrix_shape(param.shape, group["split"], group["stacked"])
            if group["mantissa"] and param.dtype != torch.bfloat16:
                raise ValueError(
                    f"mantissa=True needs bf16 parameters, got {param.dtype} of shape {tuple(param.shape)}: cast it "
                    "with .bfloat16(), or leave the option out where all bits are in the parameter"
                )

    def _init_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if group["mixture"] is None:
            state["exp_avg"] = torch.zeros_like(param, dtype=state_dtype(param))
            return
        shape = list(param.shape)
        shape.insert(1 if group["stacked"] else 0, group["mixture"].count)
        state["exp_avg"] = torch.zeros(shape, dtype=state_dtype(param), device=param.device)

    def _extend_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """What options ask for beyond momentum, also if they were set later."""
        if group["variance_beta"] is not None and "second_moment" not in state:
            shape = variance_shape(param.shape, group["split"], group["stacked"])
            state["second_moment"] = torch.zeros(shape, dtype=state_dtype(param), device=param.device)
        if group["basis"] is not None and SQUARE not in state:
            rows, cols = matrix_shape(param.shape, group["split"], group["stacked"])
            init_basis(state, group["basis"], param.numel() // (rows * cols), rows, cols, state["exp_avg"])
        if group["mantissa"] and "mantissa" not in state:
            state["mantissa"] = torch.zeros_like(param, dtype=LOW)

    def _update(self, group: dict[str, Any], later: list[Unfinished] | None = None) -> None:
        columns: tuple[list[Tensor], ...] = ([], [], [], [], [])
        self._init_group(group, *columns)
        params, grads, exp_avgs, moments, mantissas = columns
        batches: dict[Any, list[int]] = {}
        for i, param in enumerate(params):
            key = (tuple(param.shape), param.dtype, param.device, layout(param))
            batches.setdefault(key, []).append(i)
        for rows in batches.values():
            muon_(
                [params[i] for i in rows],
                [grads[i] for i in rows],
                [exp_avgs[i] for i in rows],
                [moments[i] for i in rows] if moments else None,
                [mantissas[i] for i in rows] if mantissas else None,
                lr=number(group["lr"]),
                momentum=number(group["momentum"]),
                bases=None if group["basis"] is None else [self.state[params[i]] for i in rows],
                dtype=group["orthogonalize_dtype"],
                later=later,
                **{option: group[option] for option in _PASSED_ON},
            )

    def _init_group(self, group: dict[str, Any], *columns: list[Tensor]) -> None:
        """Append this group's tensors to the lists. The name is one that torch.compile runs outside its graph."""
        params, grads, exp_avgs, moments, mantissas = columns
        for param in self._active(group):
            state = self.state[param]
            self._extend_state(param, group, state)
            assert param.grad is not None
            params.append(param)
            grads.append(param.grad)
            exp_avgs.append(state["exp_avg"])
            if group["variance_beta"] is not None:
                moments.append(state["second_moment"])
            if group["mantissa"]:
                mantissas.append(state["mantissa"])


@torch.no_grad()
def step_stacks(optimizers: Sequence[Muon]) -> None:
    """`step` of several, which orthogonalise in common launches. All their stacks are in memory at once."""
    later: list[Unfinished] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            optimizer._update(group, later)
    finish(later)


_PASSED_ON = (
    "nesterov", "weight_decay", "scale", "orthogonalizer", "equalize", "split", "stacked", "variance_beta", "decay",
    "lr_scale", "cuda_graph", "mixture", "age", "basis", "radius",
)  # fmt: skip


def _check_experiments(group: dict[str, Any]) -> None:
    """Raise ValueError if an option that is a value of its own cannot work."""
    for name, cls in (("mixture", MomentumMixture), ("basis", GradientBasis), ("radius", RadiusControl)):
        option = group[name]
        if option is None:
            continue
        if not isinstance(option, cls):
            raise ValueError(f"{name}={option!r} must be a nanosprint.config.{cls.__name__}, or None")
        option.validate(name)
        for param in group["params"]:
            if is_sharded(param):
                raise ValueError(
                    f"{name} needs whole matrices, and a parameter of shape {tuple(param.shape)} is a DTensor, spread "
                    "over processes: leave the option out there"
                )
