"""Joules over segments, with counters that the test winds on."""

import sys
import time
from types import ModuleType

import pytest

from nanosprint.training.clock import Clock
from nanosprint.training.energy import EnergyMeter, NvmlSource, RaplSource, open_meter


class FakeSource:
    name = "fake"

    def __init__(self, poll_s=None):
        self.total, self.poll_s, self.error, self.reads, self.closed = 1000.0, poll_s, None, 0, False

    def joules(self):
        self.reads += 1
        if self.error:
            raise self.error
        return self.total

    def close(self):
        self.closed = True


def test_exactly_the_clocks_segments():
    source = FakeSource()
    meter = EnergyMeter(source)
    clock = Clock(hooks=[meter])
    source.total += 500  # warm-up
    clock.start()
    source.total += 10
    assert meter.read() == 10
    with clock.paused():
        source.total += 300  # validation
        assert meter.read() == 10
    source.total += 7
    clock.stop()
    source.total += 900
    assert meter.energy_j == 17
    assert meter.reason is None
    meter.close()
    assert source.closed
    assert meter.energy_j == 17


@pytest.mark.parametrize("when", ["start", "stop", "read"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("GPU is lost")])
def test_a_failed_reading_makes_the_sum_unknown_for_good(when, error):
    source = FakeSource()
    meter = EnergyMeter(source)
    if when != "start":
        meter.start()
    source.error = error
    {"start": meter.start, "stop": meter.stop, "read": meter.read}[when]()
    source.error = None
    meter.stop()
    meter.start()
    meter.stop()
    assert meter.energy_j is None
    assert meter.read() is None
    assert meter.reason.startswith("fake could not be read during the run: ")


def test_without_a_source_there_is_a_reason():
    meter = EnergyMeter("no counter here")
    meter.start()
    meter.stop()
    assert meter.energy_j is None
    assert meter.reason == "no counter here"
    meter.close()


def test_restore_adds_up_or_gives_the_reason():
    first = EnergyMeter(FakeSource())
    first.start()
    first.source.total += 5
    first.stop()
    second = EnergyMeter(FakeSource())
    second.restore(first.state())
    second.start()
    second.source.total += 6
    second.stop()
    assert second.energy_j == 11
    third = EnergyMeter(FakeSource())
    third.restore(EnergyMeter("no permission").state())
    assert third.energy_j is None
    assert third.reason == "not measured before the run was resumed: no permission"
    fourth = EnergyMeter("gone")
    fourth.restore(first.state())
    assert (fourth.energy_j, fourth.reason) == (None, "gone")


def test_a_source_that_wraps_is_polled_within_segments_only():
    source = FakeSource(poll_s=0.005)
    meter = EnergyMeter(source)
    meter.start()
    deadline = time.monotonic() + 5
    while source.reads < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert source.reads >= 4
    meter.stop()
    reads = source.reads
    time.sleep(0.03)
    assert source.reads == reads


# RAPL


def rapl(root, packages=((0, "package-0", 100_000_000),), extra=()):
    for number, name, limit in (*packages, *extra):
        zone = root / f"intel-rapl:{number}"
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text(f"{limit}\n")
        (zone / "energy_uj").write_text("0\n")
    return root


def wind(root, number, uj):
    (root / f"intel-rapl:{number}" / "energy_uj").write_text(f"{uj}\n")


def test_rapl_adds_up_packages_and_nothing_twice(tmp_path):
    extra = [("0:0", "core", 10), (2, "psys", 10**9), ("0:1", "dram", 10)]
    root = rapl(tmp_path, [(0, "package-0", 10**8), (1, "package-1", 10**8)], extra)
    mmio = tmp_path / "intel-rapl-mmio:0"
    mmio.mkdir()
    (mmio / "name").write_text("package-0\n")
    source = RaplSource(root)
    wind(root, 0, 2_000_000)
    wind(root, 1, 500_000)
    for number in ("0:0", 2, "0:1"):
        wind(root, number, 99_000_000)
    assert source.joules() == 2.5


