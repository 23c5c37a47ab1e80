"""Which back ends there are, and what each cannot do. Nothing is imported or run to say so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanosprint.ops.attention_backends import fa2, fa3, fa4, sdpa, windowed
from nanosprint.ops.attention_backends.batched import batched
from nanosprint.ops.attention_backends.contract import Attention
from nanosprint.ops.attention_backends.measure import Call
from nanosprint.ops.attention_backends.reference import reference


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run asks of attention. `needs_of` reads it off the calls, so that nothing is asked for that no layer does.

    Paired heads ask for nothing: they are more positions of fewer heads. Key offset and composed attention are no
    part of it: the one changes keys before, the other has kernels of its own, which look up visible keys like these.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    documents: bool = False
    window: bool = False
    training: bool = True


def needs_of(calls: Sequence[Call], device: torch.device, dtype: torch.dtype) -> Needs:
    """What all of `calls`, at least one, ask for together."""
    return Needs(
        device=device,
        dtype=dtype,
        head_dim=calls[0].head_dim,
        documents=any(call.longest is not None for call in calls),
        window=any(call.window is not None for call in calls),
    )


@dataclass(frozen=True)
class Backend:
    """`load` gives the function, or ImportError; `refuses` says in a clause why it cannot serve, or None.

    `bakes_limits`: a compiled graph holds the window, the longest document and the scale as constants, so that every
    new value is a new graph. The others take them as data; with `uploads_limits` a graph copies that from the host to
    the device, which a CUDA graph cannot record.
    """

    load: Callable[[], Attention]
    refuses: Callable[[Needs], str | None]
    compiles: bool = False  # at first use, for seconds
    bakes_limits: bool = False
    uploads_limits: bool = False
    packages: tuple[
        str, ...
    ] = ()  # whose versions decide on its speed, besides torch's; under every name they have had


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _half(needs: Needs) -> str | None:
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 and fp16, not {needs.dtype}: choose another or set exec.compute=bf16"
    return None


def _older_than(capability: tuple[int, int], device: torch.device) -> str | None:
    if _capability(device) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}, this GPU has {_capability(device)}"
    return None


def _half_on_cuda(needs: Needs, capability: tuple[int, int]) -> str | None:
    if needs.device.type != "cuda":
        return f"runs on NVIDIA GPUs only, not on {needs.device.type}"
    if torch.version.hip is not None:
        return "runs on NVIDIA GPUs only, not on AMD's"
    reason = _half(needs) or _older_than(capability, needs.device)
    if reason is not None:
        return reason
    if needs.head_dim % 8 or needs.head_dim > 256:
        return f"takes head sizes that are multiples of 8 up to 256, not {needs.head_dim}"
    return None


def _dense_only(needs: Needs) -> str | None:
    if needs.documents or needs.window:
        return f"has no {'documents' if needs.documents else 'window'}: use triton, fa2, fa3, fa4, flex or sdpa"
    return _half_on_cuda(needs, (8, 0))


def _fa2(needs: Needs) -> str | None:
    return fa2.missing() or _half_on_cuda(needs, (8, 0))


def _fa3(needs: Needs) -> str | None:
    reason = fa3.missing() or _half_on_cuda(needs, (9, 0))
    if reason is None and _capability(needs.device)[0] != 9:
        return "is written for Hopper alone"
    return reason


def _fa4(needs: Needs) -> str | None:
    return fa4.missing() or _half_on_cuda(needs, (9, 0))


def _triton(needs: Needs) -> str | None:
    if needs.device.type != "cuda":  # which AMD's GPUs are called, too
        return f"runs on GPUs only, not on {needs.device.type}"
    reason = windowed.missing() or _half(needs) or windowed.refuses_heads(needs.head_dim)
    return reason or (None if torch.version.hip else _older_than((8, 0), needs.device))


def _flex(needs: Needs) -> str | None:
    if needs.head_dim < 16:
        return f"takes head sizes from 16 on, not {needs.head_dim}"
    if needs.device.type == "cpu":
        return "has no backward pass on a CPU" if needs.training else None
    if needs.device.type != "cuda":
        return f"is not known to work on {needs.device.type}"
    return "takes no fp64" if needs.dtype == torch.float64 else None


def _load_flex() -> Attention:
    from nanosprint.ops.attention_backends.flex import flex  # half a second that most runs can save

    return flex


def _no_documents(needs: Needs) -> str | None:
    return "has no documents: use sdpa" if needs.documents else None


def _anything(needs: Needs) -> str | None:
    return None


_TRITON = ("triton", "pytorch-triton")

TABLE: dict[str, Backend] = {
    "sdpa": Backend(lambda: sdpa.sdpa, _anything, bakes_limits=True),
    "batched": Backend(lambda: batched, _no_documents, bakes_limits=True),
    "cudnn": Backend(lambda: sdpa.cudnn, _dense_only, bakes_limits=True),
    "flash": Backend(lambda: sdpa.flash, _dense_only, bakes_limits=True),
    "flex": Backend(_load_flex, _flex, compiles=True, uploads_limits=True, packages=_TRITON),
    "fa2": Backend(fa2.load, _fa2),
    "fa3": Backend(fa3.load, _fa3, packages=("flash-attn-3", "flash-attn", "kernels")),
    "fa4": Backend(fa4.load, _fa4, compiles=True, packages=("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")),
    "triton": Backend(windowed.load, _triton, compiles=True, packages=_TRITON),
    "reference": Backend(lambda: reference, _anything, uploads_limits=True),
}
