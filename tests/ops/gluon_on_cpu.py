"""What our kernels use of Gluon, in torch on a CPU: one program after the other, in one thread.

Copies and products that are asynchronous on the device happen here either as soon as they are asked for or as late as a
wait allows. Right results in both extremes show that nobody reads a block before it has come, or overwrites one that is
still being read. A wait that nothing will end raises. What differs between warps is beyond it.
"""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Machine:
    """The program that runs, when asynchronous work is done, and the products that nobody has waited for."""

    def __init__(self) -> None:
        self.program, self.programs, self.late_copies, self.late_products = 0, 1, False, False
        self.pending: list[Product] = []
        self.fenced = True  # whether the copy engine sees all barriers
        self.barriers: list[Barrier] = []

    def extend(self, parts: dict[str, dict[str, Any]]) -> None:
        """Add to what stands in for Gluon, by module and name."""

    def product(self, a: Any, b: "Shared", acc: Any, use_acc: bool = True, is_async: bool = False) -> "Product":
        assert is_async
        self.pending.append(Product(a, b, acc if use_acc else None))
        if not self.late_products:
            self.pending[-1].finish()
        return self.pending[-1]

    def wait(self, num_outstanding: int, deps: tuple[Any, ...]) -> Any:
        while len(self.pending) > num_outstanding:
            self.pending.pop(0).finish()
        under_way = [any(d is p for p in self.pending) for d in deps]
        assert not any(under_way), "what is waited for may still be under way"
        values = [d.value if isinstance(d, Product) else d for d in deps]
        return values[0] if len(values) == 1 else tuple(values)

    def shared(self, dtype: Any, shape: list[int], layout: Any) -> "Shared":
        if layout == "barrier":
            self.fenced = False
            self.barriers += (mine := [Barrier(self) for _ in range(shape[0])])
            return Shared(mine)
        return Shared(torch.full([int(n) for n in shape], junk(dtype), dtype=dtype))

    def fence(self) -> None:
        self.fenced = True

    def alive(self) -> None:
        assert not any(bar.over for bar in self.barriers), "something is done after a barrier was given up"

    def launch(
        self, kernel: Any, programs: int, *args: Any, late_copies: bool, late_products: bool, **constants: int
    ) -> None:
        """Run every program. Tensors are passed as pointers, descriptors as they are.

        Barriers must be given up when nothing else is left to do: before, scratch may come to lie where they are.
        """
        self.late_copies, self.late_products, self.programs = late_copies, late_products, programs
        given = [Pointer(a.view(-1)) if isinstance(a, Tensor) else a for a in args]
        for self.program in range(programs):
            self.barriers = []
            kernel(*given, **constants)
            assert not self.pending, "a product is never waited for"
            assert all(bar.over for bar in self.barriers), "a barrier is never given up"


class Product:
    """A product that has been begun; its operand in shared memory is read when it is carried out."""

    def __init__(self, a: Any, b: "Shared", acc: Any) -> None:
        self.a, self.b, self.acc, self.value = a, b, acc, None

    def finish(self) -> None:
        if self.value is None:
            acc = self.acc.value if isinstance(self.acc, Product) else self.acc
            product = (self.a.t if isinstance(self.a, Shared) else self.a).float() @ self.b.t.float()
            self.value = product if acc is None else product + acc


class Pointer:
    """The address of `offset` elements into a flat tensor; `offset` may be a tensor of them."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset, self.dtype = flat, offset, SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + more)

    def __sub__(self, less: Any) -> "Pointer":
        return self + -less


def junk(dtype: Any) -> Any:
    """NaN, or for words the bits of two in bf16: what nobody should find."""
    return float("nan") if dtype.is_floating_point else 0x7FC07FC0 & torch.iinfo(dtype).max


def load(pointer: Pointer, mask: Any = True, other: Any = None) -> Tensor:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    values = pointer.flat[torch.where(mask, at, 0)]
    other = junk(values.dtype) if other is None else other
    return torch.where(mask, values, torch.as_tensor(other, dtype=values.dtype)).as_subclass(Values)


def store(pointer: Pointer, values: Tensor, mask: Any = True) -> None:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    pointer.flat[at[mask]] = values[mask].to(pointer.flat.dtype)


class Values(Tensor):
    """A tensor whose `to` knows Gluon's `bitcast`, and so do those that are computed from it."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


