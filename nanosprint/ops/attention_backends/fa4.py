"""FlashAttention-4 (package flash-attn-4, written in CuTe's Python), for Hopper and later: used where it is installed.

Its kernels are compiled at first use, some seconds for every combination of head size and kind of window.
"""

import functools
import importlib
import importlib.util

from nanosprint.ops.attention_backends import library
from nanosprint.ops.attention_backends.contract import Attention


def missing() -> str | None:
    """Why it cannot be loaded, as far as that shows without importing anything."""
    parts = ("flash_attn", "cutlass", "tvm_ffi", "quack")
    absent = [name for name in parts if importlib.util.find_spec(name) is None]
    return (
        f"needs the package flash-attn-4 (no module {absent[0]}): pip install 'flash-attn-4[cu13]'" if absent else None
    )


@functools.cache
def load() -> Attention:
    """The back end; ImportError says why there is none."""
    reason = missing()
    if reason is not None:
        raise ImportError(reason)
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
        forward, backward = interface._flash_attn_fwd, interface._flash_attn_bwd
    except Exception as error:  # cutlass raises what it likes when driver, toolkit and wheel disagree
        raise ImportError(f"flash-attn-4 does not load: {type(error).__name__}: {error}") from error
    return library.build("fa4", forward, backward, no_limit=None)
