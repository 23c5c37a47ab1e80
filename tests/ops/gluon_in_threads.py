"""`gluon_on_cpu` for programs whose warps do different things: each kind of warps is a thread, and barriers block.

A barrier behaves as the device's: it knows the parity of its phase only, and a phase is over when as many as it was
made for have arrived and all expected bytes have come. Copies out of shared memory, too, happen at once or as late as a
wait allows. A thread that waits in vain ends the test.
"""

import threading
from typing import Any

from torch import Tensor

from tests.ops.gluon_on_cpu import Descriptor, Machine, Product, Shared

PATIENCE = 30.0  # seconds: far longer than any wait here takes


class Threads(Machine):
    """A machine whose programs are several threads; products and copies out are each thread's own."""

    def __init__(self) -> None:
        self._own = threading.local()
        self.changed = threading.Condition()
        super().__init__()

    @property
    def pending(self) -> list[Product]:  # type: ignore[override]
        return self._list("products")

    @pending.setter
    def pending(self, products: list[Product]) -> None:
        self._own.products = products

    @property
    def leaving(self) -> list[Any]:
        """Copies out of shared memory that nobody has waited for."""
        return self._list("copies")

    def _list(self, name: str) -> list[Any]:
        if not hasattr(self._own, name):
            setattr(self._own, name, [])
        found: list[Any] = getattr(self._own, name)
        return found

    def wait(self, num_outstanding: int, deps: Any) -> Any:
        """A sum that is still under way may go on as the accumulator of the next product, and only as that."""
        while len(self.pending) > num_outstanding:
            self.pending.pop(0).finish()
        (total,) = deps
        return total if any(total is p for p in self.pending) else total.value

    def shared(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        if layout == "barrier":
            return Shared([BlockingBarrier(self) for _ in range(shape[0])])
        return Block(super().shared(dtype, shape, layout).t)

    def specialize(self, parts: list[Any], warps: list[int], registers: list[int]) -> None:
        failures: list[BaseException] = []

        def run(function: Any, args: Any) -> None:
            try:
                function(*args)
                assert not self.pending, "a product is never waited for"
                assert not self.leaving, "shared memory may be gone before it is copied"
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads)

    def copy_out(self, descriptor: Descriptor, at: list[Any], source: Shared) -> None:
        self.leaving.append((descriptor, [int(a) for a in at], source))
        if not self.late_copies:
            self.store_wait(0)

    def store_wait(self, pendings: int) -> None:
        while len(self.leaving) > pendings:
            descriptor, at, source = self.leaving.pop(0)
            rows, cols = (slice(a, a + n) for a, n in zip(at, descriptor.block_shape, strict=True))
            assert list(source.t.shape) == descriptor.block_shape
            descriptor.t[rows, cols] = source.t

    def extend(self, parts: dict[str, dict[str, Any]]) -> None:
        language = parts["triton.experimental.gluon"]["language"]
        language.warp_specialize = self.specialize
        language.split = lambda x: x.unbind(-1)
        language.multiple_of = _multiple_of
        hopper = parts["triton.experimental.gluon.language.nvidia.hopper"]
        hopper["mbarrier"].init = lambda bar, count: bar.t.init(count)
        hopper["mbarrier"].arrive = lambda bar, count, pred=True: bar.t.arrive(count) if pred else None
        hopper["tma"].async_copy_shared_to_global = self.copy_out
        hopper["tma"].store_wait = self.store_wait


class Block(Shared):
    """Shared memory of numbers."""

    @property
    def shape(self) -> list[int]:
        return list(self.t.shape)

    @property
    def dtype(self) -> Any:
        return self.t.dtype

    def index(self, i: Any) -> "Block":
        return Block(self.t[int(i)])

    def permute(self, order: Any) -> "Block":
        return Block(self.t.permute(order))

    def store(self, values: Tensor) -> None:
        self.t.copy_(values)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Block":
        assert dtype == self.t.dtype
        return Block(self.t.view(shape))


class BlockingBarrier:
    """An mbarrier."""

    def __init__(self, machine: Threads) -> None:
        self.machine, self.late = machine, []
        self.count = self.arrivals = self.missing = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.arrivals = count

    def _turn(self) -> None:
        if self.arrivals == 0 and self.missing == 0:
            self.phase, self.arrivals = self.phase + 1, self.count
            self.machine.changed.notify_all()

    def arrive(self, count: int = 1, nbytes: int = 0) -> None:
        with self.machine.changed:
            assert self.arrivals >= count, "more arrive than are expected in this phase"
            self.arrivals -= count
            self.missing += nbytes
            self._turn()
            self.machine.changed.notify_all()

    def expect(self, nbytes: int) -> None:
        self.arrive(1, nbytes)

    def copy(self, target: Tensor, descriptor: Descriptor, at: list[Any]) -> None:
        with self.machine.changed:
            self.late.append((target, descriptor, [int(a) for a in at]))
            if not self.machine.late_copies:
                self._come()
            self.machine.changed.notify_all()

    def _come(self) -> None:
        for target, descriptor, at in self.late:
            target.copy_(descriptor.block(at))
            self.missing -= descriptor.block_type.nbytes
        self.late = []
        self._turn()

    def wait(self, parity: Any) -> None:
        with self.machine.changed:
            while self.phase % 2 == int(parity):
                if self.late:
                    self._come()
                elif not self.machine.changed.wait(PATIENCE):
                    raise AssertionError("nothing will end this wait")


def _multiple_of(x: Any, unit: int) -> Any:
    assert int(x) % unit == 0, (x, unit)
    return x
