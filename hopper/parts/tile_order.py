"""The assignment of tiles to clusters: the orders of `device.raster` as tables on the GPU, each
made once.

A call whose tiles nobody had before makes a table, and never waits for the GPU. The host writes it
into pinned memory that nothing else uses, and a stream of its own copies it, beside the kernels
that run. The copy is asked whether it has ended for as long as copies take when nothing else is
copied. If it has not, launches with that table wait for it on the GPU (`when_copied`), on whatever
stream they are, until it has.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from outblas.base import forks
from outblas.base.cuda_graphs import capturing
from outblas.call.problem import Launch
from outblas.call.sm_carveout import usable
from outblas.device import driver, raster
from outblas.device.clusters import at_once
from outblas.hopper.parts.config import HopperConfig

BLOCK = 1 << 19  # entries of the memory that tables share
ASKED = 30  # times that a copy is asked whether it has ended, about a microsecond each

_kept: dict[Hashable, torch.Tensor] = {}
_locks: dict[torch.device, forks.Lock] = {}
_blocks: dict[torch.device, "TableMemory"] = {}
_copying: dict[int, torch.cuda.Event] = {}  # by the address of a table: the end of its copy


@dataclass
class TableMemory:
    """Memory for tables on a GPU, as much on the host, and the stream that copies from one to the
    other, of this context. The entries before `used` belong to tables; none is ever freed.
    """

    tables: torch.Tensor
    pinned: torch.Tensor
    stream: torch.cuda.Stream
    context: int | None
    used: int = 0


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
    return kept(device, order, lambda: raster.table(*order))


def tiles(
    config: HopperConfig, rows: int, columns: int, clusters: int, device: torch.device
) -> torch.Tensor:
    """Returns the tiles of `table` one step after the other, as int32 (steps · clusters,)."""
    order = config.order, rows, columns, clusters, config.group_m, config.group_n
    return kept(device, ("flat", *order), lambda: raster.table(*order).ravel())


def kept(device: torch.device, key: Hashable, order: Callable[[], Any]) -> torch.Tensor:
    """Returns the tiles of `order()`, int32, on the GPU, for launches by `when_copied`. They are
    made once per key and never freed, because kernels, and CUDA graphs that hold their address, may
    run at any later time. A key must always have the same order.
    """
    table = _kept.get((device, key))
    if table is None:
        with _locks.setdefault(device, forks.Lock()):
            table = _kept.get((device, key))
            if table is None:
                tiles = np.ascontiguousarray(order(), dtype=np.int32)
                table = _kept[device, key] = _copied(device, tiles)
    return table


def _copied(device: torch.device, tiles: raster.Tiles) -> torch.Tensor:
    """Returns tiles on the GPU, to which they may still be copied. The caller holds the lock. The
    first tables, and those after a thousand or so, wait for the memory of all that follow.
    """
    host = torch.from_numpy(tiles)
    if device.type == "cpu":
        return host
    block = _blocks.get(device)
    if block is None or block.used + tiles.size > block.tables.numel():
        size = max(BLOCK, tiles.size)
        block = _blocks[device] = driver.for_good(device, lambda: _new_block(device, size))
    if driver.context() not in (None, block.context):  # a green context has streams of its own
        return driver.for_good(device, lambda: host.to(device))
    places = slice(block.used, block.used + tiles.size)
    block.used += -(-tiles.size // 32) * 32  # whole cache lines
    table, pinned = (memory[places].view(tiles.shape) for memory in (block.tables, block.pinned))
    pinned.copy_(host)
    with driver.relaxed_capture(), torch.cuda.stream(block.stream):
        table.copy_(pinned, non_blocking=True)
        copy = torch.cuda.Event()
        copy.record()
        if not any(copy.query() for _ in range(ASKED)):
            _copying[table.data_ptr()] = copy
    return table


def _new_block(device: torch.device, size: int) -> TableMemory:
    return TableMemory(
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int32, pin_memory=True),
        torch.cuda.Stream(device),
        driver.context(),
    )


def when_copied(launch: Launch, table: torch.Tensor | None) -> Launch:
    """Returns the launch of a kernel that reads a table, after the table is on the GPU."""
    copy = None if table is None else _copying.get(table.data_ptr())
    if table is None or copy is None:
        return launch

    def run(*args: Any) -> None:
        nonlocal copy
        if copy is not None:
            with driver.relaxed_capture():
                if copy.query():
                    _copying.pop(table.data_ptr(), None)
                    copy = None
                elif capturing(table.device):  # a graph cannot wait for what is not in it
                    copy.synchronize()
                else:
                    torch.cuda.current_stream(table.device).wait_event(copy)
        launch(*args)

    return run


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
