"""Sort a model's parameters into those for Muon and those for Adam, with the reason for each.

Muon is for matrices that map activations to activations inside the trunk, the stack of repeated layers. The rest is
Adam's: embedding tables (a row is a vector of its own, most rows have no gradient), the output head, everything with
one axis (gains, biases, gates), and input or output projections outside the trunk.

A model does not say which matrix is its head, so this guesses from names and shapes and shows its reasons:
`print(split_parameters(model).explain())`. Patterns overrule any guess. nanosprint's own models need no guess: their
modules declare roles.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn

Choice = Literal["muon", "adam", "frozen"]
Named = tuple[str, nn.Parameter]

HEAD_NAMES = ("head", "*_head", "output", "unembed*", "*classifier", "embed_out", "logits")
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Row:
    """One parameter's place: its names (several where it is tied), where it goes, and why."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    choice: Choice
    reason: str
    blocks: int = 1


@dataclass(frozen=True)
class ParameterSplit:
    """Which parameter goes where. Each is in exactly one list, under its first name."""

    rows: tuple[Row, ...] = field(repr=False)

    @property
    def muon(self) -> list[Named]:
        """(name, parameter) pairs for `Muon`. Merged matrices count as one here; see `muon_groups`."""
        return self._named("muon")

    @property
    def adam(self) -> list[Named]:
        """(name, parameter) pairs for `AdamW`."""
        return self._named("adam")

    def muon_groups(self) -> list[dict]:
        """Param groups for `Muon`, one per number of matrices that a tensor stacks (merged QKV: split=3)."""
        counts = sorted({row.blocks for row in self.rows if row.choice == "muon"})
        return [{"params": self._named("muon", blocks), "split": blocks} for blocks in counts]

    def explain(self) -> str:
        """A text table: one line per parameter with its shape, optimizer and reason, and the totals."""
        lines = [("parameter", "shape", "for", "why")]
        for row in self.rows:
            shape = "x".join(map(str, row.parameter.shape)) or "scalar"
            lines.append((" = ".join(row.names), shape, row.choice, row.reason))
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        table = ["  ".join([*map(str.ljust, line[:3], widths), line[3]]) for line in lines]
        return "\n".join([*table, *self._totals()])

    def _named(self, choice: Choice, blocks: int | None = None) -> list[Named]:
        rows = (row for row in self.rows if row.choice == choice and blocks in (None, row.blocks))
        return [(row.names[0], row.parameter) for row in rows]

    def _totals(self) -> list[str]:
        totals = []
        for choice in ("muon", "adam", "frozen"):
            chosen = [row.parameter for row in self.rows if row.choice == choice]
            if chosen:
                totals.append(f"{choice}: {len(chosen)} tensors, {sum(p.numel() for p in chosen):,} numbers")
        return totals


def split_parameters(
    model: nn.Module,
    *,
    muon: Iterable[str] = (),
    adam: Iterable[str] = (),
    blocks: dict[str, int] | None = None,
    vocab_size: int | None = None,
) -> ParameterSplit:
    """Decide for each parameter of `model` whether Muon or Adam should update it; the model is not changed.

    muon, adam: shell patterns of parameter names ("lm_head.weight", "*.gate.*") that overrule the guesses.
    blocks: patterns of merged matrices and how many equal blocks of rows each stacks, such as {"*.qkv.weight": 3};
    nn.MultiheadAttention's are known. vocab_size: a linear layer with so many outputs is a head; by default the
    sizes of the model's embedding tables, outside the trunk only. Tied parameters are counted once and judged by all
    their names; frozen ones are left out of both lists. Raises ValueError for a pattern that matches nothing, a
    parameter claimed by both sides, and a vector claimed for Muon.
    """
    facts = _Facts(model, vocab_size)
    patterns = {"muon": tuple(muon), "adam": tuple(adam), "blocks": tuple(blocks or {})}
    every_name = [name for names in facts.names.values() for name in names]
    for option, wanted in patterns.items():
        for pattern in wanted:
            if not any(fnmatchcase(name, pattern) for name in every_name):
                raise ValueError(f"{option}: no parameter is called {pattern!r}; the first are {every_name[:5]}")
    rows = []
    for parameter, names in facts.names.items():
        choice, reason = _by_pattern(parameter, names, patterns["muon"], patterns["adam"]) or facts.judge(parameter)
        count = next((n for p, n in (blocks or {}).items() if _matches(names, p)), facts.merged.get(parameter, 1))
        if count > 1 and choice == "muon":
            reason += f"; {count} matrices in one, see muon_groups()"
        rows.append(Row(tuple(names), parameter, choice, reason, count))
    return ParameterSplit(tuple(rows))


