"""Triton kernels, one file per operator of `nanosprint.ops` with the same name.

Nothing here is imported until an operator runs on a GPU: the package works without Triton. The contract, the
reference and the tests' oracle of each kernel are in `nanosprint.ops`; block sizes are in `tuning`.
"""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; asked without importing it."""
    return importlib.util.find_spec("triton") is not None
