"""On what a run runs: versions, platform, CPU, GPUs and the commit of the checkout. Fast enough for every start.

Versions come from package metadata, so that nothing is imported for their sake; GPUs are looked at only where torch
is already loaded.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
TIMEOUT_S = 2.0  # for each program that is asked; a run must not hang on git over a network drive


def environment(*, gpus: bool = True) -> dict[str, Any]:
    """A dict for `environment.json`.

    `versions`: nanosprint, python, torch, numpy, triton, cuda, driver; None for what is not there. `platform`: text.
    `cpu`: {name, cores, usable_cores, memory_bytes}. `gpus`: [{index, name, memory_bytes, uuid}], those that torch
    sees; looking at them starts CUDA, which `gpus=False` avoids. `commit`, `dirty`: of the checkout the package lies
    in, else None with `commit_reason`. Never raises for something missing.
    """
    commit, dirty, reason = commit_of(PACKAGE.parent)
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpu": describe_cpu(),
        "gpus": describe_gpus() if gpus else [],
        "commit": commit,
        "dirty": dirty,
        "commit_reason": reason,
    }


def versions() -> dict[str, str | None]:
    """Version of each part that a result can depend on; None for what is not there."""
    torch = sys.modules.get("torch")
    return {
        "nanosprint": _version("nanosprint"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "triton": _version("triton"),
        "cuda": torch.version.cuda if torch is not None else None,
        "driver": _nvidia_driver(),
    }


def code_checksum(package: Path = PACKAGE) -> str:
    """Of every Python file of the package. A commit says less: a checkout may be changed, an installation has none."""
    digest = sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def describe_cpu() -> dict[str, Any]:
    """The processor's name, its logical cores, how many of them this process may use, and the machine's memory."""
    try:
        memory_bytes: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory_bytes = None
    return {"name": _cpu_name(), "cores": os.cpu_count(), "usable_cores": usable_cores(), "memory_bytes": memory_bytes}


def usable_cores() -> int | None:
    """The logical cores that this process may use; None where nobody knows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def describe_gpus() -> list[dict[str, Any]]:
    """The CUDA devices that torch sees, in its order; none where torch is not loaded. UUIDs are in NVML's spelling."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None
        gpus.append({"index": index, "name": properties.name, "memory_bytes": properties.total_memory, "uuid": uuid})
    return gpus


def commit_of(checkout: Path) -> tuple[str | None, bool | None, str | None]:
    """(commit, dirty, reason) of a git checkout; the first two are None where the third says why.

    Dirty means that the code of the package differs from the commit, files that git does not know included.
    """
    if not (checkout / ".git").exists():
        return None, None, f"{checkout} is not a git checkout: the package version stands for the code"
    # --git-dir, because a hook that runs us sets GIT_DIR to its own repository
    command = ["git", "--no-optional-locks", "--git-dir", str(checkout / ".git"), "--work-tree", str(checkout)]
    command += ["status", "--porcelain=v2", "--branch", "--", PACKAGE.name]
    output, reason = _ask(command, checkout)
    if output is None:
        return None, None, reason
    found = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", output, re.MULTILINE)
    if not found:
        return None, None, f"{checkout} has no commit yet"
    return found[1], any(line and not line.startswith("#") for line in output.splitlines()), None


def _ask(command: list[str], folder: Path | None = None) -> tuple[str | None, str | None]:
    """What a program prints, or None and the reason."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} did not answer within {TIMEOUT_S:g} s"
    except OSError as error:
        return None, f"{command[0]} cannot be run: {error.strerror}"
    if done.returncode:
        return None, f"{command[0]}: {done.stderr.strip()}"
    return done.stdout, None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return found[1].strip()
    if sys.platform == "darwin":
        return (_ask(["sysctl", "-n", "machdep.cpu.brand_string"])[0] or "").strip() or None
    return platform.processor() or platform.machine() or None


def _nvidia_driver() -> str | None:
    try:
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None
