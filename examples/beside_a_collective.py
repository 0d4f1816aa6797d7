"""How long a product and an all-reduce take at once, by the SMs that the product leaves free.

Starts one process for each GPU. In each step an all-reduce begins, a product that does not depend
on it runs beside it, and the step ends with both, as where a training step sums one layer's
gradients while it computes the next one's. Each number of free SMs is timed in turns, with the
product by outblas and by torch, which keep the same setting. On one GPU there is nothing to sum; on
a CPU the sizes are tiny.

    python examples/beside_a_collective.py
    python examples/beside_a_collective.py --free 0,16,32 --megabytes 64 --json times.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import outblas

ON_GPU = torch.cuda.is_available()
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description="A product beside an all-reduce.")
    parser.add_argument("--free", default="0,8,16,24,32,48" if ON_GPU else "0,16")
    parser.add_argument("--size", type=int, default=8192 if ON_GPU else 64)
    parser.add_argument("--megabytes", type=int, default=256 if ON_GPU else 1)
    parser.add_argument("--steps", type=int, default=10 if ON_GPU else 1, help="in one timing")
    parser.add_argument("--turns", type=int, default=9 if ON_GPU else 1)
    parser.add_argument("--json", help="a file to write the figures to")
    given = parser.parse_args()

    processes = max(1, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        if processes == 1:
            process(0, processes, folder, given)
        else:
            torch.multiprocessing.spawn(process, (processes, folder, given), processes)


def process(rank: int, processes: int, folder: str, given: argparse.Namespace) -> None:
    """What each process does. The first one prints."""
    if ON_GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo",
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=processes,
        device_id=torch.device("cuda", rank) if ON_GPU else None,
    )
    try:
        found = times(given)
    finally:
        dist.destroy_process_group()

    if rank == 0:
        gpu = torch.cuda.get_device_name() if ON_GPU else "the CPU"
        print(f"{processes} processes on {gpu}, milliseconds of a step")
        for name, milliseconds in found.items():
            print(f"  {name:32} {milliseconds:8.3f}")
        if given.json:
            figures = {"gpu": gpu, "processes": processes, **vars(given), "milliseconds": found}
            Path(given.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def times(given: argparse.Namespace) -> dict[str, float]:
    """Returns the median milliseconds of each kind of step, of the slowest process each time."""
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
    a, b = torch.randn(2, given.size, given.size, device=device).bfloat16().unbind()
    summed = torch.zeros(given.megabytes << 19, device=device, dtype=torch.bfloat16)
    steps = of_kinds([int(count) for count in given.free.split(",")], a, b, summed)

    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # compiles and loads what each needs
        milliseconds(step, 1, device)
    for _ in range(given.turns):
        for name, step in steps.items():
            taken[name].append(milliseconds(step, given.steps, device))
    return {name: statistics.median(each) for name, each in taken.items()}


def of_kinds(free: list[int], a: Tensor, b: Tensor, summed: Tensor) -> dict[str, Step]:
    """Returns each kind of step by its name: the parts alone, then both with so many SMs free."""
    products: dict[str, Callable[[Tensor, Tensor], Tensor]]
    products = {"outblas": outblas.matmul, "torch": torch.mm}

    def reduce() -> None:
        dist.all_reduce(summed)

    def alone(product: Callable[[Tensor, Tensor], Tensor], count: int) -> Step:
        def step() -> None:
            with outblas.sm_carveout(count):
                product(a, b.t())

        return step

    # [beside]
    def beside(product: Callable[[Tensor, Tensor], Tensor], count: int) -> Step:
        def step() -> None:
            work = dist.all_reduce(summed, async_op=True)
            with outblas.sm_carveout(count):
                product(a, b.t())
            work.wait()  # what follows on the stream comes after the sum

        return step

    # [end]

    found: dict[str, Step] = {"all-reduce alone": reduce}
    for name, product in products.items():
        for count in free:
            found[f"{name} alone, {count} free"] = alone(product, count)
            found[f"{name} beside, {count} free"] = beside(product, count)
    return found


def milliseconds(step: Step, steps: int, device: torch.device) -> float:
    """Returns what a step takes in the slowest process, where all begin together."""
    dist.barrier()
    if ON_GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if ON_GPU:
        torch.cuda.synchronize()
    taken = torch.tensor(1e3 * (time.perf_counter() - begin) / steps, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


if __name__ == "__main__":
    main()
