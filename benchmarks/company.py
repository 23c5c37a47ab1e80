"""Another process on the same GPU: bursts of products, copies and allocations, with pauses of irregular length.

It is there to be in the way: kernels of the process beside it are interrupted, their queue grows, and memory changes
hands. `company` starts such processes and ends them; each also ends by itself when its parent is gone.
"""

import argparse
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

READY = "ready"
START_S = 60


def bursts(device: torch.device, seed: int) -> list[Callable[[], None]]:
    """What a burst may be made of, each a few milliseconds of an H200's time; a CPU's are tiny."""
    on_gpu = device.type == "cuda"
    side, size = (8192, 2**29) if on_gpu else (16, 2**10)
    numbers, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    matrix = torch.randn(side, side, device=device, dtype=dtype, generator=generator)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.zeros(size // 8, dtype=torch.uint8, pin_memory=on_gpu)

    def multiply() -> None:
        torch.matmul(matrix, matrix)

    def move() -> None:
        target.copy_(source)

    def send() -> None:
        target[: len(host)].copy_(host, non_blocking=True)

    def allocate() -> None:
        for _ in range(8):
            torch.full((numbers.randrange(1, 2 * size),), 255, dtype=torch.uint8, device=device)
        if on_gpu:
            torch.cuda.empty_cache()

    return [multiply, move, send, allocate]


def work(device: torch.device, seed: int, going_on: Callable[[], bool]) -> int:
    """Bursts until nobody wants more; how many there were."""
    parts, numbers, count = bursts(device, seed), random.Random(seed), 0
    print(READY, flush=True)
    while going_on():
        for _ in range(numbers.randrange(1, 20)):
            numbers.choice(parts)()
        if device.type == "cuda":
            torch.cuda.synchronize()
        time.sleep(numbers.choice((0.0, 0.002, 0.01, 0.05)))
        count += 1
    return count


def _await(child: "subprocess.Popen[str]") -> None:
    assert child.stdout is not None
    told, _, _ = select.select([child.stdout], [], [], START_S)
    if not told or child.stdout.readline().strip() != READY:
        raise RuntimeError(f"no company: {child.args!r} was not ready after {START_S} s, its status is {child.poll()}")


@contextmanager
def company(count: int, device: torch.device) -> Iterator[None]:
    """So many processes beside this one, all at work. Raises RuntimeError where one does not start."""
    command = [sys.executable, "-m", "benchmarks.company", str(device)]
    children = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(count)]
    try:
        for child in children:
            _await(child)
        yield
        for child in children:
            if child.poll() is not None:
                raise RuntimeError(
                    f"company left early, with {child.returncode}: what ran meanwhile may have been alone"
                )
    finally:
        for child in children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("seed", type=int)
    args = parser.parse_args()
    parent = os.getppid()
    if args.device == "cpu":
        torch.set_num_threads(1)
    work(torch.device(args.device), args.seed, lambda: os.getppid() == parent)


if __name__ == "__main__":
    main()
