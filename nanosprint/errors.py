"""Failures that a user can understand and act on. The command line prints their message without a traceback."""


class UserError(ValueError):
    """A mistake in what was asked for; the message names the value and the remedy."""


class DivergedError(RuntimeError):
    """The loss became NaN or infinite. `step` is the first optimizer step (from 1) whose loss was not finite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss became {loss} at step {step}: lower the learning rates (groups.N.lr) or look at the "
            "data; the last good checkpoint is kept"
        )
        self.step = step


class Interrupted(RuntimeError):
    """A signal asked the run to stop. `signum` is the signal's number; `saved`: whether the state was saved."""

    def __init__(self, signum: int, step: int, *, saved: bool) -> None:
        outcome = "the state is saved" if saved else "the state could not be saved; the last good checkpoint stays"
        super().__init__(f"stopped by signal {signum} after step {step}; {outcome}")
        self.signum, self.step = signum, step
