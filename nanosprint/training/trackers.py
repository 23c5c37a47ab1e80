"""Optional copies of the metrics for Weights & Biases and TensorBoard; `metrics.jsonl` stays the record."""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from nanosprint.extras import require
from nanosprint.results.runs import RunDir


class Tracker(Protocol):
    """Takes the lines of a run, one by one."""

    def log(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """Weights & Biases. A resumed run goes on in the same place. Raises ValueError where wandb is not installed."""

    def __init__(self, run_dir: RunDir) -> None:
        wandb = require("wandb", extra="wandb", purpose="--wandb")
        request = run_dir.read_request()
        identity = hashlib.sha256(f"{run_dir.name} {request.get('created')}".encode()).hexdigest()[:16]
        self._run = wandb.init(
            project="nanosprint",
            name=run_dir.name,
            id=identity,
            resume="allow",
            dir=str(run_dir.path),
            config=request,
        )
        # wandb's own step may not go back, which ours does when a run is resumed from a checkpoint
        self._run.define_metric("*", step_metric="step")

    def log(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "event":
            return
        self._run.log({"step": line["step"], **scalars(line)})

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard files in `<run>/tensorboard/`. Raises ValueError where tensorboard is not installed."""

    def __init__(self, run_dir: RunDir) -> None:
        require("tensorboard", extra="tensorboard", purpose="--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run_dir.path / "tensorboard"))

    def log(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "event":
            self._writer.add_text("events", str(line.get("message", line["name"])), line.get("step"))
            return
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line under names such as "train/loss"."""
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {f"{line['kind']}/{key}": value for key, value in numbers.items() if key != "step"}
