"""Energy over exactly the segments that the clock counts, or the reason why there is no figure; never a guess.

A source is a counter of joules that the hardware keeps by itself: NVML's total energy of each NVIDIA GPU (Volta and
later), or the package counters of RAPL on Linux for a run on the CPU. The meter reads it when the clock starts and
stops. Nothing is sampled or modelled. As soon as one reading fails, or part of the run went unmeasured, the sum is
unknown and the reason is kept instead.

A GPU's figure is the energy of its board; the host's is not added. A CPU's figure is that of its packages (cores,
caches, memory controller), which includes whatever else the machine does meanwhile.
"""

import contextlib
import importlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")


class EnergySource(Protocol):
    """A hardware counter of joules that never falls between two reads."""

    @property
    def name(self) -> str:
        """ "nvml" or "rapl"."""
        ...

    @property
    def poll_s(self) -> float | None:
        """Longest time allowed between two reads while measuring; None: any."""
        ...

    def joules(self) -> float:
        """Joules since some fixed moment. Raises OSError or RuntimeError where the counter cannot be read."""
        ...

    def close(self) -> None: ...


class EnergyMeter:
    """Joules over segments; hang it on a Clock as a hook.

    `energy_j` is None, with `reason` saying why, when `source` is itself a reason (text) or a reading failed.
    """

    def __init__(self, source: EnergySource | str) -> None:
        self.source: EnergySource | None = None if isinstance(source, str) else source
        self.reason: str | None = source if isinstance(source, str) else None
        self._done_j = 0.0  # of closed segments
        self._began_j: float | None = None
        self._poller: _Poller | None = None

    @property
    def energy_j(self) -> float | None:
        """Joules of the closed segments, or None."""
        return None if self.reason else self._done_j

    def read(self) -> float | None:
        """Joules so far, the open segment included, from a fresh reading of the counter (for live watts)."""
        now_j = self._joules() if self._began_j is not None else None
        if self.reason:
            return None
        return self._done_j + (now_j - self._began_j if now_j is not None and self._began_j is not None else 0.0)

    def start(self) -> None:
        """The clock starts."""
        self._began_j = self._joules()
        if self.source is not None and self.source.poll_s is not None and self.reason is None:
            self._poller = _Poller(self.source)

    def stop(self) -> None:
        """The clock has stopped."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        ended_j = self._joules()
        if ended_j is not None and self._began_j is not None:
            self._done_j += ended_j - self._began_j
        self._began_j = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the joules so far, or the reason why they are unknown."""
        return {"energy_j": self.energy_j, "reason": self.reason}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. If either part of the run was not measured, the whole is unknown."""
        self._done_j = state["energy_j"] or 0.0
        if state["energy_j"] is None and self.reason is None:
            self.reason = f"not measured before the run was resumed: {state['reason']}"

    def close(self) -> None:
        """Let go of the counter; `energy_j` stays readable."""
        if self._poller is not None:
            self._poller.stop()
        if self.source is not None:
            self.source.close()

    def _joules(self) -> float | None:
        if self.source is None or self.reason is not None:
            return None
        try:
            return self.source.joules()
        except (OSError, RuntimeError) as error:
            self.reason = f"{self.source.name} could not be read during the run: {error}"
            return None


def open_meter(device: str, gpus: Sequence[int | str] = ()) -> EnergyMeter:
    """The meter for a device type: NVML's counters of `gpus` for "cuda", RAPL for "cpu".

    `gpus` are NVML indices or UUIDs; CUDA's own indices differ from NVML's under CUDA_VISIBLE_DEVICES, so prefer the
    UUIDs that `training.environment` reports. Never raises: a meter without a source carries the reason.
    """
    try:
        if device == "cuda":
            return EnergyMeter(NvmlSource(gpus))
        if device == "cpu":
            return EnergyMeter(RaplSource())
    except (OSError, RuntimeError) as error:
        return EnergyMeter(str(error))
    return EnergyMeter(f"no energy counter is known for device {device!r}")


class CountedElsewhere:
    """Nothing, because another process of this machine reads the counter that covers both."""

    name = "none"
    poll_s = None

    def joules(self) -> float:
        return 0.0

    def close(self) -> None: ...


class NvmlSource:
    """The sum of the total energy counters of some NVIDIA GPUs. Raises RuntimeError with the reason where it fails."""

    name = "nvml"
    poll_s = None  # 64-bit millijoules

    def __init__(self, gpus: Sequence[int | str]) -> None:
        if not gpus:
            raise RuntimeError("no GPU was named to measure")
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            raise RuntimeError(
                "the Python package nvidia-ml-py is not installed: pip install 'nanosprint[energy]'"
            ) from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise RuntimeError(f"NVML does not start: {error}") from None
        try:
            self._handles = [self._handle(gpu) for gpu in gpus]
            self.joules()  # GPUs older than Volta have no counter
        except RuntimeError:
            self.close()
            raise

    def joules(self) -> float:
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles) / 1e3
        except self._nvml.NVMLError as error:
            raise RuntimeError(f"NVML's total energy counter: {error}") from None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _handle(self, gpu: int | str) -> Any:
        try:
            if isinstance(gpu, int):
                return self._nvml.nvmlDeviceGetHandleByIndex(gpu)
            uuid = gpu if gpu.startswith(("GPU-", "MIG-")) else f"GPU-{gpu}"  # torch leaves the prefix out
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            raise RuntimeError(f"NVML does not know GPU {gpu!r}: {error}") from None


class RaplSource:
    """The sum of the RAPL counters of all CPU packages. Raises RuntimeError with a reason where it cannot be.

    A counter starts again at 0 after `max_energy_range_uj`, which a busy server reaches within minutes, so it must be
    read more often than that: `poll_s`.
    """

    name = "rapl"
    poll_s = 20.0  # the smallest range in use, 65 kJ, lasts 160 s at 400 W

    def __init__(self, root: Path = POWERCAP) -> None:
        # "intel-rapl:0" is a package (AMD's too), "intel-rapl:0:1" a part of it; "psys" is the whole board with
        # the packages in it, and "intel-rapl-mmio:0" a second view of the same package
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._packages = [_RaplCounter(z) for z in zones if (z / "name").read_text().startswith("package")]
        if not self._packages:
            raise RuntimeError(f"no CPU energy counter: {root} holds no RAPL package")
        self._lock = threading.Lock()
        self.joules()

    def joules(self) -> float:
        with self._lock:
            return sum(package.read_uj() for package in self._packages) / 1e6

    def close(self) -> None:
        pass


class _RaplCounter:
    """One counter, unwrapped: microjoules that keep rising."""

    def __init__(self, zone: Path) -> None:
        self._path = zone / "energy_uj"
        try:
            self._range_uj = int((zone / "max_energy_range_uj").read_text())
            self._last_uj = int(self._path.read_text())
        except PermissionError:
            raise RuntimeError(f"{self._path} may be read by root only: sudo chmod a+r {self._path}") from None
        except ValueError as error:
            raise RuntimeError(f"{zone} does not hold numbers: {error}") from None
        self._total_uj = 0

    def read_uj(self) -> int:
        try:
            now_uj = int(self._path.read_text())
        except ValueError as error:
            raise RuntimeError(f"{self._path} does not hold a number: {error}") from None
        step_uj = now_uj - self._last_uj
        if step_uj < 0:
            step_uj += self._range_uj
        if step_uj < 0:
            raise RuntimeError(f"{self._path} fell by more than its range of {self._range_uj} microjoules")
        self._last_uj = now_uj
        self._total_uj += step_uj
        return self._total_uj


class _Poller:
    """Reads a source now and then while a segment is open, so that no wrap-around goes unseen."""

    def __init__(self, source: EnergySource) -> None:
        self._source = source
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nanosprint-energy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._source.poll_s):
            # a failure shows again, with its reason, when the segment ends
            with contextlib.suppress(OSError, RuntimeError):
                self._source.joules()
