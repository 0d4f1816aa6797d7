"""The tile arithmetic of hopper.gemm on Python's integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from outblas.device import raster
from outblas.hopper.gemm import records, tile_scheduler
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.config import HopperConfig

from .own_source import run_source


class Word(int):
    """An integer of 32 bits: arithmetic that would leave them is an assertion's failure."""

    def __divmod__(self, other: int) -> tuple[Word, Word]:
        quotient, remainder = divmod(int(self), int(other))
        return Word(quotient), Word(remainder)


def _checked(name: str) -> Callable[[Word, int], Word]:
    """An operator of int whose result must fit 32 bits."""
    compute = getattr(int, name)

    def operation(self: Word, other: int) -> Word:
        result = compute(int(self), int(other))
        assert -(1 << 31) <= result < 1 << 31, f"{self} {name} {other} is {result}"
        return Word(result)

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Word, f"__{_name}__", _checked(f"__{_name}__"))
    setattr(Word, f"__r{_name}__", _checked(f"__r{_name}__"))


def scheduler_on_integers() -> SimpleNamespace:
    """The functions of the scheduler's own source, which compute on `Word` what the DSL would
    trace.
    """
    return SimpleNamespace(**run_source(tile_scheduler, Int32=Word))


def launch(
    config: HopperConfig, M: int, N: int, K: int, batch: int = 0, fit: int = 132, order: str = ""
) -> tile_scheduler.TileScheduler:
    """What the kernel has of a call on a GPU where so many clusters fit, as the host and
    `Gemm.__call__` make it. `order`: of the tiles, "" where clusters number them themselves,
    "assigned" where each cluster is given one.
    """
    rows, columns = tile_order.cluster_tiles(config, M, N)
    tiles, k_tiles = rows * columns * max(batch, 1), -(-K // config.tile_k)
    partitions = min(config.split_k, k_tiles)
    clusters = min(fit, tiles * (k_tiles if config.stream_k else partitions))
    single_wave = tiles * partitions <= fit and not config.stream_k
    table = None
    if order == "assigned":  # a tile each, of any matrix, in any order that has them all
        if single_wave and not config.split:
            table = [Word(tile) for tile in reversed(range(tiles))]
    elif order:
        waves = raster.schedule(order, rows, columns, fit, 8, 8)
        table = [Word(tile) for wave in waves for tile in wave]
    line = rows if table is None else columns
    params = tile_scheduler.ScheduleParams(
        divmods=tile_scheduler.FastDivmods(
            Word(line), Word(rows * columns), Word(clusters), Word(partitions)
        ),
        tiles=Word(tiles),
        wide_columns=Word(_wide_columns(config, N)),
        k_tiles=Word(k_tiles),
        table=table,
        partitions=Word(partitions),
        clusters=Word(clusters),
    )
    return tile_scheduler.TileScheduler(
        params,
        cluster=Word(0),
        coord=coord(),
        table_entry=None,
        columns=config.tile_n,
        batched=batch > 0,
        single_wave=single_wave,
    )


def _wide_columns(config: HopperConfig, N: int) -> int:
    """How many columns of tiles have the greater of the two widths, with a variable tile N."""
    if not config.variable_tile_n:
        return 0
    columns = tile_order.columns(config, N)
    beyond_narrow = N - columns * (config.tile_n - 8)
    return min(max(-(-beyond_narrow // 8), 0), columns)


def coord(m: int = 0, n: int = 0, k: int = 0) -> records.ClusterCoord:
    """Where a CTA stands in its cluster."""
    return records.ClusterCoord(Word(m), Word(n), None, None, Word(k), Word(0), Word(0))


class Step(NamedTuple):
    """What the CTAs of a cluster compute at one of its steps."""

    cluster: int
    work: tile_scheduler.WorkTile


class LaunchWork:
    """All that a launch computes, step by step: `steps` of all clusters, and the partitions of each
    tile, in their order, in `tiles`.
    """

    def __init__(
        self,
        arithmetic: SimpleNamespace,
        scheduler: tile_scheduler.TileScheduler,
        config: HopperConfig,
    ) -> None:
        self.params, self.config = scheduler.params, config
        self.steps = list(_steps(arithmetic, scheduler, config))
        self.tiles: dict[tuple[int, int, int], list[tile_scheduler.WorkTile]] = {}
        for _, work in self.steps:
            self.tiles.setdefault((work.matrix, work.m, work.column), []).append(work)
        for works in self.tiles.values():
            works.sort(key=lambda work: work.partition.index)

    def steps_of(self, cluster: int) -> list[tile_scheduler.WorkTile]:
        """What a cluster computes, partitions of its CTAs along K each for itself."""
        return [step.work for step in self.steps if step.cluster == cluster]


def _steps(
    arithmetic: SimpleNamespace, scheduler: tile_scheduler.TileScheduler, config: HopperConfig
) -> Iterator[Step]:
    params = scheduler.params
    for cluster, cta in itertools.product(range(int(params.clusters)), range(config.cluster_k)):
        entry = params.table[cluster] if params.table and scheduler.single_wave else None
        own = replace(scheduler, cluster=Word(cluster), coord=coord(k=cta), table_entry=entry)
        for step in range(arithmetic.work_tile_count(own, config)):
            work = arithmetic.current_work(own, config, Word(step))
            yield Step(cluster, _plain(work, config, cta))


def _plain(work: Any, config: HopperConfig, cta: int) -> tile_scheduler.WorkTile:
    """Work on plain integers; what CTAs of a cluster share along K are its partitions."""
    *place, partition = work
    partition = tile_scheduler.KPartition(*map(int, partition))
    if config.cluster_k > 1:
        partition = partition._replace(index=cta, total=config.cluster_k)
    m, column, narrow, matrix = map(int, place)
    return tile_scheduler.WorkTile(m, column, narrow, matrix, partition)
