"""The program that times the host side of one tree of outblas, in a separate process.

`host_turns` runs it by its path, with the tree on PYTHONPATH, so that the same program measures
this tree and another one. It imports the tree's modules through importlib, and imports neither
torch nor outblas at the top level. Times are CPU times, so that other processes have less
influence.
"""

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# For each figure: the name of the reference, µs of outblas, µs of the reference.
Found = dict[str, tuple[str, float, float]]
Pair = tuple[Callable[[], object], str, Callable[[], object]]

SIZE = 8  # matrices so small that torch's product takes less time than its call
CALLS = 100  # per round
FIRST_CALLS = 60  # shapes that are called for the first time
TRIALS, WINNERS = 2000, 200  # in the store
NEAR_SHAPES = 20  # shapes that are looked up without having been tuned
GRID = 64  # rows and columns of tiles


def imports() -> Found:
    """Measures the import of outblas relative to that of torch, which it needs."""
    begun = time.process_time_ns()
    importlib.import_module("torch")
    half = time.process_time_ns()
    importlib.import_module("outblas")
    done = time.process_time_ns()
    return {"import outblas": ("import torch", (done - half) / 1e3, (half - begun) / 1e3)}


# ---- calls
def launch_nothing() -> None:
    """Makes CPU products be planned like those of a kernel, with a launch that does nothing."""
    launcher: Any = importlib.import_module("outblas.runtime.launcher")
    launcher.no_kernel_reason = lambda problem: None
    launcher.best_launcher = lambda *_, **__: lambda *_: None


def calls(rounds: str) -> Found:
    """Measures the host time of calls without kernels: warm, first and second calls."""
    launch_nothing()
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    return warm_calls(int(rounds)) | enabled_calls(int(rounds)) | first_calls()


def warm_calls(rounds: int) -> Found:
    """Measures calls that were made before; takes the minimum time per round of each."""
    pairs = call_pairs()
    functions = [function for ours, _, theirs in pairs.values() for function in (ours, theirs)]
    for function in functions:
        timed(function, 20)
    times: list[list[float]] = [[] for _ in functions]
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            function()
            found.append(timed(function, CALLS))
    gc.enable()
    least = [min(found) for found in times]
    return {
        f"{name}, warm": (reference, least[2 * i], least[2 * i + 1])
        for i, (name, (_, reference, _)) in enumerate(pairs.items())
    }


def call_pairs() -> dict[str, Pair]:
    """Returns outblas's calls with torch's equivalents."""
    torch: Any = importlib.import_module("torch")
    outblas: Any = importlib.import_module("outblas")
    a, b, c, out, theirs = (torch.randn(SIZE, SIZE) for _ in range(5))
    bias = torch.randn(SIZE)
    linear = torch.nn.functional.linear
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    ours_frozen, frozen = outblas.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
    ours_learning, theirs_learning = outblas.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
    for layer in (ours_frozen, frozen):
        layer.requires_grad_(False)
    return {
        "matmul": (lambda: outblas.matmul(a, b), "torch.matmul", lambda: torch.matmul(a, b)),
        "matmul out=": (
            lambda: outblas.matmul(a, b, out=out),
            "torch.matmul out=",
            lambda: torch.matmul(a, b, out=theirs),
        ),
        "addmm": (lambda: outblas.addmm(c, a, b), "torch.addmm", lambda: torch.addmm(c, a, b)),
        "linear with bias": (
            lambda: outblas.linear(a, b, bias),
            "torch linear with bias",
            lambda: linear(a, b, bias),
        ),
        "linear with bias under autograd": (
            lambda: outblas.linear(a, weight, bias),
            "torch linear with bias under autograd",
            lambda: linear(a, weight, bias),
        ),
        "Linear": (lambda: ours_frozen(a), "torch.nn.Linear", lambda: frozen(a)),
        "Linear under autograd": (
            lambda: ours_learning(a),
            "torch.nn.Linear under autograd",
            lambda: theirs_learning(a),
        ),
        "Linear, forward and backward": (
            learning(outblas.Linear(SIZE, SIZE)),
            "torch.nn.Linear, forward and backward",
            learning(torch.nn.Linear(SIZE, SIZE)),
        ),
    }


