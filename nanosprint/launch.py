"""Starts the processes of `--gpus N` on this machine through torch's elastic launcher."""

import logging
import os
import sys
import time
import traceback
from typing import Any

from nanosprint.cli import DEBUG, EXIT_FAILED, PATIENCE_S
from nanosprint.config.edit import from_dict, to_dict
from nanosprint.errors import UserError
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
    if request.execution.device == "cuda" or (request.execution.device == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        if processes > count:
            raise UserError(f"--gpus {processes}: this machine has {count}; lower it, or train with --device cpu")
    if DEBUG not in os.environ:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it repeats what the process said
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=run_dir.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    try:
        elastic_launch(config, _worker)(to_dict(request), str(run_dir.path), resume, started)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # passed on to the processes, which have said what they did about it
        return 128 + int(error.sigval)
    return 0


def _worker(request: dict[str, Any], path: str, resume: bool, started: float) -> None:
    """One process. Only the main one is given the run directory; it tells the others."""
    from nanosprint.cli import guarded, talk
    from nanosprint.training.api import carry_out

    main = os.environ["RANK"] == "0"
    if main:
        talk()

    def work() -> None:
        run_dir = RunDir(path) if main else None
        carry_out(from_dict(RunRequest, request), run_dir, resume=resume, console=main, started=started)

    # A mistake usually stops every process. The main one tells it at once and the launcher then ends the others, which
    # wait their turn; one that failed alone gets to speak.
    try:
        code = guarded(work, patience_s=0.0 if main else PATIENCE_S)
    except Exception:  # a fault of ours: the launcher would keep it to itself
        time.sleep(0.0 if main else PATIENCE_S)
        traceback.print_exc()
        code = EXIT_FAILED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an orderly end takes seconds on a busy machine, and the others wait for it
