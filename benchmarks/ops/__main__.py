"""Every operator at the record's shapes: `python -m benchmarks.ops [--only NAME,...] [--tokens N,...]`, on a GPU.

A row for each: its time; the rate that is; the floor, the larger of bytes at a copy's rate and operations at the matrix
rate (`floors.py`), and the share of it that is reached; the same of eager PyTorch operators, of these compiled, and of
a library, with their ratio to ours; the relative error against the formula in fp32. An operator that is wrong is
reported as WRONG and not timed. Rows of "forward and backward" include the forward pass.

Times are those of the device, medians of 5 to 30 calls between events, on data that mostly exceeds the L2 cache;
"(graph)": replayed, where the host could not keep up; "(launches)": at the host's pace, where that was not possible.
Compiling comes last, as far as --seconds allow.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.floors import CEILINGS, Ceilings, ceilings_of
from benchmarks.harness import write_rows
from benchmarks.inputs import Sizes, tiny
from benchmarks.ladder_table import between
from benchmarks.ops import attention, head, matrices, mlp, tables
from benchmarks.ops.case import Operator
from benchmarks.ops.measure import Row, add_compiled, awaits_compiling, release, rows_of, warm_up
from benchmarks.ops.table import line, table

FEW = 4096  # tokens to compile kernels with, which do not depend on how many there are
OPERATORS = (
    *attention.OPERATORS,
    *head.OPERATORS,
    *mlp.OPERATORS,
    *tables.OPERATORS,
    *matrices.OPERATORS,
)


def chosen(words: str | None, among: Sequence[Operator] = OPERATORS) -> list[Operator]:
    """Those whose name contains one of the words, which commas part; all without. ValueError for an unknown one."""
    wanted = [word.strip() for word in words.split(",")] if words else [""]
    for word in wanted:
        if not any(word in operator.name for operator in among):
            raise ValueError(f"--only {word}: no operator is called so; there are {'; '.join(o.name for o in among)}")
    return [operator for operator in among if any(word in operator.name for word in wanted)]


def run(
    operators: Sequence[Operator], sizes: Sequence[Sizes], ceilings: Ceilings | None, compile_s: float
) -> list[Row]:
    """Rows of all operators at all sizes, those that no token changes once. compile_s: seconds from now to compile in.

    What takes no compiling is measured in any case.
    """
    begin, rows = time.monotonic(), []
    pairs = [(o, s) for i, s in enumerate(sizes) for o in operators if o.by_tokens or i == 0]
    for operator, size in pairs:
        found = rows_of(operator, size, ceilings)
        rows += found
        release()
        print(*(line(row) for row in found), sep="\n", flush=True)
    for operator, size in pairs:
        if time.monotonic() - begin < compile_s and awaits_compiling(operator, size, rows):
            add_compiled(operator, size, rows)
            release()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help="operators whose names contain one of these")
    parser.add_argument("--tokens", default="49152,196608", help="comma-separated (%(default)s; on a CPU always 96)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: tiny sizes")
    parser.add_argument("--no-compile", action="store_true", help="leave out what torch compiles")
    parser.add_argument("--seconds", type=float, default=75, help="compile nothing after that many (%(default)s)")
    parser.add_argument("--out", type=Path, help="append the rows here")
    parser.add_argument("--doc", type=Path, help="put the table between this file's <!-- ops --> ... <!-- /ops -->")
    args = parser.parse_args()
    try:
        operators = chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    on_gpu = args.device.startswith("cuda")
    if not on_gpu:
        torch.set_num_threads(1)  # of such tiny tensors
    name = torch.cuda.get_device_name(args.device) if on_gpu else args.device
    ceilings = ceilings_of(name)
    if ceilings is None:
        print(f"{name}: its ceilings are not known (only those of {', '.join(CEILINGS)}), so there are no floors")
    counts = [int(word) for word in args.tokens.split(",")]
    sizes = [Sizes(tokens=n, device=args.device) for n in counts] if on_gpu else [tiny()]
    begin = time.monotonic()
    if on_gpu:
        warm_up(operators, replace(sizes[0], tokens=FEW))
        release()
        print(f"kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
    left = args.seconds - (time.monotonic() - begin)
    rows = run(operators, sizes, ceilings, 0.0 if args.no_compile else left)
    text = table(rows)
    print(f"\n{text}\n\n{name}, torch {torch.__version__}; {time.monotonic() - begin:.0f} s")
    write_rows(rows, args.out)
    if args.doc is not None:
        args.doc.write_text(between(args.doc.read_text(), "<!-- ops -->", "<!-- /ops -->", text))


if __name__ == "__main__":
    main()
