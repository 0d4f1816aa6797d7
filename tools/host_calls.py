"""The calls that `tools.host` times: a script of pyperf, which runs it in processes of its own.

It imports only what a tree on PYTHONPATH has, so that the same script times another checkout. No
kernel runs: GEMMs of CPU tensors are planned like those of a kernel, with a launch that does
nothing, so that what is left is the host's part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pyperf

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
    }


def step(layer: Any) -> Callable[[], object]:
    """A forward and backward pass through a layer, with gradients of input, weight and bias."""
    import torch

    x, grad = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    return lambda: layer(x).backward(grad)


def main() -> None:
    """Times every pair, each call of outblas next to that of torch."""
    runner = pyperf.Runner(processes=3, values=8, warmups=1)
    for name, calls in pairs().items():
        for whose, call in zip((OURS, THEIRS), calls, strict=True):
            runner.bench_func(f"{name}: {whose}", call)
    # What a process waits for before its first call; torch, which outblas needs, is in both.
    for whose in (OURS, THEIRS):
        runner.bench_command(f"import: {whose}", [sys.executable, "-c", f"import {whose}"])


if __name__ == "__main__":
    main()
