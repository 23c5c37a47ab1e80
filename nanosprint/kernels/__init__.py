"""Triton kernels, one file per operator of `nanosprint.ops` with the same name.

Nothing here is imported until an operator runs on a GPU: the package works without Triton. The contract, the
reference and the tests' oracle of each kernel are in `nanosprint.ops`; block sizes are in `tuning`.
"""

import importlib.util

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # asked here: the compiler cannot follow the question


def has_triton() -> bool:
    """Whether Triton can be imported; asked without importing it."""
    return _HAS_TRITON