def enabled_calls(rounds: int) -> Found:
    """Measures torch's own products under `enable` and without it, in turns; takes the minimum time
    per round of each.
    """
    torch: Any = importlib.import_module("torch")
    try:
        aten: Any = importlib.import_module("outblas.torch_ops.aten")
    except ModuleNotFoundError:  # a tree from before `enable`
        return {}
    rules = aten.Rules((torch.float32,), 0, 0, None, "CPU")
    a, b, out = (torch.randn(SIZE, SIZE) for _ in range(3))
    layer = torch.nn.Linear(SIZE, SIZE)
    functions: dict[str, Callable[[], object]] = {
        "torch.mm": lambda: torch.mm(a, b),
        "torch.mm out=": lambda: torch.mm(a, b, out=out),
        "torch.nn.Linear": lambda: layer(a),
        "torch.nn.Linear, forward and backward": learning(layer),
    }
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in functions}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, function in functions.items():
            ours, theirs = times[name]
            timed(function, 5)
            theirs.append(timed(function, CALLS))
            with aten._enable(rules):
                timed(function, 5)
                ours.append(timed(function, CALLS))
    gc.enable()
    return {
        f"{name} under enable, warm": (name, min(ours), min(theirs))
        for name, (ours, theirs) in times.items()
    }


def learning(layer: Any) -> Callable[[], object]:
    """Returns a forward and backward step through the layer, with gradients of its input, weight
    and bias.
    """
    torch: Any = importlib.import_module("torch")
    x, grad = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    return lambda: layer(x).backward(grad)


