"""FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), for Hopper: not a dependency, used where it is installed.

Either a module `flash_attn_interface` is installed (built from the FlashAttention repository, folder `hopper`), or the
package `kernels` is, which fetches a built one from the Hugging Face hub at first use.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

from nanosprint.ops.attention_backends import library
from nanosprint.ops.attention_backends.contract import Attention

HUB, HUB_VERSION = "kernels-community/flash-attn3", 1


def missing() -> str | None:
    """Why it cannot be loaded, as far as that shows without importing anything."""
    if any(importlib.util.find_spec(name) for name in ("flash_attn_interface", "kernels")):
        return None
    return "needs the module flash_attn_interface or the package kernels: pip install kernels"


@functools.cache
def load() -> Attention:
    """The back end; ImportError says why there is none. May download."""
    reason = missing()
    if reason is not None:
        raise ImportError(reason)
    module = _installed() or _from_hub()
    try:
        forward, backward = module._flash_attn_forward, module._flash_attn_backward
    except AttributeError as error:
        raise ImportError(f"{module.__name__} has no forward and backward function that we know: {error}") from error
    return library.build("fa3", forward, backward, no_limit=-1)


def _installed() -> ModuleType | None:
    return importlib.import_module("flash_attn_interface") if importlib.util.find_spec("flash_attn_interface") else None


def _from_hub() -> ModuleType:
    kernels = importlib.import_module("kernels")
    try:
        package = kernels.get_kernel(HUB, version=HUB_VERSION)
    except Exception as error:  # no network, no build for this torch: whatever it is, the remedy is the user's
        raise ImportError(f"kernels could not get {HUB}: {type(error).__name__}: {error}") from error
    module: ModuleType = getattr(package, "flash_attn_interface", package)
    return module