def test_rapl_wrap_around(tmp_path):
    root = rapl(tmp_path)
    wind(root, 0, 90_000_000)
    meter = EnergyMeter(RaplSource(root))
    meter.start()
    used = 0
    position = 90_000_000
    for step in (15_000_000, 60_000_000, 99_999_999, 1, 50_000_000):
        position = (position + step) % 100_000_000
        used += step
        wind(root, 0, position)
        assert meter.read() == pytest.approx(used / 1e6, abs=1e-9)
    meter.stop()
    assert meter.energy_j == pytest.approx(225.0, abs=1e-9)


def test_rapl_that_is_not_there_or_nonsense(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="holds no RAPL package"):
        RaplSource(tmp_path / "none")
    monkeypatch.setattr("nanosprint.training.energy.POWERCAP", tmp_path / "none")
    assert open_meter("mps").reason == "no energy counter is known for device 'mps'"
    root = rapl(tmp_path)
    source = RaplSource(root)
    (root / "intel-rapl:0" / "energy_uj").write_text("?\n")
    with pytest.raises(RuntimeError, match="does not hold a number"):
        source.joules()
    with pytest.raises(RuntimeError, match="does not hold numbers"):
        RaplSource(root)


def test_rapl_without_permission_says_how(tmp_path, monkeypatch):
    root = rapl(tmp_path)
    from pathlib import Path

    read = Path.read_text

    def refuse(self, *args, **kwargs):
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(RuntimeError, match="root only: sudo chmod a"):
        RaplSource(root)


# NVML


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """Two GPUs, named by index and UUID, with counters in millijoules."""

    NVMLError = NVMLError

    def __init__(self):
        super().__init__("pynvml")
        self.millijoules = [1_000, 50_000]
        self.uuids = ["GPU-aa", "GPU-bb"]
        self.init_error = self.energy_error = None
        self.open = 0

    def nvmlInit(self):
        if self.init_error:
            raise NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= 2:
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.energy_error:
            raise NVMLError(self.energy_error)
        return self.millijoules[handle]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize(
    ("gpus", "joules"), [([0], 1.5), ([1], 4.0), ([0, 1], 5.5), (["GPU-aa", "bb"], 5.5), (["bb"], 4.0)]
)
def test_nvml_adds_up_the_gpus_that_are_named(nvml, gpus, joules):
    meter = open_meter("cuda", gpus)
    meter.start()
    nvml.millijoules = [2_500, 54_000]
    meter.stop()
    assert meter.energy_j == joules
    meter.close()
    assert nvml.open == 0


def test_nvml_failures_are_reasons(nvml, monkeypatch):
    assert open_meter("cuda", []).reason == "no GPU was named to measure"
    assert open_meter("cuda", [7]).reason == "NVML does not know GPU 7: Invalid Argument"
    assert "does not know GPU 'zz'" in open_meter("cuda", ["zz"]).reason
    nvml.energy_error = "Not Supported"
    assert open_meter("cuda", [0]).reason == "NVML's total energy counter: Not Supported"
    assert nvml.open == 0
    nvml.init_error = "Driver Not Loaded"
    assert open_meter("cuda", [0]).reason == "NVML does not start: Driver Not Loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'nanosprint[energy]'" in open_meter("cuda", [0]).reason


def test_nvml_lost_in_the_middle(nvml):
    meter = EnergyMeter(NvmlSource([0]))
    meter.start()
    nvml.energy_error = "GPU is lost"
    meter.stop()
    assert meter.energy_j is None
    assert meter.reason == "nvml could not be read during the run: NVML's total energy counter: GPU is lost"


@pytest.mark.gpu
def test_a_real_gpu_uses_energy():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    from nanosprint.training.environment import describe_gpus

    meter = open_meter("cuda", [gpu["uuid"] for gpu in describe_gpus()][:1])
    assert meter.reason is None
    clock = Clock(torch.cuda.synchronize, hooks=[meter])
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    clock.start()
    while clock.train_ms < 2000:
        for _ in range(50):
            x @ x
        torch.cuda.synchronize()
    clock.stop()
    watts = meter.energy_j / (clock.train_ms / 1e3)
    print(f"{watts:.0f} W over {clock.train_ms:.0f} ms")
    assert 50 < watts < 1500
