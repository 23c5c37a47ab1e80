"""The squared-ReLU MLP by its products, and the FP8 copies of its weights."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inputs import Operands, Sizes, mlp_operands
from benchmarks.ops.case import Case, Cost, Library, Operator, error_of, sample
from benchmarks.ops.head import CUBLAS
from nanosprint.config import Fp8MLPSpec
from nanosprint.model.fp8_mlp import Fp8MLP
from nanosprint.ops.fp8 import E4M3, E5M2, quantize, scale_of, scaled_product
from nanosprint.ops.fp8_copies import renew
from nanosprint.ops.linear_relu2 import relu2_grad, up_relu2

_TOLERANCES = {"up": 6e-3, "dpre": 6e-3, "up8": 3e-2, "dpre8": 4e-2}  # with codes: of a value near the middle of two


def product(A: Tensor, B: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    """A (T, D) times B (F, D) transposed, by cuBLAS."""
    return A @ B.mT if scales is None else scaled_product(A, B, *scales, torch.bfloat16, fast=True)


def up(A: Tensor, B: Tensor, scales: Any, code_scale: Tensor | None, post: None) -> tuple[Tensor, ...]:
    """Activations; in FP8 with their codes and largest value."""
    made = F.relu(product(A, B, scales)).square()
    return (made,) if code_scale is None else (made, quantize(made, code_scale, E4M3), made.amax())


def dpre(A: Tensor, B: Tensor, scales: Any, code_scale: Tensor | None, post: Tensor) -> tuple[Tensor, ...]:
    """The gradient in front of the activation; in FP8 with its codes."""
    made = 2 * post.sqrt() * product(A, B, scales)
    return (made,) if code_scale is None else (made, quantize(made, code_scale, E5M2))


def fused(kind: str, sizes: Sizes) -> Iterator[Case]:
    """A product with the activation, or with its gradient, behind it. kind: see `mlp_operands`."""
    given, forward = mlp_operands(kind, sizes), kind.startswith("up")
    A, B, scales, code_scale, post = given
    if forward:
        ours = partial(up_relu2, A, B, torch.bfloat16, scales, code_scale, want_peaks=scales is not None)
    else:
        ours = partial(relu2_grad, A, B.mT, post, scales, code_scale)
    formula = up if forward else dpre
    T, D, hidden = sizes.tokens, sizes.dim, sizes.hidden
    made = T * hidden * ((2 if scales is None else 3) + (0 if forward else 2))
    yield Case(
        shape=f"{T:,} x {D} x {hidden}", ours=ours, check=partial(_error, ours, given), tolerance=_TOLERANCES[kind],
        costs=(Cost(2 * T * D * hidden, A.nbytes + B.nbytes + made, "bf16" if scales is None else "fp8"),),
        reference=partial(formula, *given), compiled=partial(torch.compile(formula, dynamic=False), *given),
        library=Library("cuBLAS, product alone", partial(product, A, B, scales)),
    )  # fmt: skip


def _error(ours: Any, given: Operands) -> float:
    """Of the first and last rows against fp32; codes against those of what was made, maxima against its maximum."""
    (made, codes, *peaks), (A, B, scales, code_scale, post) = ours(), given
    some = sample(len(A), 1024, A.device.type)
    few = A.float()[some] @ B.float().mT * (1.0 if scales is None else scales[0] * scales[1])
    exact = F.relu(few).square() if post is None else 2 * post[some].float().sqrt() * few
    errors = [error_of(made[some], exact)]
    if code_scale is not None:
        errors.append(error_of(codes, quantize(made, code_scale, codes.dtype)))
    if peaks and peaks[0] is not None:
        errors.append(error_of(peaks[0].amax(), made.amax()))
    return max(errors)


def down(sizes: Sizes) -> Iterator[Case]:
    """The second product, from the codes of the activations."""
    post, weight = sizes.random(sizes.tokens, sizes.hidden).relu_().square_(), sizes.random(sizes.dim, sizes.hidden)
    scales = scale_of(post), scale_of(weight)
    codes = quantize(post, scales[0], E4M3), quantize(weight, scales[1], E4M3)
    ours, some = partial(product, *codes, scales), sample(sizes.tokens, device=sizes.device)

    def check() -> float:
        return error_of(ours()[some], codes[0].float()[some] @ codes[1].float().mT * scales[0] * scales[1])

    nbytes = codes[0].nbytes + codes[1].nbytes + 2 * sizes.tokens * sizes.dim
    yield Case(
        shape=f"{sizes.tokens:,} x {sizes.hidden} x {sizes.dim}", ours=ours, check=check, tolerance=1e-2,
        costs=(Cost(2 * post.numel() * sizes.dim, nbytes, "fp8"),), reference=lambda: post @ weight.mT,
        compiled="a product by itself", library=CUBLAS,
    )  # fmt: skip


def renewed(sizes: Sizes) -> Iterator[Case]:
    """Codes and scales of all layers' weights, once a step: a maximum first for `up`, last step's scale for `down`."""
    weights = [tuple(sizes.random(sizes.hidden, sizes.dim) for _ in range(2)) for _ in range(sizes.layers)]
    layers = [(Fp8MLP(both[0], Fp8MLPSpec(), in_out=True), *both) for both in weights]

    def eager() -> list[Tensor]:
        return [quantize(w, scale_of(w), E4M3).view(torch.uint8).mT.contiguous() for both in weights for w in both]

    def ours(steps: int = 99) -> None:
        renew([copy for state, *both in layers for copy in state.copies_of(*both, steps)])

    def check() -> float:
        ours(0)  # what follows looks for the scales of a step before
        ours()
        codes = [state.up_codes.view(E4M3).float() * state.up_scale for state, *_ in layers]
        codes += [state.down_codes.view(E4M3).float().mT * state.down_scale for state, *_ in layers]
        return error_of(codes, [w for column in zip(*weights, strict=True) for w in column])

    numbers = sizes.layers * sizes.hidden * sizes.dim
    yield Case(
        shape=f"{sizes.layers} x 2 x {sizes.hidden} x {sizes.dim}", ours=ours, check=check,
        tolerance=4e-2, costs=(Cost(nbytes=(2 + 2 + 1 + 2 + 1) * numbers),), reference=eager,
        compiled="two launches for all layers", changes=lambda: [dict(state.named_buffers()) for state, *_ in layers],
    )  # fmt: skip


OPERATORS = (
    Operator("MLP up, bf16", partial(fused, "up")),
    Operator("MLP up, FP8 with codes", partial(fused, "up8")),
    Operator("MLP dpre, bf16", partial(fused, "dpre")),
    Operator("MLP dpre, FP8 with codes", partial(fused, "dpre8")),
    Operator("MLP down, FP8", down),
    Operator("MLP copies of the weights", renewed, by_tokens=False),
)
