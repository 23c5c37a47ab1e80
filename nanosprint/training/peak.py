"""The arithmetic rate that a run's FLOP utilisation (MFU) is measured against."""

import re
import time
from typing import NamedTuple

import torch

# Dense matrix rates of the data sheets, in TFLOP/s, bf16 without sparsity. First match wins.
_BF16_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.0),
)


class Peak(NamedTuple):
    """FLOP/s of one device and where the figure comes from."""

    flops: float | None
    source: str


def peak(device: torch.device, compute: str) -> Peak:
    """The ceiling for `compute` ("bf16", "fp32") products on `device`: data sheet for GPUs, measured on CPUs."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, tflops in _BF16_TFLOPS:
            if re.search(rf"\b{part}\b", name):
                return Peak(tflops * 1e12, f"{name}: dense bf16 of its data sheet")
        return Peak(None, f"no data sheet figure is known for {name}")
    if device.type == "cpu":
        return Peak(
            _measure(compute), f"measured: {compute} product of 1024 x 1024 on {torch.get_num_threads()} threads"
        )
    return Peak(None, f"no figure is known for {device.type}")


def _measure(compute: str, size: int = 1024, repeats: int = 5) -> float:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[compute]
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
