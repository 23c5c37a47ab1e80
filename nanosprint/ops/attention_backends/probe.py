"""A start-up check of one back end on this device: small, nasty inputs, forward and backward, against the reference."""

import torch
from torch import Tensor

from nanosprint.ops.attention_backends.contract import Attention, Documents, Limit, as_data, pack_documents
from nanosprint.ops.attention_backends.reference import reference

# Relative Frobenius error, bf16 against fp32 or better; in fp32 rounding is far below either.
FORWARD_TOLERANCE = 5e-3
GRADIENT_TOLERANCE = 1e-2

_ROWS, _SEQ_LEN = 2, 333  # odd, and longer than two blocks of any kernel
_LENGTHS = [1, 130, 0, 1, 7, 194, 1, 0, 0, 332]  # single tokens, empty ones, an end at the row's end, a long one
_SCALE = 0.12
WINDOWS = (None, 0, 5, 140, 2 * _SEQ_LEN)
FEW_WINDOWS = (0, 140)  # for what is compiled anew for each


def relative_error(got: Tensor, expected: Tensor, unit: float = 0.0) -> float:
    """‖got - expected‖ / ‖expected‖ in fp64, or over `unit` where what is expected vanishes.

    A NaN in got gives NaN, which is below no tolerance.
    """
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    size = float(expected.norm())
    return float((got - expected).norm()) / (size if size > 1e-6 * unit else unit)


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Leaf tensors q, k, v and a gradient for the output, standard normal, the same on every call."""
    generator = torch.Generator(device="cpu").manual_seed(20)
    make = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
    return [t.requires_grad_(i < 3) for i, t in enumerate(make)]


def errors(
    attend: Attention,
    inputs: list[Tensor],
    scale: float,
    window: Limit | None,
    documents: Documents | None,
) -> list[float]:
    """Relative errors of the output and of the gradients of q, k, v against the reference on fp64 copies.

    The reference runs on the CPU: a GPU would first load some dozen fp64 kernels, which takes it longer.
    """
    *qkv, weight = inputs
    exact = [t.detach().cpu().double().requires_grad_() for t in qkv]
    at_home = None if documents is None else documents._replace(cu_seqlens=documents.cu_seqlens.cpu())
    truth = reference(exact[0], exact[1], exact[2], scale, window, at_home)
    true_grads = torch.autograd.grad(truth, exact, weight.cpu().double())
    out = attend(qkv[0], qkv[1], qkv[2], scale, window, documents)
    grads = torch.autograd.grad(out, qkv, weight)
    # A query that sees one key has no use for its scores: gradients of q and k vanish, up to rounding of products that
    # are this large.
    unit = abs(scale) * float(weight.float().norm()) * weight.size(-1) ** 0.5
    pairs = zip((out, *grads), (truth, *true_grads), strict=True)
    return [relative_error(got, want, unit) for got, want in pairs]


def failure(
    attend: Attention,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
    *,
    documents: bool,
    window: bool,
    windows: tuple[int | None, ...] = WINDOWS,
    limits_as_data: bool = False,
) -> str | None:
    """What `attend` gets wrong or how it dies, in a clause; None if it passes. `windows` are tried if `window`."""
    inputs = random_inputs((_ROWS, _SEQ_LEN, 2, head_dim), dtype, device)
    packed = pack_documents(_LENGTHS, slots=16, device=device) if documents else None
    if packed is not None and limits_as_data:
        packed = packed._replace(max_seq_len=as_data(max(_LENGTHS)))
    for limit in windows if window else (None,):
        where = f"window={limit}, {'documents' if documents else 'no documents'}"
        try:
            wrong = errors(attend, inputs, _SCALE, as_data(limit) if limits_as_data else limit, packed)
        except Exception as error:  # a library may raise anything, and the next back end may well work
            return f"{type(error).__name__} at {where}: {str(error).strip()[:300]}"
        # Written so that NaN, wherever it stands, fails.
        if not (wrong[0] <= FORWARD_TOLERANCE and all(e <= GRADIENT_TOLERANCE for e in wrong[1:])):
            return f"wrong at {where}: relative errors of out, dq, dk, dv {', '.join(f'{e:.1e}' for e in wrong)}"
    return None
