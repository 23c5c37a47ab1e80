"""Triton kernels, one file per operator of `nanosprint.ops` with the same name.

Nothing here is imported until an operator runs on a GPU: the package works without Triton. The contract, the
reference and the tests' oracle of each kernel are in `nanosprint.ops`; block sizes are in `tuning`.
"""

import functools
import importlib.util
import logging

from nanosprint.kernels.tuning import GLUON

_log = logging.getLogger(__name__)
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # asked here: the compiler cannot follow the question


def has_triton() -> bool:
    """Whether Triton can be imported; asked without importing it."""
    return _HAS_TRITON


@functools.cache
def has_gluon() -> bool:
    """Whether Triton is one whose Gluon our kernels in it are written for. Another one is logged once."""
    import triton

    if str(triton.__version__).startswith(GLUON):
        return True
    _log.warning(
        "Triton %s: kernels in Gluon (attention, MLP, loss, Muon) are for %s*, slower ones in Triton serve",
        triton.__version__,
        "*, ".join(GLUON),
    )
    return False
