"""Turns every "auto" of an `Execution` into the choice for this machine, once, at the start of a run."""

import time
from dataclasses import replace
from typing import Literal

import torch

from nanosprint.config.edit import apply_overrides
from nanosprint.config.recipe import Execution, Recipe
from nanosprint.errors import UserError
from nanosprint.ops.attention import BACKENDS
from nanosprint.optim.sharding import from_all, from_first
from nanosprint.training.attention_choice import choose_attention
from nanosprint.training.distributed import World
from nanosprint.training.environment import usable_cores
from nanosprint.training.microbatch import resolve_micro_batches
from nanosprint.training.warmup import graphs_of

_CORES_EACH, _MOST_COMPILERS = 4, 4  # of processes that compile ahead
_BITS = {"bf16": 16, "fp32": 32, "fp64": 64}


def resolve(execution: Execution, recipe: Recipe, world: World) -> Execution:
    """The same execution with nothing left to choose. Raises UserError for what cannot work here."""
    device = world.device
    compute: str = from_first(_compute(execution, recipe, device))  # measured, so processes might differ
    choices = {
        "device": device.type,
        "compute": compute,
        "compile": _compile(execution, recipe, device),
        "activation_budget": _activation_budget(execution),
        "threads": torch.get_num_threads(),
    }
    resolved = apply_overrides(execution, choices)
    _check_compilers(resolved, world)
    resolved = resolve_micro_batches(resolved, recipe, world)
    resolved = apply_overrides(resolved, {"attention": choose_attention(resolved, recipe, world)})
    resolved = replace(resolved, cuda_graphs=_cuda_graphs(resolved, recipe))
    _check_cuda_graphs(resolved)
    return replace(resolved, compilers=from_first(_compilers(resolved, recipe, world)))


def _compute(execution: Execution, recipe: Recipe, device: torch.device) -> str:
    wanted = recipe.precision.compute
    if execution.compute != "auto":
        if _BITS[execution.compute] < _BITS[wanted]:
            raise UserError(f"exec.compute={execution.compute} is below the recipe's precision.compute={wanted}")
        return execution.compute
    if wanted != "bf16":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and _bf16_is_faster_on_cpu() else "fp32"


def _bf16_is_faster_on_cpu(size: int = 512, repeats: int = 5) -> bool:
    """Whether a matrix product in bf16 takes at most 0.8 of the time of one in fp32: it has rounding to make up for."""

    def best_time(dtype: torch.dtype) -> float:
        a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        return min(times)

    return best_time(torch.bfloat16) < 0.8 * best_time(torch.float32)


def _compile(execution: Execution, recipe: Recipe, device: torch.device) -> str:
    if execution.compile != "auto":
        return execution.compile
    if recipe.model.ngrams is not None:
        return "off"  # sparse gradients do not pass through the compiler
    # On a CPU compilation takes longer than the runs one would do there, and needs a C++ compiler.
    return "default" if device.type == "cuda" else "off"


def _activation_budget(execution: Execution) -> float:
    budget = 1.0 if execution.activation_budget == "auto" else execution.activation_budget
    if not 0 <= budget <= 1:
        raise UserError(f"exec.activation_budget={budget:g} must lie between 0 (keep next to nothing) and 1 (keep all)")
    if budget < 1 and execution.compile == "off":
        raise UserError(f"exec.activation_budget={budget:g} needs the compiler: leave exec.compile=off out")
    return budget


def _cuda_graphs(execution: Execution, recipe: Recipe) -> Literal["on", "off"]:
    """Recorded where a run has stages, whose few shapes of micro-batches are known beforehand.

    Elsewhere documents have no bound, so that recordings would be made while the clock runs. A replay does not let
    several processes reduce gradients while its backward pass goes on; compiled, that one's gradients come at its end.
    """
    if execution.cuda_graphs != "auto":
        return execution.cuda_graphs
    recordable = execution.device == "cuda" and execution.compile == "default"
    recordable = recordable and not BACKENDS[execution.attention].uploads_limits
    return "on" if recordable and recipe.schedule.stages is not None else "off"


def _check_cuda_graphs(execution: Execution) -> None:
    """Raise UserError where a micro-batch cannot be recorded."""
    if execution.cuda_graphs == "off":
        return
    if execution.device != "cuda":
        raise UserError(f"exec.cuda_graphs=on needs a CUDA device, not {execution.device}: leave it out")
    if execution.compile == "max-autotune":
        raise UserError("exec.cuda_graphs=on: exec.compile=max-autotune has CUDA graphs of its own: set one of the two")
    if execution.compile != "off" and BACKENDS[execution.attention].uploads_limits:
        raise UserError(
            f"exec.cuda_graphs=on: exec.attention={execution.attention} copies windows to the GPU in each call, which "
            "cannot be recorded: choose another, or leave exec.cuda_graphs out"
        )


def _check_compilers(execution: Execution, world: World) -> None:
    """Raise UserError where graphs cannot be compiled ahead."""
    wanted = execution.compilers
    if wanted != "auto" and (wanted < 0 or (wanted and not _compiles_ahead(execution, world))):
        raise UserError(
            f"exec.compilers={wanted} must be 0, or more with exec.compile=default, and where several processes train, "
            "each must see its GPU as the first, as with --gpus or torchrun --virtual-local-rank"
        )


def _compiles_ahead(execution: Execution, world: World) -> bool:
    """Whether there is something to compile that serves every process. All of them must ask."""
    return len(set(from_all(str(world.device)))) == 1 and execution.compile == "default"


def _compilers(execution: Execution, recipe: Recipe, world: World) -> int:
    """Processes that compile ahead: one for each graph, where there are cores for several. The rest must be settled."""
    if execution.compilers != "auto":
        return execution.compilers
    if not _compiles_ahead(execution, world) or execution.device != "cuda":
        return 0
    # Each keeps a core busy and hands kernels to workers of its own; more than four would want as many cores again.
    count = min(len(graphs_of(recipe, execution)), (usable_cores() or 1) // _CORES_EACH, _MOST_COMPILERS)
    return count if count > 1 else 0
