import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanosprint.kernels import has_triton
from nanosprint.ops import fp8


@pytest.fixture
def device(request):
    """The device that an FP8 test is parametrized with; one without FP8 is skipped."""
    if request.param == "cuda" and not (torch.cuda.is_available() and fp8.supports_fp8("cuda")):
        pytest.skip("needs a GPU with FP8")
    return request.param


@pytest.fixture
def run_interpreted():
    """Runs a test file as a program under Triton's interpreter, where no GPU could run the kernels themselves.

    Triton reads TRITON_INTERPRET when it is imported, hence a process of its own.
    """
    if not has_triton():
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves are tested here")

    def run(file):
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run([sys.executable, file], check=True, env=env, timeout=120)

    return run
