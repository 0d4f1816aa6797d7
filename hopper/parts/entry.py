"""Makes the functions that every rung's module exports from its kernel class and its config. One of
them measures where the cycles of a call go: it runs a kernel compiled with `phases=True` and
averages its phase timers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outblas.base.registry import Kernel
from outblas.call.problem import problem
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.base import HopperGemm
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.host import HopperRung, artifact, plan, precompile, trace, unsupported
from outblas.hopper.parts.phase_clock import PHASES
from outblas.hopper.parts.search_space import space


def entry(
    kernel: Kernel, gemm: type[HopperGemm], kind: type[HopperConfig]
) -> tuple[Callable[..., Any], ...]:
    """Returns what a rung's module exports: `unsupported`, `plan`, `artifact`, `phases`,
    `precompile` and `space`. `kind()` is the rung's default config.
    """
    rung = HopperRung(kernel.name, gemm, kind())
    return (
        functools.partial(unsupported, gemm),
        functools.partial(plan, rung),
        functools.partial(artifact, rung),
        functools.partial(measure, rung),
        functools.partial(precompile, rung),
        functools.partial(space, gemm, rung.config, functools.partial(unsupported, gemm)),
    )


@dataclass(frozen=True)
class Role:
    """Mean SM cycles of one warpgroup's first thread. A phase that the role does not have is 0.

    wait, load, tensor: per k tile.
    store: per tile of C.
    total: all phases together, per tile of C.
    """

    name: str
    wait: float
    load: float
    tensor: float
    store: float
    total: float


def measure(
    rung: HopperRung,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: HopperConfig | None = None,
) -> tuple[Role, ...]:
    """Returns the cycles of a warm call C[M, N] = A[M, K] B[K, N] on a GPU by role: "all" where one
    warpgroup does everything, otherwise "producer" and each "consumer". Raises ValueError for
    problems that the kernel does not support.
    """
    config = replace(config or rung.config, phases=True)
    requested = problem(a, b, out)
    if reason := unsupported(rung.gemm, requested, config):
        raise ValueError(f"kernel {rung.name!r}: {reason}")
    with torch.cuda.device(a.device):
        launch, cycles = trace(rung, requested, config)
        for _ in range(2):
            launch(a, b, None, out, 1.0, 0.0)
        torch.cuda.synchronize()
    assert cycles is not None
    rows, columns = tile_order.cluster_tiles(config, requested.M, requested.N)
    tiles = rows * columns * config.cluster
    k_tiles = tiles * -(-requested.K // config.tile_k)
    sums = cycles.sum(0).tolist()
    names = (
        ["all"] if len(sums) == 1 else ["producer", *(f"consumer {i}" for i in range(1, len(sums)))]
    )
    return tuple(
        _role(name, of_role, k_tiles, tiles) for name, of_role in zip(names, sums, strict=True)
    )


def _role(name: str, cycles: list[int], k_tiles: int, tiles: int) -> Role:
    wait, load, tensor, store = cycles
    return Role(
        name, wait / k_tiles, load / k_tiles, tensor / k_tiles, store / tiles, sum(cycles) / tiles
    )


assert PHASES == ("wait", "load", "tensor", "store")  # the fields of Role
