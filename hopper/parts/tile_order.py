"""The assignment of tiles to clusters: the orders of `device.raster` as tables on the GPU, each
made once.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from outblas.base import forks
from outblas.call.sm_carveout import usable
from outblas.device import driver, raster
from outblas.device.clusters import at_once
from outblas.hopper.parts.config import HopperConfig

_kept: dict[Hashable, torch.Tensor] = {}
# Locks by GPU, because making a table waits for a stream.
_making: dict[torch.device, forks.Lock] = {}


def cluster_tiles(config: HopperConfig, M: int, N: int) -> tuple[int, int]:
    """Returns the rows and columns of the grid of cluster tiles; the last row and the last column
    may overhang.
    """
    return -(-M // (config.tile_m * config.cluster_m)), -(-columns(config, N) // config.cluster_n)


def columns(config: HopperConfig, N: int) -> int:
    """Returns the number of tile columns. With tiles of variable width, tiles are narrow except for
    as many wide ones as are needed to reach N.
    """
    if not config.variable_tile_n:
        return -(-N // config.tile_n)
    narrow = N // (config.tile_n - 8)
    return narrow + (narrow * config.tile_n < N)


def widths(config: HopperConfig, N: int) -> tuple[int, ...]:
    """Returns the widths of tiles that are in use, the larger first: two where some columns of
    tiles are narrow, else one.
    """
    if not config.variable_tile_n:
        return (config.tile_n,)
    narrow, count = config.tile_n - 8, columns(config, N)
    wide = min(-(-max(N - count * narrow, 0) // 8), count)
    return (config.tile_n,) * (wide > 0) + (narrow,) * (wide < count)


def table(
    config: HopperConfig, rows: int, columns: int, clusters: int, device: torch.device
) -> torch.Tensor:
    """Returns the tiles of each cluster as int32 (steps, clusters): row · columns + column, or -1
    where the cluster has no tile left.
    """
    order = config.order, rows, columns, clusters, config.group_m, config.group_n
    return kept(device, order, lambda: raster.schedule(*order))


def kept(device: torch.device, key: Hashable, order: Callable[[], Any]) -> torch.Tensor:
    """Returns the tiles of `order()`, int32, on the GPU, usable on all streams. They are made once
    per key and never freed, because kernels, and CUDA graphs that hold their address, may run at
    any later time. A key must always have the same order.
    """
    with _making.setdefault(device, forks.Lock()):
        if (device, key) not in _kept:
            tiles = torch.from_numpy(np.array(order(), dtype=np.int32))
            _kept[device, key] = driver.for_good(device, lambda: tiles.to(device))
        return _kept[device, key]


def balance_waves(clusters: int, tiles: int) -> int:
    """Returns the smallest number of clusters that needs no more waves for the tiles than
    `clusters`.

    SMs that would idle only in the last wave are left out of every wave, because their share of the
    power makes the others faster. At least 15 in 16 are kept, because loads need many SMs in
    flight.
    """
    fewest = -(-tiles // -(-tiles // clusters))
    return fewest if 16 * fewest >= 15 * clusters else clusters


def within(device: torch.device, config: HopperConfig, carveout: int) -> HopperConfig:
    """Returns the config with as many SMs as it may use where `carveout` are left to others."""
    present = torch.cuda.get_device_properties(device).multi_processor_count
    return replace(config, sms=usable(present, config.sms, carveout, config.cluster))


def clusters(device: torch.device, sms: int, cluster: int) -> int:
    """Returns how many clusters a persistent launch has on a GPU: as many as run at the same time.
    `sms`: how many SMs it may use, 0 for all.

    Clusters of two fill any Hopper GPU. How many larger ones fit depends on the SMs that each GPC
    of the board has, and only the driver knows: it counts them for a kernel that is loaded, and the
    DSL compiles an empty one to ask. So that a call compiles nothing but its kernel, `at_once`
    estimates the number, and takes few rather than many.

    Only speed depends on it. No CTA waits for one of another cluster: partitions of K are added by
    the last that ends, and a cluster that finds no place starts when another has ended. Where fewer
    are launched than fit, some SMs idle in launches of more than one wave.
    """
    present = torch.cuda.get_device_properties(device).multi_processor_count
    return at_once(min(present, sms) if sms else present, cluster)