class _Facts:
    """What the module tree says about each parameter."""

    def __init__(self, model: nn.Module, vocab_size: int | None) -> None:
        self.names: dict[nn.Parameter, list[str]] = {}
        self.trunk: set[Tensor] = set()
        self.tables: dict[Tensor, str] = {}
        self.merged: dict[Tensor, int] = {}
        self.linears: dict[Tensor, tuple[str, int]] = {}
        self.vocab_size = vocab_size
        for path, module in model.named_modules(remove_duplicate=False):
            for name, parameter in module.named_parameters(path, recurse=False):
                self.names.setdefault(parameter, []).append(name)
            self._note(path, module)
        self.table_sizes = {table.shape[0] for table in self.tables}

    def _note(self, path: str, module: nn.Module) -> None:
        if isinstance(module, CONTAINERS):
            self.trunk.update(module.parameters())
        elif isinstance(module, TABLES):
            self.tables[module.weight] = path
        elif isinstance(module, nn.Linear):
            self.linears[module.weight] = (path, module.out_features)
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            self.merged[module.in_proj_weight] = 3

    def judge(self, parameter: nn.Parameter) -> tuple[Choice, str]:
        """Where a parameter that no pattern claims goes, by the first rule that fits."""
        if not parameter.requires_grad:
            return "frozen", "requires_grad is False"
        if parameter in self.tables:
            tied = ", tied to the head" if parameter in self.linears else ""
            return "adam", f"embedding table{tied}"
        if parameter.ndim < 2:
            return "adam", "one axis or none: a gain, bias or scalar"
        if 1 in (parameter.shape[0], parameter.shape[1:].numel()):
            return "adam", "a single row or column: nothing to orthogonalise"
        return self._head(parameter) or self._inside(parameter)

    def _head(self, parameter: nn.Parameter) -> tuple[Choice, str] | None:
        path, outputs = self.linears.get(parameter, ("", 0))
        if outputs and outputs == self.vocab_size:
            return "adam", f"output head: {outputs} outputs are the vocabulary"
        if parameter in self.trunk or not outputs:
            return None  # a hidden layer may well be as wide as some table is long
        if outputs in self.table_sizes:
            return "adam", f"output head: {outputs} outputs, as many as an embedding has rows"
        if any(fnmatchcase(path.rpartition(".")[2], pattern) for pattern in HEAD_NAMES):
            return "adam", "output head, by its name"
        return None

    def _inside(self, parameter: nn.Parameter) -> tuple[Choice, str]:
        flat = f", flattened to {parameter.shape[0]}x{parameter.shape[1:].numel()}" if parameter.ndim > 2 else ""
        if parameter in self.trunk:
            return "muon", f"matrix inside the trunk{flat}"
        if self.trunk:
            return "adam", "matrix outside the trunk's repeated layers"
        return "muon", f"hidden matrix{flat}"


def _by_pattern(
    parameter: nn.Parameter, names: list[str], muon: tuple[str, ...], adam: tuple[str, ...]
) -> tuple[Choice, str] | None:
    for_muon = next((p for p in muon if _matches(names, p)), None)
    for_adam = next((p for p in adam if _matches(names, p)), None)
    if for_muon is not None and for_adam is not None:
        raise ValueError(f"{names[0]} is claimed by muon={for_muon!r} and adam={for_adam!r}: make one more narrow")
    if not parameter.requires_grad:
        return None
    if for_muon is not None:
        if parameter.ndim < 2:
            raise ValueError(
                f"muon={for_muon!r} claims {names[0]} of shape {tuple(parameter.shape)}, which is no matrix: "
                "narrow the pattern"
            )
        return "muon", f"you said so: {for_muon}"
    return ("adam", f"you said so: {for_adam}") if for_adam is not None else None


def _matches(names: list[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
