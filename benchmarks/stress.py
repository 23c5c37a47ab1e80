"""Every operator again and again, or a training step: the same bits each time, or something is wrong. On a GPU.

    python -m benchmarks.stress [--seconds 60] [--company 1] [--only NAME,...]
    python -m benchmarks.stress --step fast [KEY=VALUE ...] [--stage 0] [--in-a-row 2]

For races, and for memory that is read before anybody has written it. Both are rare and depend on what else happens, so

- all free memory is filled with NaN before each repetition (`poison`): what nobody wrote is not a harmless old number;
- company (`company`) uses the GPU meanwhile, in bursts: kernels are interrupted, and the host gets far ahead;
- outcomes are compared bit for bit with the first one, and where they differ it says in which rows and columns.

Operators are those of `benchmarks.ops` and a few more, at a full step's tokens; what they change in place is put back
before each repetition and compared, too. None of them adds up by atomics, so none may differ. --tolerance is for code
that does: differences up to that share of the norm pass, if all numbers are finite.

A step is one of `bench_step`'s, recorded where the recipe is, on random tokens; --in-a-row of them from the same state
are a repetition, by default as many as it takes until every group of parameters has moved. Compared are the losses, the
gradients in the banks before each update, and in the end all of the model and the optimizers' state.

An operator that fails stops no other. Exit status 1 if anything differed, failed, or was not finite.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_step import Bench, places
from benchmarks.company import company
from benchmarks.difference import copied, differs, strange, tensors_of
from benchmarks.harness import synchronize
from benchmarks.inputs import Sizes, tiny
from benchmarks.ops.__main__ import FEW, OPERATORS, chosen
from benchmarks.ops.case import Case, Operator
from benchmarks.ops.measure import release, told, warm_up
from benchmarks.poison import poison, spoil
from benchmarks.stress_more import OPERATORS as MORE
from nanosprint.config.edit import parse_overrides
from nanosprint.training.batch import ModelInput
from nanosprint.training.replay import Replayed
from nanosprint.training.step import Backward, train_step

Outcome = dict[str, Tensor]


@dataclass
class Report:
    """What became of the repetitions of one thing. bad: a text for each that was not as the first, or failed."""

    name: str
    repeats: int = 0
    bad: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = f"{len(self.bad)} WRONG: {self.bad[0]}" if self.bad else "the same" if self.repeats else "no repetition"
        return f"{self.name:64s} {self.repeats:5d} repetitions, {what}"


def repeat(name: str, once: Callable[[], Outcome], seconds: float, device: torch.device, tolerance: float) -> Report:
    """`once` for so many seconds, but twice at least. It returns tensors of its own or of no further use."""
    report, end = Report(name), time.monotonic() + seconds
    try:
        poison(device)
        first = {key: copied([tensor])[0] for key, tensor in once().items()}
        report.bad += [f"at first, {key}: {text}" for key, t in first.items() if (text := strange(t)) is not None]
        while report.repeats < 1 or time.monotonic() < end:
            poison(device)
            again = once()
            report.repeats += 1
            found = [f"{key}: {text}" for key, t in first.items() if (text := differs(t, again[key], tolerance))]
            if found:
                others = f" (and {len(found) - 1} tensors more)" if len(found) > 1 else ""
                report.bad.append(f"repetition {report.repeats}, {found[0]}{others}")
            del again
    except Exception as error:  # one that fails must not stop the others
        report.bad.append(told(error))
    return report


def of_case(case: Case) -> Callable[[], Outcome]:
    """A call on the data as it was at first: what it returns, and what it has written in place."""
    changed: list[Tensor] = []
    if case.changes is not None:
        case.ours()  # optimizers make their state in the first step
        changed = list(tensors_of(case.changes()))
    before = copied(changed)

    def once() -> Outcome:
        with torch.no_grad():
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
        for tensor in case.fills:
            spoil(tensor)
        columns = {"result": tensors_of(case.ours()), "filled": case.fills, "changed": changed}
        return {f"{what} {i}": tensor for what, column in columns.items() for i, tensor in enumerate(column)}

    return once


def of_operators(operators: Sequence[Operator], sizes: Sizes, seconds: float, tolerance: float) -> Iterator[Report]:
    """A report for each case, those of an operator sharing its part of the time."""
    end, device = time.monotonic() + seconds, torch.device(sizes.device)
    for i, operator in enumerate(operators):
        share = (end - time.monotonic()) / (len(operators) - i)
        try:
            cases = list(operator.make(replace(sizes)))
        except Exception as error:
            yield Report(operator.name, bad=[told(error)])
            continue
        for case in cases:
            name = ", ".join(filter(None, (operator.name, case.name, case.shape)))
            yield _of_one(name, case, share / len(cases), device, tolerance)
        del cases, case
        release()


def _of_one(name: str, case: Case, seconds: float, device: torch.device, tolerance: float) -> Report:
    try:
        once = of_case(case)
    except Exception as error:
        return Report(name, bad=[told(error)])
    return repeat(name, once, seconds, device, tolerance)


class Steps:
    """Steps of a recipe from one and the same state."""

    def __init__(self, bench: Bench, stage: int | None, in_a_row: int | None) -> None:
        """Compiles what is to be compiled and makes the recordings."""
        self.bench, (self.place,) = bench, places(bench.recipe, None, stage)
        self.count = in_a_row or bench.period
        self.plans = [bench.plan(self.place, i) for i in range(self.count)]
        self.inputs = [bench.inputs(plan) for plan in self.plans]
        self.start = bench.state.snapshot()
        self()  # first calls, which compile and record
        self.start = bench.state.snapshot()  # no longer that of a model which has learned nothing
        self()

    def __call__(self) -> Outcome:
        bench, outcome = self.bench, Outcome()
        bench.state.put_back(self.start)
        for i, (plan, inputs) in enumerate(zip(self.plans, self.inputs, strict=True)):
            backward = self._watched(i, outcome)
            outcome[f"step {i}, loss"] = train_step(backward, bench.state, inputs, plan, bench.recipe.train)
        after = {"model": bench.state.model.state_dict(), "optimizers": bench.state.engine.snapshot()["states"]}
        return outcome | {f"after all, {name}": tensor for name, tensor in _named(after)}

    def _watched(self, step: int, outcome: Outcome) -> Backward:
        """The bench's backward pass, with NaN in free memory; of the last micro-batch gradients are noted."""
        calls = 0

        def backward(arguments: ModelInput, divisor: float) -> Tensor:
            nonlocal calls
            poison(self.bench.device)
            loss = self.bench.backward(arguments, divisor)
            calls += 1
            if calls == len(self.inputs[step]):
                for name, parameter in self.bench.state.model.named_parameters():
                    if parameter.grad is not None:
                        outcome[f"step {step}, gradient of {name}"] = copied([parameter.grad])[0]
            poison(self.bench.device)
            return loss

        return backward


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in dictionaries and lists, by the way to them."""
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named(part, f"{name}.{key}" if name else str(key))


def check(args: argparse.Namespace) -> int:
    """Print a line for each report as it comes; how many had something wrong."""
    device, wrong, begin = torch.device(args.device), 0, time.monotonic()
    for report in _reports(args, device):
        wrong += bool(report.bad)
        print(report, flush=True)
        for text in report.bad[1:4]:
            print(f"    {text}", flush=True)
    print(f"{wrong or 'nothing'} wrong, {time.monotonic() - begin:.0f} s, company: {args.company}", flush=True)
    return wrong


def _reports(args: argparse.Namespace, device: torch.device) -> Iterator[Report]:
    with contextlib.ExitStack() as stack:
        if args.step is not None:
            words = {"exec.device": device.type, **parse_overrides(args.overrides)}
            steps = Steps(Bench(args.step, words), args.stage, args.in_a_row)
            backward = steps.bench.backward
            recorded = backward.recorded() if isinstance(backward, Replayed) else 0
            _say(f"{args.step}, {steps.count} steps a repetition, {recorded} recordings")
            stack.enter_context(company(args.company, device))
            yield repeat(f"{args.step}, {steps.place.name}", steps, args.seconds, device, args.tolerance)
            return
        operators = chosen(args.only, (*OPERATORS, *MORE))
        sizes = Sizes(tokens=args.tokens, device=args.device) if device.type == "cuda" else tiny()
        if device.type == "cuda":
            warm_up(operators, replace(sizes, tokens=FEW))
            release()
            _say("kernels compiled")
        stack.enter_context(company(args.company, device))
        yield from of_operators(operators, sizes, args.seconds, args.tolerance)


def _say(text: str) -> None:
    synchronize()
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the step's recipe and execution")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of repetitions; compiling comes on top (%(default)s)"
    )
    parser.add_argument("--company", type=int, default=1, metavar="N", help="processes beside this one (%(default)s)")
    parser.add_argument("--only", metavar="NAME,...", help="operators whose names contain one of these")
    parser.add_argument("--tokens", type=int, default=98_304, help="of an operator (%(default)s; on a CPU always 96)")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="relative; 0: bit for bit")
    parser.add_argument("--step", metavar="RECIPE", help="a training step instead of operators")
    parser.add_argument("--stage", type=int, metavar="N", help="of the recipe, counted from 0; else the run's middle")
    parser.add_argument("--in-a-row", type=int, metavar="N", help="steps of a repetition")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: tiny sizes")
    args = parser.parse_intermixed_args()
    if args.overrides and args.step is None:
        parser.error("overrides are for --step")
    try:
        return int(check(args) > 0)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
