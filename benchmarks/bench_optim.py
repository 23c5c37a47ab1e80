"""What an optimizer step costs: `python benchmarks/bench_optim.py [--device cpu|cuda] [--muon] [--json FILE]`.

On a CPU: models of 0.5 to 2 M parameters (about 30 tensors), Muon on the matrices and AdamW on the rest, with the
share that Newton-Schulz's arithmetic takes, since the remainder is what overhead can be removed from.

On a GPU: the whole Muon update of a 124M GPT-2 (12 layers of four 768 x 768 and two 3072 x 768 matrices), eager and
compiled, with and without the Triton kernels, beside two roofs: Newton-Schulz's operations at the matrix rate
measured on the same card, and the bytes that the update must move. Target on an H200: 3.5 ms. "host" is the time until
a step has been launched, which must stay below the time that it takes. AdamW on its embeddings and SOAP's step are
timed as well, unless --muon asks for Muon alone.

Times are per step: median with 20th and 80th percentile. Gradients are random (zeros run faster than real data).
"""

import argparse
import contextlib
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from nanosprint.config import AdamConfig, MuonConfig, ParamGroup, Precision
from nanosprint.config.schedule import StepPlan
from nanosprint.kernels import tuning
from nanosprint.model.roles import Role
from nanosprint.ops import polar
from nanosprint.ops.polar import ORTHOGONALIZERS, orthogonalize_flops
from nanosprint.optim import SOAP, AdamW, Muon
from nanosprint.optim import muon as rule
from nanosprint.optim.engine import Engine

PEAK_BF16 = 989e12  # dense, H100 and H200 SXM by the datasheet


def time_ms(function, device, repeats):
    """(median, 20th, 80th percentile) in milliseconds of `function()`, after a warm-up."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - begin))
    times.sort()
    return statistics.median(times), times[len(times) // 5], times[4 * len(times) // 5]


def gpt_shapes(dim, layers, vocab, positions=0):
    """(matrices of the trunk, the rest) of a GPT without biases; Q, K and V apart."""
    matrices = [(dim, dim)] * 4 * layers + [(4 * dim, dim), (dim, 4 * dim)] * layers
    rest = [(vocab, dim), (vocab, dim), *([(positions, dim)] if positions else []), *[(dim,)] * 2]
    return matrices, rest


def make_params(shapes, device, dtype=torch.float32):
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = 1e-3 * torch.randn_like(p)
    return params


def flops(shapes):
    return sum(orthogonalize_flops(1, *shape) for shape in shapes)


def muon_bytes(shapes):
    """fp32 gradient, momentum and weight once in and once out where needed, and the bf16 update twice each way."""
    return sum(rows * cols for rows, cols in shapes) * (4 + 2 * 4 + 2 * 4 + 4 * 2)


def symmetric_flops(shapes):
    """The same with only half of each symmetric product."""
    return sum(5 * (3 * min(s) ** 2 * max(s) + min(s) ** 3) for s in shapes)


@contextlib.contextmanager
def without_kernels():
    """cuBLAS and torch's own elementwise kernels only."""
    kept = tuning.MEASURED, polar.has_triton, rule._fusible
    tuning.MEASURED, polar.has_triton, rule._fusible = (), lambda: False, lambda *_: False
    try:
        yield
    finally:
        tuning.MEASURED, polar.has_triton, rule._fusible = kept


def bench_cpu(rows, muon_alone):
    for dim, layers in ((8, 4), (128, 3), (128, 4), (192, 4)):  # the first: overhead and nothing else
        matrices, rest = gpt_shapes(dim, layers, vocab=96)
        trunk, others = make_params(matrices, "cpu"), make_params(rest, "cpu")
        muon, adam = Muon(trunk, lr=1e-4), AdamW(others, lr=1e-4)
        stacks = [torch.randn(matrices.count(s), *s).bfloat16() for s in dict.fromkeys(matrices)]
        size = sum(p.numel() for p in trunk + others)
        timed = {
            "Muon + AdamW": lambda m=muon, a=adam: (m.step(), a.step()),
            "Muon + AdamW as in training": training_engine(matrices, rest, "cpu"),
            "Muon": muon.step,
            "  of which Newton-Schulz": lambda s=stacks: [ORTHOGONALIZERS["ns5"](x) for x in s],
            "AdamW": adam.step,
            "AdamW on everything": AdamW(trunk + others, lr=1e-4).step,
            "torch.optim.AdamW on everything": torch.optim.AdamW(trunk + others, lr=1e-4).step,
            "torch.optim.Muon": torch.optim.Muon(trunk, lr=1e-4).step,
        }
        print(f"\n{size / 1e6:.2f} M parameters, dim {dim}, {layers} layers, {len(trunk + others)} tensors")
        for name, function in timed.items():
            median, low, high = time_ms(function, "cpu", 40)
            rate = f"  {flops(matrices) / median / 1e9:.2f} TFLOP/s" if "Newton" in name else ""
            print(f"  {name:34s} {median:8.3f} ms  ({low:.3f} .. {high:.3f}){rate}")
            rows.append({"name": name.strip(), "dim": dim, "layers": layers, "ms": median, "p20": low, "p80": high})


def matmul_rate():
    """bf16 FLOP/s of one large product on random data: the roof that this card really has."""
    A, B = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / (1e-3 * time_ms(lambda: A @ B, "cuda", 20)[0])


def copy_rate():
    """Bytes/s read plus written by a device-to-device copy."""
    a = torch.randn(2**28, device="cuda")
    b = torch.empty_like(a)
    return 8 * 2**28 / (1e-3 * time_ms(lambda: b.copy_(a), "cuda", 20)[0])


