"""Which cluster computes which tile: `device.raster`'s orders as tables on the GPU, made
once each.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from cutlass.utils import HardwareInfo

from ...core import forks
from ...device import memory, raster
from .config import HopperConfig

compiling = forks.Lock()  # cute.compile is not thread-safe, and HardwareInfo calls it
_kept: dict[Hashable, torch.Tensor] = {}
# By GPU, for whoever makes a table waits for its stream.
_making: dict[torch.device, forks.Lock] = {}


def cluster_tiles(config: HopperConfig, M: int, N: int) -> tuple[int, int]:
    """Rows and columns of the grid of cluster tiles; the last of either may overhang."""
    return -(-M // (config.tile_m * config.cluster_m)), -(-columns(config, N) // config.cluster_n)


def columns(config: HopperConfig, N: int) -> int:
    """Columns of tiles. Of variable width, they are as narrow as they may be, and as many are wider
    as it takes to reach N.
    """
    if not config.variable_tile_n:
        return -(-N // config.tile_n)
    narrow = N // (config.tile_n - 8)
    return narrow + (narrow * config.tile_n < N)


def table(
    config: HopperConfig, rows: int, columns: int, clusters: int, device: torch.device
) -> torch.Tensor:
    """int32 (steps, clusters): the tiles of each cluster as row · columns + column, -1 where it has
    none left.
    """
    order = config.order, rows, columns, clusters, config.group_m, config.group_n
    return kept(device, order, lambda: raster.schedule(*order))


def kept(device: torch.device, key: Hashable, order: Callable[[], Any]) -> torch.Tensor:
    """The tiles of `order()`, int32, on the GPU for all streams. They are made once for a key and
    stay for good: kernels, and CUDA graphs that hold their address, may run at any later time. A
    key has one order, whenever it is asked for.
    """
    with _making.setdefault(device, forks.Lock()):
        if (device, key) not in _kept:
            tiles = torch.tensor(order(), dtype=torch.int32, device="cpu")
            _kept[device, key] = memory.for_good(device, lambda: tiles.to(device))
        return _kept[device, key]


def balance_waves(clusters: int, tiles: int) -> int:
    """The fewest of `clusters` that still take as many waves for the tiles: the power of SMs that
    would idle in the last wave alone makes the others faster in every wave. At least 15 in 16,
    because loads need many SMs in flight.
    """
    fewest = -(-tiles // -(-tiles // clusters))
    return fewest if 16 * fewest >= 15 * clusters else clusters


@functools.cache
def clusters(device: torch.device, sms: int, cluster: int) -> int:
    """How many clusters run at the same time: clusters of two fill any Hopper GPU, larger ones
    leave some SMs out. Takes the lock `compiling`, which its caller must not hold.
    """
    present = torch.cuda.get_device_properties(device).multi_processor_count
    fit = (min(present, sms) if sms else present) // cluster
    if cluster > 2:
        with compiling:
            fit = min(fit, HardwareInfo(device.index).get_max_active_clusters(cluster))
    return max(fit, 1)
