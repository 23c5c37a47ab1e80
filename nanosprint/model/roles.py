"""Every parameter says what it is for; the recipe's groups say what happens to each role."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Role:
    """The name a `ParamGroup` matches, and how many matrices are stored one above the other in the tensor."""

    name: str
    blocks: int = 1


def collect_roles(model: nn.Module) -> dict[str, Role]:
    """Role of each parameter by its full name, from the `ROLES` of the module, or of its class, that owns it.

    Raises ValueError naming a parameter whose module declares no role for it.
    """
    roles: dict[str, Role] = {}
    for prefix, module in model.named_modules():
        declared = getattr(module, "ROLES", {})
        for name, _ in module.named_parameters(prefix=prefix, recurse=False):
            short = name.rpartition(".")[2]
            if short not in declared:
                raise ValueError(
                    f"{type(module).__name__} declares no role for its parameter {short!r}: add it to ROLES"
                )
            roles[name] = declared[short]
    return roles
