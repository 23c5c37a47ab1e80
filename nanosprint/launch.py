"""Starts the processes of `--gpus N` on this machine through torch's elastic launcher."""

import logging
import os
import signal
import sys
import traceback
from multiprocessing import get_context
from typing import Any

from nanosprint.cli import DEBUG
from nanosprint.config.edit import from_dict, to_dict
from nanosprint.errors import EXIT_FAILED, UserError, listeners, tell
from nanosprint.results.runs import RunDir
from nanosprint.training.request import RunRequest


def launch(request: RunRequest, run_dir: RunDir, *, resume: bool, started: float) -> int:
    """Carry out `request` in as many processes as it wants and wait; the first failure's exit code, or 0.

    Raises UserError when there are fewer GPUs than processes.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    processes = request.execution.gpus
    device = request.execution.device
    on_gpus = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_gpus:
        count = torch.cuda.device_count()
        if processes > count:
            raise UserError(f"--gpus {processes}: this machine has {count}; lower it, or train with --device cpu")
    if DEBUG not in os.environ:
        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # they repeat what the process said
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=run_dir.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # not the host's name, which need not lead anywhere
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        virtual_local_rank=on_gpus,  # each sees its GPU as the first, so that a compiled graph serves all of them
    )
    told = get_context("spawn").Event()
    try:
        elastic_launch(config, _worker)(to_dict(request), str(run_dir.path), resume, started, told)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if not told.is_set():  # killed before the others knew it, and they were ended with it
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            tell(f"process {rank} {how} and left no word")
        return code if code > 0 else 128 - code
    except SignalException as error:  # passed on to the processes, which have said what they did about it
        return 128 + int(error.sigval)
    return 0


def _worker(request: dict[str, Any], path: str, resume: bool, started: float, told: Any) -> None:
    """One process. Only the main one is given the run directory. told: set by the one that tells an error."""
    from nanosprint.cli import guarded, talk
    from nanosprint.training.api import carry_out

    listeners.append(told.set)
    main = os.environ["RANK"] == "0"
    if main:
        talk()

    def work() -> None:
        run_dir = RunDir(path) if main else None
        carry_out(from_dict(RunRequest, request), run_dir, resume=resume, console=main, started=started)

    try:
        code = guarded(work)
    except Exception:  # a fault of ours: the launcher would keep it to itself
        told.set()
        traceback.print_exc()
        code = EXIT_FAILED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an orderly end takes seconds on a busy machine, and the others wait for it
