"""Measures where the cycles of a call go: runs a kernel compiled with `phases=True` and averages
its phase timers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from outblas.core.problem import problem
from outblas.hopper.parts.phase_clock import PHASES

if TYPE_CHECKING:
    from outblas.hopper.parts.config import HopperConfig
    from outblas.hopper.parts.host import HopperRung


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
    from outblas.hopper.parts import host, tile_order

    config = replace(config or rung.config, phases=True)
    requested = problem(a, b, out)
    if reason := host.unsupported(rung.gemm, requested, config):
        raise ValueError(f"kernel {rung.name!r}: {reason}")
    with torch.cuda.device(a.device):
        launch, cycles = host.trace(rung, requested, config)
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
