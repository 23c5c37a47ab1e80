"""Compiled graphs in files, whole: a run that finds its graphs there neither traces nor compiles.

The compiler's own caches begin behind tracing. Tracing a graph of the record takes 3 to 4 s of Python at every start,
deriving its gradients from a cache's entry another, and there are four graphs. Here a graph is what
`torch.compile(...).aot_compile` makes of it: code for both directions, and the few lines of bytecode that fetch the
weights from the model. Reading it takes 0.35 s of a CPU where tracing and compiling the same graph (the record's layers
at small sizes) took 26.

What a compiled function looks at before each call, its guards, are left out. All that they would find is in the name of
the file: the model and its precision, every tensor of the model, the inputs' forms and constants, how the run is
carried out, the settings of the compiler, versions, the device, and this package's code. So a graph that is found is
the one that would be made.

`aot_compile` is an experimental part of torch (2.9 on). Where it fails the graph is compiled as ever, and that is told.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanosprint.config.edit import to_dict
from nanosprint.config.recipe import Execution, Recipe
from nanosprint.files import atomic_file
from nanosprint.model.context import NO_CONTEXT, Context
from nanosprint.model.gpt import GPT
from nanosprint.ops.attention import BACKENDS
from nanosprint.training.batch import ModelInput, form_of, kind_of
from nanosprint.training.environment import code_checksum
from nanosprint.training.step import LossSum

_log = logging.getLogger(__name__)
_WAYS = ("device", "compute", "attention", "compile", "fp8", "activation_budget")  # of an execution, that graphs know


class GraphStore:
    """The files of one model's graphs; nothing is read or written before it is asked for."""

    def __init__(self, model: GPT, recipe: Recipe, execution: Execution) -> None:
        self._model = model
        self._about = [circumstances(recipe, execution), _settings(), _tensors_of(model)]

    def path(self, inputs: ModelInput) -> Path:
        """Where the graph for such inputs is, or would be; with gradients or without, as they are enabled now."""
        about = json.dumps([*self._about, torch.is_grad_enabled(), kind_of(inputs)], default=str)
        return store_folder() / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.graph"

    def load(self, inputs: ModelInput) -> Callable[..., Tensor] | None:
        """`GPT.loss_sum` for such inputs, model included; None where there is no file, or one that cannot be used."""
        path = self.path(inputs)
        if not path.exists():
            return None
        try:
            with path.open("rb") as file:
                graph: Any = torch.compiler.load_compiled_function(file, f_globals=GPT.loss_sum.__globals__)
        except Exception as error:  # whatever a file of another making may cause
            _log.warning("a stored graph cannot be used, compiling anew: %s: %s: %s", path, type(error).__name__, error)
            return None
        graph.disable_guard_check()
        return graph

    def save(self, inputs: ModelInput) -> None:
        """Compile the graph for such inputs, without running it, and store it. Raises what the compiler raises."""
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        with torch._dynamo.config.patch(enable_aot_compile=True):
            graph: Any = torch.compile(GPT.loss_sum, dynamic=False, fullgraph=True, options=options)
            compiled = graph.aot_compile(((self._model, *inputs), {}))
        path = self.path(inputs)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(type(compiled).serialize(compiled).serialized_data)


class FirstCall(NamedTuple):
    """Of a graph: the tokens of its inputs, whether it trains, where it came from, and the host's seconds for it."""

    tokens: int
    trained: bool
    stored: bool  # else compiled, which another cache of the compiler may have made short
    seconds: float


class StoredLossSum:
    """`model.loss_sum` by stored graphs where there are any, else by `otherwise`."""

    def __init__(self, store: GraphStore, model: GPT, execution: Execution, otherwise: LossSum) -> None:
        self._store, self._model, self._otherwise = store, model, otherwise
        self._convert = converter(execution)
        self._graphs: dict[Hashable, Callable[..., Tensor]] = {}
        self.first_calls: list[FirstCall] = []

    def __call__(self, tokens: Tensor, targets: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        inputs = ModelInput(tokens, targets, self._convert(context))
        key = (torch.is_grad_enabled(), *kind_of(inputs))
        graph = self._graphs.get(key)
        return self.first_call(key, inputs) if graph is None else graph(self._model, *inputs)

    def first_call(self, key: Hashable, inputs: ModelInput) -> Tensor:
        """The same where no graph is known yet. A graph that cannot be had is compiled, here and at later calls."""
        start = time.perf_counter()
        stored = self._store.load(inputs)
        graph = self._graphs[key] = self._compiled if stored is None else stored
        loss = graph(self._model, *inputs)
        took = time.perf_counter() - start
        self.first_calls.append(
            FirstCall(inputs.targets.numel(), torch.is_grad_enabled(), stored is not None, round(took, 3))
        )
        return loss

    def _compiled(self, _: GPT, tokens: Tensor, targets: Tensor, context: Context) -> Tensor:
        return self._otherwise(tokens, targets, context)


def converter(execution: Execution) -> Callable[[Context], Context]:
    """What makes of a context the arguments of a compiled graph: numbers or data, as the attention back end takes."""
    return Context.with_ints if BACKENDS[execution.attention].bakes_limits else Context.with_data


def store_folder() -> Path:
    """Beside what else the compiler keeps, so that who empties its caches empties this."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir()) / "nanosprint"


def circumstances(recipe: Recipe, execution: Execution) -> dict[str, Any]:
    """What graphs depend on besides the model's tensors, their inputs and the compiler's settings."""
    cuda = execution.device == "cuda"
    return {
        "model": to_dict(recipe.model),
        "precision": to_dict(recipe.precision),
        "gradients": [recipe.train.objective, recipe.train.lanes, recipe.max_batch_tokens],  # scales of FP8 know them
        "execution": [getattr(execution, way) for way in _WAYS],
        "versions": [platform.python_version(), torch.__version__, torch.version.cuda],
        "gpu": [torch.cuda.get_device_name(), *torch.cuda.get_device_capability()] if cuda else None,
        "threads": None if cuda else torch.get_num_threads(),
        "code": code_checksum(),
    }


def _settings() -> list[Any]:
    """Those of the compiler, which environment variables can change, and torch's own that compiled code follows."""
    import torch._functorch.config
    import torch._inductor.config

    return [
        torch._inductor.config.save_config_portable(ignore_private_configs=False),
        torch._functorch.config.save_config_portable(ignore_private_configs=False),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        {name: value for name, value in os.environ.items() if name.startswith("TRITON_") and "CACHE" not in name},
    ]


def _tensors_of(model: GPT) -> list[Any]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [(name, *form_of(tensor), tensor.data_ptr() % 16) for name, tensor in named.items()]
