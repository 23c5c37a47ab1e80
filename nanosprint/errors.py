"""Failures that a user can understand and act on. The command line prints their message without a traceback."""

import os
import signal
import socket
import sys
from collections.abc import Callable

EXIT_FAILED, EXIT_USAGE, EXIT_DIVERGED = 1, 2, 3

listeners: list[Callable[[], None]] = []  # who wants to know that an error is told, such as the launcher


class UserError(ValueError):
    """A mistake in what was asked for; the message names the value and the remedy."""


class OutOfMemory(UserError):
    """A GPU's memory does not hold what was asked for."""


class DivergedError(RuntimeError):
    """The loss became NaN or infinite. `step` is the first optimizer step (from 1) whose loss was not finite.

    hint: another remedy than the usual ones, in a clause.
    """

    def __init__(self, step: int, loss: float, hint: str | None = None) -> None:
        other = "" if hint is None else f", {hint}"
        super().__init__(
            f"the loss became {loss} at step {step}: lower the learning rates (groups.N.lr), look at the data{other}; "
            "the last good checkpoint is kept"
        )
        self.step = step


class Interrupted(RuntimeError):
    """A signal asked the run to stop. `signum` is the signal's number; `saved`: whether the state was saved."""

    def __init__(self, signum: int, step: int, *, saved: bool) -> None:
        outcome = "the state is saved" if saved else "the state could not be saved; the last good checkpoint stays"
        super().__init__(f"stopped by signal {signum} after step {step}; {outcome}")
        self.signum, self.step = signum, step


class LostProcess(RuntimeError):
    """Another process of the run is gone, or has said why the run ends."""


def exit_code(error: BaseException) -> int | None:
    """The code to end with after `error`; None for a fault of ours, which is shown with its traceback."""
    if isinstance(error, Interrupted):
        return 128 + error.signum
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, DivergedError):
        return EXIT_DIVERGED
    if isinstance(error, ValueError):
        return EXIT_USAGE
    return EXIT_FAILED if isinstance(error, OSError | LostProcess) else None


def lacks_memory(error: BaseException) -> bool:
    """Whether a GPU's memory was too short, as we, torch or a library of CUDA's say it."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, OutOfMemory) or "out of memory" in said or "ALLOC_FAILED" in said


def tell(message: object) -> None:
    """One line on stderr; which process says it, unless it is the main one. `listeners` are called before."""
    for listener in listeners:
        listener()
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f"process {rank} on {socket.gethostname()}: "
    print(f"error: {where}{message}", file=sys.stderr, flush=True)
