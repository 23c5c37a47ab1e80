"""What a choice among back ends came to, kept in a file so that the next start repeats it without measuring."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nanosprint.files import atomic_write
from nanosprint.ops.attention_backends.measure import Call
from nanosprint.ops.attention_backends.table import TABLE, Needs

log = logging.getLogger(__name__)

# A back end that bakes limits into graphs costs some ten seconds of compilation for each window. It has to be this much
# faster than the best of the others.
BAKED_SHARE = 0.9


@dataclass(frozen=True)
class Outcome:
    """Milliseconds by back end, in the order of trial; and why the others have none."""

    times_ms: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def ranking(self, limits_vary: bool) -> list[str]:
        """Names, the one to take first; of equal ones the first tried. limits_vary: see `BAKED_SHARE`."""

        def handicapped(name: str) -> float:
            return self.times_ms[name] / (BAKED_SHARE if limits_vary and TABLE[name].bakes_limits else 1.0)

        return sorted(self.times_ms, key=handicapped)

    def told(self, limits_vary: bool) -> str:
        """In a line: "triton: 24.10 ms; fa2 37.20; fa4: needs the package ..."."""
        first, *others = self.ranking(limits_vary)
        words = [f"{first}: {self.times_ms[first]:.2f} ms"]
        if others:
            words.append(", ".join(f"{name} {self.times_ms[name]:.2f}" for name in others))
        return "; ".join([*words, *(f"{name}: {reason}" for name, reason in self.left_out.items())])


def circumstances(needs: Needs, calls: Sequence[Call]) -> dict[str, Any]:
    """All that an outcome depends on: GPU, versions of libraries and of our own code, what is asked for."""
    packages = sorted({package for entry in TABLE.values() for package in entry.packages})
    return {
        "gpu": _gpu(needs.device),
        "torch": str(torch.__version__),
        "packages": {package: _version(package) for package in packages},
        "ours": _digest(_sources()),
        "dtype": str(needs.dtype),
        "calls": [asdict(call) for call in calls],
    }


def place(folder: Path, about: dict[str, Any]) -> Path:
    """The file of the outcome under these circumstances."""
    return folder / f"{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]}.json"


def load(path: Path, about: dict[str, Any]) -> Outcome | None:
    """The outcome kept there, or None; a file that is there and cannot be used is spoken of."""
    try:
        kept = json.loads(path.read_bytes())
        if kept["circumstances"] != about:
            raise ValueError("it is about something else")
        outcome = Outcome(dict(kept["times_ms"]), dict(kept["left_out"]))
        if not outcome.times_ms or not all(_is_time(name, ms) for name, ms in outcome.times_ms.items()):
            raise ValueError("its times are no times of back ends")
        return outcome
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("attention: %s cannot be used, measuring anew: %s: %s", path, type(error).__name__, error)
        return None


def store(path: Path, about: dict[str, Any], outcome: Outcome) -> None:
    """Keep it; where that is not possible, say so."""
    content = {"times_ms": outcome.times_ms, "left_out": outcome.left_out, "circumstances": about}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        log.warning("attention: the choice cannot be kept, the next start measures again: %s", error)


def _is_time(name: str, ms: Any) -> bool:
    return name in TABLE and isinstance(ms, float) and 0 < ms < math.inf


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sources() -> list[Path]:
    """Our own part in every back end."""
    here, kernels = Path(__file__).parent, Path(__file__).parents[2] / "kernels"
    return [*sorted(here.glob("*.py")), kernels / "attention.py", kernels / "tuning.py"]


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
