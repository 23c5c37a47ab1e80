"""A run's start-up before its turn, in four steps, for who has several runs to start on one GPU.

    load       the packages, the data, the device
    choose     what "auto" stands for, by free memory and by timing attention                 alone on the GPU
    compile    the graphs, in processes of their own (`precompile.py`)
    warm_up    weights and a step of every kind, recorded where the run records: they fit     alone on the GPU

Most of a start is compilation, which is work of CPUs, so that several runs can do it side by side. But a choice by free
memory, a measurement and a trial whether a micro-batch fits would come out otherwise in company: even who only compiles
holds a context and a model's weights on the GPU, once for each of his processes. So "alone" is alone among all steps of
all runs, and a lock for the steps that work on the GPU would not do. Who asks for the steps sees to it
(`evidence/workers.py`).

Afterwards the graphs are in `Kept`, as those of a run that is over. How many steps a budget is worth is not found out
here: the run does that in its turn, and no graph knows it.
"""

import logging
from dataclasses import replace

from nanosprint.config.recipe import Execution
from nanosprint.training import distributed
from nanosprint.training.phases import Phases
from nanosprint.training.precompile import compile_ahead, turn_at
from nanosprint.training.request import RunRequest
from nanosprint.training.reuse import Kept
from nanosprint.training.setup import choose_execution, find_data, load_compiler, prepare

_log = logging.getLogger(__name__)


class Ahead:
    """The start-up of one run, of a single process; made, it is loaded, and the other steps are called in their order.

    What it comes to is put into `kept`. Each step raises what the run itself would raise there.
    """

    def __init__(self, request: RunRequest, kept: Kept) -> None:
        self._request, self._kept = replace(request, budget=None), kept
        self._world = distributed.start(request.execution.device, request.execution.timeout_s)
        self._data = find_data(request)
        self._chosen: Execution | None = None

    def choose(self) -> None:
        """Settle how the run is carried out."""
        self._chosen = choose_execution(self._request, self._world)

    def compile(self) -> None:
        """Have the graphs compiled and stored, with nothing of the run on its GPU meanwhile.

        Graphs for which nobody compiles ahead (`exec.compilers` 0, a compiler's mode that is not stored) are left to
        the warm-up.
        """
        assert self._chosen is not None
        request = replace(self._request, execution=self._chosen)
        if self._chosen.compile != "off":
            load_compiler().join()
        with turn_at(request):  # runs that differ in their optimizers alone have the same graphs
            compilers = compile_ahead(request)
            if compilers is not None:
                try:
                    compilers.wait()
                finally:
                    compilers.stop()

    def warm_up(self) -> None:
        """Do all else that comes before training, and keep its graphs; weights and gradients are given up."""
        assert self._chosen is not None
        phases = Phases()
        run = prepare(self._request, self._world, self._data, phases=phases, chosen=self._chosen)
        took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.seconds.items())
        stored = sum(first.stored for first in run.first_calls)
        _log.info("ready ahead of its turn: %s; %d of %d graphs were stored", took, stored, len(run.first_calls))
        self._kept.put(self._request.execution, run.request, run.state.model, run.loss_sum)
