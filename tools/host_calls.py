"""The warm calls that `tools.host` times: a script of pyperf, which runs it in processes of its
own. With `--quick` it times them in this process, and prints JSON.

It imports only what a tree on PYTHONPATH has, so that the same script times another checkout. No
kernel runs: GEMMs of CPU tensors are planned like those of a kernel, with a launch that does
nothing, so that what is left is the host's part.
"""

from __future__ import annotations

import json
import sys
import timeit
from collections.abc import Callable
from typing import Any

SIZE = 8  # matrices so small that torch's GEMM takes less time than its call
OURS, THEIRS = "outblas", "torch"


def pairs() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """outblas's calls and torch's for the same purpose, by name."""
    import torch

    import outblas
    from outblas.call import launcher

    # Private names, of this checkout and of one that it is compared with.
    launcher.no_kernel_reason = lambda problem: None
    launcher.best_launcher = lambda *_, **__: lambda *_: None
    torch.set_num_threads(1)
    a, b, c, out = (torch.randn(SIZE, SIZE) for _ in range(4))
    bias = torch.randn(SIZE)
    weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
    linear = torch.nn.functional.linear
    ours: Any = torch.ops.outblas
    aten: Any = torch.ops.aten
    layers = outblas.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
    learning = [step(layer(SIZE, SIZE)) for layer in (outblas.Linear, torch.nn.Linear)]
    for layer in layers:
        layer.requires_grad_(False)
    return {
        "matmul": (lambda: outblas.matmul(a, b), lambda: torch.matmul(a, b)),
        "matmul out=": (
            lambda: outblas.matmul(a, b, out=out),
            lambda: torch.matmul(a, b, out=out),
        ),
        "addmm": (lambda: outblas.addmm(c, a, b), lambda: torch.addmm(c, a, b)),
        "linear with bias": (lambda: outblas.linear(a, b, bias), lambda: linear(a, b, bias)),
        "linear under autograd": (
            lambda: outblas.linear(a, weight, bias),
            lambda: linear(a, weight, bias),
        ),
        "Linear": (lambda: layers[0](a), lambda: layers[1](a)),
        "Linear, forward and backward": (learning[0], learning[1]),
        # what compiled programs call
        "operator matmul": (lambda: ours.matmul(a, b), lambda: aten.mm(a, b)),
        "operator gemm with bias": (
            lambda: ours.gemm(a, b, None, bias),
            lambda: aten.addmm(bias, a, b),
        ),
    }


def step(layer: Any) -> Callable[[], object]:
    """A forward and backward pass through a layer, with gradients of input, weight and bias."""
    import torch

    x, grad = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    return lambda: layer(x).backward(grad)


def quickly(calls: tuple[Callable[[], object], ...], turns: int = 7) -> list[list[float]]:
    """The µs of calls, in turns, each of which takes about 20 ms for each call."""
    timers = [timeit.Timer(call) for call in calls]
    loops = [max(1, int(0.02 / min(timer.repeat(3, 100)) * 100)) for timer in timers]
    return [
        [1e6 * timer.timeit(n) / n for timer, n in zip(timers, loops, strict=True)]
        for _ in range(turns)
    ]


def main() -> None:
    """Times every pair, each call of outblas next to that of torch."""
    if "--quick" in sys.argv:
        print(json.dumps({name: quickly(calls) for name, calls in pairs().items()}))
        return
    import pyperf

    runner = pyperf.Runner(processes=3, values=8, warmups=1)
    for name, calls in pairs().items():
        for whose, call in zip((OURS, THEIRS), calls, strict=True):
            runner.bench_func(f"{name}: {whose}", call)


if __name__ == "__main__":
    main()
