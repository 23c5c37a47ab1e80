"""Optional packages: imported where they are used, with a message that says which extra brings them."""

import importlib
from types import ModuleType

from nanosprint.errors import UserError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional module. Raises ValueError naming the extra of nanosprint to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{purpose} needs the Python package {error.name or module!r}, which is not installed: "
            f"pip install 'nanosprint[{extra}]'"
        ) from None