class Descriptor:
    """A tensor from which blocks are copied; what lies outside is 0."""

    def __init__(self, t: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any = None) -> None:
        self.t, self.dtype, self.layout = torch.as_strided(t, shape, strides), t.dtype, layout
        self.block_shape = block
        self.block_type = SimpleNamespace(shape=block, nbytes=math.prod(block) * t.element_size())

    def block(self, at: list[Any]) -> Tensor:
        grid = [int(a) + torch.arange(n) for a, n in zip(at, self.block_type.shape, strict=True)]
        inside = [(g >= 0) & (g < n) for g, n in zip(grid, self.t.shape, strict=True)]
        clipped = [g.clamp(0, n - 1) for g, n in zip(grid, self.t.shape, strict=True)]
        values = self.t[torch.meshgrid(*clipped, indexing="ij")]
        return torch.where(torch.stack(torch.meshgrid(*inside, indexing="ij")).all(0), values, 0)


class Shared:
    """Shared memory: NaN until something comes."""

    def __init__(self, t: Any) -> None:
        self.t = t

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.t.shape)

    def index(self, i: Any) -> "Shared":
        return Shared(self.t[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.t.permute(order))

    def load(self, layout: Any) -> Tensor:
        return self.t.clone().as_subclass(Values)

    def store(self, values: Tensor) -> None:
        self.t.copy_(values)


class Barrier:
    """Counts bytes; a phase is over when all that are expected have come."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.phases, self.missing, self.late, self.over = machine, 0, 0, [], False

    def end(self) -> None:
        assert not self.missing, "bytes are still on their way"
        self.over = True

    def expect(self, nbytes: int) -> None:
        assert self.missing == 0, "the last phase is not over"
        self.machine.alive()
        self.missing = nbytes

    def copy(self, target: Tensor, descriptor: Descriptor, at: list[Any]) -> None:
        assert self.machine.fenced, "the copy engine may not see yet that the barrier has begun"
        work = (target, descriptor, [int(a) for a in at])
        self.late.append(work)
        if not self.machine.late_copies:
            self.come()

    def come(self) -> None:
        for target, descriptor, at in self.late:
            target.copy_(descriptor.block(at))
            self.missing -= descriptor.block_type.nbytes
            if self.missing == 0:
                self.phases += 1
        self.late = []

    def wait(self, phase: Any) -> None:
        self.come()
        self.machine.alive()
        assert self.missing == 0, "more bytes are expected than were asked for"
        assert self.phases > 0, "nothing was asked for"
        assert (self.phases - 1) % 2 == int(phase), "nothing will end this wait"


def _expect(bar: Shared, nbytes: int, pred: Any = True) -> None:
    if pred:
        bar.t.expect(nbytes)


def _copy(X: Descriptor, at: list[Any], bar: Shared, target: Shared, pred: Any = True) -> None:
    if pred:
        bar.t.copy(target.t, X, at)


def _pairwise(torch_function: Any) -> Any:
    return lambda a, b: torch_function(torch.as_tensor(a), torch.as_tensor(b))


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function else _jit


def _language(machine: Machine) -> SimpleNamespace:
    def layout(*_: Any, **__: Any) -> None:
        return None

    def converted(x: Any, _: Any) -> Any:
        machine.alive()  # it may need scratch
        return x

    return SimpleNamespace(
        constexpr=int, tuple=tuple, int64=torch.int64, int32=torch.int32, int16=torch.int16, uint8=torch.uint8,
        float32=torch.float32, bfloat16=torch.bfloat16,
        float8e4nv=torch.float8_e4m3fn, load=load, store=store, sqrt=torch.sqrt, div_rn=torch.div,
        zeros_like=torch.zeros_like, reduce=lambda x, axis, combine: x.amax(axis),
        inline_asm_elementwise=_instruction, DistributedLinearLayout=layout,
        allocate_shared_memory=machine.shared,
        program_id=lambda _: torch.tensor(machine.program), num_programs=lambda _: torch.tensor(machine.programs),
        thread_barrier=lambda: None, SwizzledSharedLayout=layout, num_warps=lambda: 4, static_range=range,
        cdiv=lambda a, b: -(-a // b), arange=lambda a, b, _: torch.arange(a, b), minimum=_pairwise(torch.minimum),
        maximum=_pairwise(torch.maximum), convert_layout=converted, where=_where, exp2=torch.exp2, log2=torch.log2,
        zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), NVMMADistributedLayout=layout,
        NVMMASharedLayout=layout, SliceLayout=layout, DotOperandLayout=layout, BlockedLayout=layout,
    )  # fmt: skip


def _instruction(code: str, constraints: str, args: list[Any], **_: Any) -> Any:
    """What PTX of our kernels does."""
    found = [function for name, function in _INSTRUCTIONS.items() if name in code]
    assert len(found) == 1, code
    return found[0](*args)


def _in_one_word(low: Tensor, high: Tensor, word: torch.dtype) -> Tensor:
    """Bits of `high` above those of `low`."""
    return torch.stack((low, high), -1).view(word).squeeze(-1).as_subclass(Values)


def _e5m2(x: Tensor) -> Tensor:
    return x.clamp(-57344, 57344).to(torch.float8_e5m2)


def _prefetch(pointer: Pointer, nbytes: Any) -> None:
    assert nbytes > 0
    assert nbytes % 16 == 0
    assert 0 <= pointer.offset <= pointer.flat.numel() - nbytes // pointer.flat.element_size(), "not ours"


_INSTRUCTIONS = {
    "mov.b32 $0, $1;": lambda x: x,
    "tanh.approx.f32": torch.tanh,
    "ex2.approx.ftz.f32": torch.exp2,
    "cvt.rn.bf16x2.f32": lambda low, high: _in_one_word(low.bfloat16(), high.bfloat16(), torch.int32),
    "cvt.rn.satfinite.e5m2x2.f32": lambda low, high: _in_one_word(_e5m2(low), _e5m2(high), torch.int16),
    "cp.async.bulk.prefetch.L2.global": _prefetch,
}


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        return a if condition else b
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


def load_kernels(path: str, machine: Machine) -> dict[str, Any]:
    """KERNELS of the module at `path`, as plain functions that run on `machine`."""
    kernels: dict[str, Any] = load_module(path, machine).KERNELS
    return kernels


def load_module(path: str, machine: Machine) -> Any:
    """The module at `path`, its kernels plain functions that run on `machine`. What it imports has been before."""
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barrier", init=lambda bar, count: None, expect=_expect,
        wait=lambda bar, phase: bar.t.wait(phase), invalidate=lambda bar: bar.t.end(),
    )  # fmt: skip
    parts: dict[str, dict[str, Any]] = {
        "triton.experimental": {},
        "triton.experimental.gluon": {
            "jit": _jit, "constexpr_function": _jit, "language": _language(machine),
        },
        "triton.experimental.gluon.language.nvidia.hopper": {
            "fence_async_shared": machine.fence, "mbarrier": mbarrier,
            "tma": SimpleNamespace(async_copy_global_to_shared=_copy),
            "warpgroup_mma": machine.product, "warpgroup_mma_init": lambda x: x,
            "warpgroup_mma_wait": machine.wait,
        },
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }  # fmt: skip
    machine.extend(parts)
    for name in list(parts):  # their parents
        while "." in name:
            name = name.rpartition(".")[0]
            parts.setdefault(name, {})
    modules = {name: ModuleType(name) for name in parts}
    for name, members in parts.items():
        vars(modules[name]).update(members)
    modules["triton.experimental"].gluon = modules["triton.experimental.gluon"]  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_on_cpu", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module