def bench_cuda(rows, muon_alone):
    matrices, rest = gpt_shapes(768, 12, vocab=50_304, positions=1024)
    rate, bandwidth = matmul_rate(), copy_rate()
    work, traffic = flops(matrices), muon_bytes(matrices)
    print(f"\n{torch.cuda.get_device_name()}: {rate / 1e12:.0f} TFLOP/s bf16, {bandwidth / 1e12:.2f} TB/s measured")
    halved = symmetric_flops(matrices)
    print(f"Muon, {len(matrices)} matrices: {work / 1e12:.2f} TFLOP = {1e3 * work / rate:.2f} ms", end=", ")
    print(f"with symmetry {1e3 * halved / rate:.2f} ms; ", end="")
    print(f"{traffic / 1e9:.2f} GB = {1e3 * traffic / bandwidth:.2f} ms; target 3.5 ms")

    def report(name, function, count=None, repeats=40):
        median, low, high = time_ms(function, "cuda", repeats)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        host = 1e3 * (time.perf_counter() - begin)
        speed = (count or 0) / (1e-3 * median)
        share = f"  {speed / 1e12:.0f} TFLOP/s = {speed / PEAK_BF16:.0%} of peak" if count else ""
        print(f"  {name:34s} {median:8.3f} ms  ({low:.3f} .. {high:.3f}), host {host:.2f}{share}")
        rows.append({"name": name, "ms": median, "p20": low, "p80": high, "host_ms": host, "flops": count})

    stacks = [torch.randn(matrices.count(s), *s, device="cuda").bfloat16() for s in dict.fromkeys(matrices)]
    for way, context in (("cuBLAS", without_kernels), ("Triton", contextlib.nullcontext)):
        with context():
            for name, function in ORTHOGONALIZERS.items():
                report(f"{name} alone, {way}", lambda f=function: [f(x) for x in stacks], work)
            for dtype in (torch.float32, torch.bfloat16):
                label = f"{way}, {dtype}".replace("torch.", "")
                trunk = make_params(matrices, "cuda", dtype)
                report(f"Muon, {label}", Muon(trunk, lr=1e-4).step, work)
                if way == "Triton":
                    lr, momentum = torch.tensor(1e-4), torch.tensor(0.95)  # tensors: a changed float would recompile
                    compiled = torch.compile(Muon(trunk, lr=lr, momentum=momentum).step)
                    report(f"Muon compiled, {label}", compiled, work)
    bench_banks(report, matrices, work)
    report("Muon as in training", training_engine(matrices, [], "cuda"), work)
    record = MuonConfig(orthogonalizer="polar_express", variance_beta=0.9, decay="cautious")
    narrow = {"rule": record, "storage": "bf16+16", "weight_decay": 1.2}
    report("Muon as in training, every option", training_engine(matrices, [], "cuda", **narrow), work)
    if muon_alone:
        return
    trunk = make_params(matrices, "cuda")
    report("torch.optim.Muon", torch.optim.Muon(trunk, lr=1e-4).step, work)
    others = make_params(rest, "cuda")
    report("AdamW on the rest, fp32", AdamW(others, lr=1e-4).step)
    report("AdamW on the rest, foreach", AdamW(others, lr=1e-4, implementation="foreach").step)
    report("AdamW on the rest, bf16", AdamW(make_params(rest, "cuda", torch.bfloat16), lr=1e-4).step)
    report("AdamW on the rest, bf16 cautious", AdamW(make_params(rest, "cuda", torch.bfloat16), decay="cautious").step)
    report("torch.optim.AdamW fused", torch.optim.AdamW(others, lr=1e-4, fused=True).step)
    soap = SOAP(trunk, lr=1e-4)
    soap.step()
    report("SOAP", soap.step, repeats=10)


def bench_banks(report, matrices, work):
    """One stacked bf16 parameter a shape, as sharded runs have them: bare, with every option, and as CUDA graphs."""
    banks = [(matrices.count(s), *s) for s in dict.fromkeys(matrices)]
    options = {"variance_beta": 0.9, "decay": "cautious", "weight_decay": 1.2, "mantissa": True}
    variants = {
        "bf16": {},
        "every option": options,
        "equal rows": {**options, "equalize": "rows"},
        "graphs": {**options, "cuda_graph": True},
    }
    for label, extra in variants.items():
        params = make_params(banks, "cuda", torch.bfloat16)
        muon = Muon(params, lr=1e-4, orthogonalizer="polar_express", stacked=True, **extra)
        report(f"Muon on banks, {label}", muon.step, work)


def training_engine(matrices, rest, device, **options):
    """A step of a model of these shapes as training makes it: parameters in banks, gradients cleared by the step.

    options: of the matrices' group. The gradients that the step reads are random again each time, at a copy's cost.
    """
    params = make_params(matrices + rest, device)
    roles = {str(i): Role("matrix" if i < len(matrices) else "other") for i in range(len(params))}
    groups = (
        ParamGroup(role="matrix", **{"rule": MuonConfig(), "lr": 1e-4, **options}),
        ParamGroup(role="other", rule=AdamConfig(), lr=1e-4),
    )
    engine = Engine({str(i): p for i, p in enumerate(params)}, roles, groups, Precision())
    filled = [(part.bank.grad, 1e-3 * torch.randn_like(part.bank.grad)) for part in engine.parts]
    plan = StepPlan(step=0, lr_factor=1.0, momentum=None, batch_tokens=1, seq_len=1, windows=None)

    def step():
        for grad, values in filled:
            grad.copy_(values)
        engine.step(plan)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--muon", action="store_true", help="on a GPU: Muon alone")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    (bench_cuda if args.device == "cuda" else bench_cpu)(rows, args.muon)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "device": args.device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
