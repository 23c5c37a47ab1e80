import os
from pathlib import Path

import pytest
import torch

from nanosprint.kernels import has_triton
from nanosprint.ops import fp8
from tests import forked

ROOT = Path(__file__).parents[2]


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
        module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = forked.run(module, cwd=ROOT, environment=environment, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    return run