def first_calls() -> Found:
    """Measures the first call of a shape, which plans it, and the second one; medians over
    shapes.
    """
    torch: Any = importlib.import_module("torch")
    outblas: Any = importlib.import_module("outblas")
    times: dict[str, list[float]] = {name: [] for name in ("first", "second", "torch")}
    b = torch.randn(SIZE, SIZE)
    for i in range(FIRST_CALLS):
        a = torch.randn(SIZE + 1 + i, SIZE)
        times["torch"].append(min(timed(partial(torch.matmul, a, b), 1) for _ in range(3)))
        times["first"].append(timed(partial(outblas.matmul, a, b), 1))
        times["second"].append(timed(partial(outblas.matmul, a, b), 1))
    median = {name: sorted(found)[FIRST_CALLS // 2] for name, found in times.items()}
    return {
        f"matmul, {which} call of a shape": ("torch.matmul, one call", us, median["torch"])
        for which, us in median.items()
        if which != "torch"
    }


# ---- lookups
def fill(path: str) -> None:
    """Creates the store that `lookup` reads, with winners for many shapes of an H100."""
    records: Any = importlib.import_module("outblas.autotune.store.records")
    store: Any = importlib.import_module("outblas.autotune.store.store")
    shared = {"gpu": h100(), "kernel": "portable", "source": "of bench-host"}
    shared |= {"us": 100.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    shared |= {"when": "2026-01-01T00:00:00+00:00"}
    workloads = [records.Workload(*shape(i)) for i in range(WINNERS)]
    trials = [
        records.Trial(workload=workloads[i % WINNERS], config=config(i), status="ok", **shared)
        for i in range(TRIALS)
    ]
    winners = [
        records.BestConfig(workload=each, config=config(i), cublas_us=100.0, rounds=30, **shared)
        for i, each in enumerate(workloads)
    ]
    with store.Store(Path(path)) as found:
        found.merge(trials, winners)


def shape(i: int) -> tuple[int, int, int]:
    return 256 * (i % 20 + 1), 256 * (i // 20 + 1), 4096


def config(i: int) -> str:
    """Returns a config of the portable kernel as text, a different one for each number."""
    configs: Any = importlib.import_module("outblas.core.configs")
    portable: Any = importlib.import_module("outblas.kernels.portable_config")
    return str(configs.to_text(portable.PortableConfig(group_m=i + 1)))


def h100() -> Any:
    gpu: Any = importlib.import_module("outblas.autotune.search.gpu")
    return gpu.imagined("h100")


def lookup(path: str, import_us: str) -> Found:
    """Measures the lookup of a shape: the first in a process, a tuned one, and one that is not
    tuned.
    """
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    begun = time.process_time_ns()
    importlib.import_module("outblas.autotune.automatic")  # the module that the runtime asks
    lookup: Any = importlib.import_module("outblas.autotune.lookup")
    records: Any = importlib.import_module("outblas.autotune.store.records")
    known = lookup.TuningIndex(h100(), Path(path))
    tuned = records.Workload(*shape(0))
    chosen = known.choices(tuned)
    first = (time.process_time_ns() - begun) / 1e3
    if not chosen or chosen[0].config != config(0):
        raise RuntimeError(f"the store's winner was not found, but {chosen}")

    near = [records.Workload(m + 8, n, k) for m, n, k in map(shape, range(NEAR_SHAPES + 1))]
    known.choices(near.pop())  # imports what the model needs of kernels
    untuned = sorted(timed(partial(known.choices, w), 1) for w in near)[NEAR_SHAPES // 2]
    a = torch.randn(SIZE, SIZE)
    again, call = 1e9, 1e9
    for _ in range(30):
        again = min(again, timed(lambda: known.choices(tuned), CALLS))
        call = min(call, timed(lambda: torch.matmul(a, a), CALLS))
    return {
        "lookup, first of a process": ("import torch", first, float(import_us)),
        "lookup, a shape seen before": ("torch.matmul", again, call),
        "lookup, a shape not tuned": ("torch.matmul", untuned, call),
    }


# ---- what sweeps and reports compute
def models(import_us: str) -> Found:
    """Measures the plan of a sweep, an order of tiles, and the model of L2 for it; the minimum of
    three.
    """
    prune: Any = importlib.import_module("outblas.autotune.search.prune")
    target: Any = importlib.import_module("outblas.autotune.search.target")
    records: Any = importlib.import_module("outblas.autotune.store.records")
    raster: Any = importlib.import_module("outblas.device.raster")
    l2: Any = importlib.import_module("outblas.device.l2")
    workload, gpu = records.Workload(4096, 4096, 4096), h100()
    kernel = target.of("portable")
    tiles, tile = (GRID * 128, GRID * 128, 4096), (128, 128)
    steps = raster.schedule("hilbert", GRID, GRID, 128)
    works: dict[str, Callable[[], object]] = {
        "plan of a sweep of portable": lambda: prune.prune((kernel,), workload, gpu),
        f"order of {GRID}x{GRID} tiles": lambda: raster.order("hilbert", GRID, GRID),
        f"L2 under {GRID}x{GRID} tiles": lambda: l2.simulate(steps, tiles, tile, capacity=5e7),
    }
    return {
        name: ("import torch", min(timed(work, 1) for _ in range(3)), float(import_us))
        for name, work in works.items()
    }


def timed(function: Callable[[], object], count: int) -> float:
    """Returns the µs of CPU time per call."""
    begun = time.process_time_ns()
    for _ in range(count):
        function()
    return (time.process_time_ns() - begun) / count / 1e3


def main(kind: str, *given: str) -> None:
    found = imports()
    import_us = str(found["import outblas"][2])
    if kind == "calls":
        found |= calls(given[0])
    elif kind == "lookup":
        found |= lookup(given[0], import_us)
    elif kind == "models":
        found |= models(import_us)
    else:
        fill(given[0])
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "outblas"]
    files = [file for module in modules if (file := getattr(module, "__file__", None))]
    print(json.dumps({"files": files, "figures": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
