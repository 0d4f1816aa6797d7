"""The calls that `tools.host` times as they come to a server: to a new layer, with a new number of
rows, and chunks of prompts. A script that prints JSON.

The planner is the real one. On a machine with an NVIDIA GPU so are the kernels: those that are not
there yet are computed by torch, as for every caller (OUTBLAS_PACK names a pack that has them).
Elsewhere an H100 is played whose kernels are all compiled and do nothing, and CPU tensors count as
its own. Torch's call is then that of matrices of 8x8, which leaves the host's part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import outblas
from outblas.autotune.search import gpu as gpus
from outblas.base import compiling
from outblas.base.compat.torch_private import empty_strided
from outblas.call import default_kernel
from outblas.call import problem as operands
from outblas.device import driver
from outblas.hopper.parts import compile, tile_order
from outblas.kernels import portable

MOST_ROWS = 8192
# N and K of the layers of a model (Llama 3 8B), and of layers that other models have.
LAYERS = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
NEW_LAYERS = (
    *((5120, 5120), (7168, 2048), (1536, 7168), (3072, 1024)),
    *((2560, 2560), (5120, 13824), (18944, 3584), (3584, 3584)),
)
LEFT_OUT = 100  # steps of chunked prefill before the mean

Call = Callable[[], object]
kernels: dict[Any, Callable[..., None]] = {}  # of the H100 that is played
ON_GPU = torch.cuda.is_available()
# Without a GPU a call waits for other programs alone.
clock = time.perf_counter_ns if ON_GPU else time.thread_time_ns


def play_h100() -> None:
    """Has this process plan for an H100 that it has not."""
    machine = gpus.imagined("H100")
    properties = SimpleNamespace(multi_processor_count=machine.sms, name=machine.name)
    pose, memory = operands.problem, torch.empty(MOST_ROWS * 28672, dtype=torch.bfloat16)

    def posed(*given: Any, **options: Any) -> Any:
        return replace(pose(*given, **options), device=torch.device("cuda", 0))

    def allocated(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Any:
        if dtype is torch.bfloat16:  # in the time that a caching allocator takes
            return memory.as_strided(size, strides)
        return torch.empty_strided(size, strides, dtype=dtype)

    replacements: dict[tuple[Any, str], Any] = {
        (operands, "problem"): posed,
        (torch.version, "cuda"): "13.0",
        (torch.cuda, "device"): contextlib.nullcontext,
        (torch.cuda, "device_count"): lambda: 1,
        (torch.cuda, "get_device_capability"): lambda *_: (9, 0),
        (torch.cuda, "get_device_properties"): lambda *_: properties,
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "is_current_stream_capturing"): lambda: False,
        (gpus, "current"): lambda *_: machine,
        (compile, "load"): lambda kernel, _: kernels.setdefault(kernel, lambda *given: None),
        (portable, "plan"): lambda problem, config: lambda *given: None,
        (tile_order, "_copied"): lambda device, tiles: torch.from_numpy(tiles),
        (driver, "context"): lambda: 1,
        (driver, "relaxed_capture"): contextlib.nullcontext,
        (driver, "background"): lambda: SimpleNamespace(submit=lambda job: None),
    }
    for (owner, name), value in replacements.items():
        setattr(owner, name, value)
    empty_strided["cpu"] = allocated


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Memory that begins at a whole line of the cache, as a GPU's does. On a GPU it is zeros."""
    if ON_GPU:
        return torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    memory = torch.empty(rows * columns + 64, dtype=torch.bfloat16)
    start = -memory.data_ptr() % 128 // 2
    return memory[start : start + rows * columns].view(rows, columns)


class Layers:
    """Linear layers, and tokens for any number of rows up to `MOST_ROWS`."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.weights = [matrix(N, K) for N, K in shapes]
        tokens = {K: matrix(MOST_ROWS, K) for K in {K for _, K in shapes}}
        self.tokens = [tokens[K] for _, K in shapes]
        self.small = torch.ones(8, 8)

    def times(self, layer: int, rows: int) -> tuple[float, float]:
        """The µs of outblas's and of torch's call."""
        x, weight = self.tokens[layer][:rows], self.weights[layer]
        theirs = (x, weight) if ON_GPU else (self.small, self.small)
        ours = spent(lambda: outblas.linear(x, weight))
        return ours, spent(lambda: torch.nn.functional.linear(*theirs))


def spent(call: Call) -> float:
    """The µs of the host in a call, before which the GPU has no work."""
    if ON_GPU:
        torch.cuda.synchronize()
    start = clock()
    call()
    return (clock() - start) / 1e3


def summary(name: str, times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """One line of the report: the mean of outblas's calls and torch's in µs, their ratio, and the
    median and the largest of outblas's.
    """
    ours, theirs = map(list, zip(*times, strict=True))
    mean, base = statistics.fmean(ours), statistics.fmean(theirs)
    return {
        "call": name,
        "us": mean,
        "torch_us": base,
        "ratio": mean / base,
        "median_us": statistics.median(ours),
        "most_us": max(ours),
    }


def resident() -> float:
    """The MiB of memory that the process has had at the most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(steps: int, rows: int) -> list[dict[str, Any]]:
    """Times the first call of the process, of new layers, of new numbers of rows (so many a layer),
    and so many steps of chunked prefill, each of which calls all layers with one number of rows.
    Numbers of rows share a choice of kernel in ranges, whose first calls are told apart.
    """
    rng = random.Random(0)
    layers, others = Layers(LAYERS), Layers(NEW_LAYERS)
    lines = [summary("first call of the process", [others.times(0, 16)])]
    first = [others.times(i, rng.randint(2, MOST_ROWS)) for i in range(1, len(NEW_LAYERS))]
    lines.append(summary("first call of a layer", first))
    chosen: list[tuple[float, float]] = []
    choosing: list[tuple[float, float]] = []
    choices: set[int] = set()
    for M in rng.sample(range(2, MOST_ROWS), rows):
        choice = default_kernel.rows_of_choice(M)
        times = [layers.times(i, M) for i in range(len(LAYERS))]
        (chosen if choice in choices else choosing).extend(times)
        choices.add(choice)
    lines.append(summary("first call of a range of rows", choosing))
    lines.append(summary("first call of a number of rows", chosen))
    chunks, before = [], 0.0
    for step in range(steps):
        if step == LEFT_OUT:
            before = resident()
        M = rng.randint(1, MOST_ROWS)
        chunks.append([layers.times(i, M) for i in range(len(LAYERS))])
    later = [times for step in chunks[LEFT_OUT:] for times in step]
    lines.append(summary("chunked prefill", later) | {"rss_mib": resident() - before})
    return lines


def main() -> None:
    """Prints a list of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if not ON_GPU:
        play_h100()
    lines = measured(*(1000, 50) if options.quick else (10_000, 300))
    lines[-1]["compiling"] = len(compiling.unfinished)
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
