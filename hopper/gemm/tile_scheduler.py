"""Determines which part of the product a cluster computes at each of its steps.

Tiles of C are numbered by a table, whose order the host makes, or down the columns of the grid.
Where each cluster has one tile, of any matrix, `table_entry` is its entry of the table. If K is not
split, cluster c computes tiles c, c + clusters, and so on. With `split_k` the partitions of tiles
are distributed in the same way. With `stream_k` the k tiles of all tiles that fill no whole wave
form one sequence. Every cluster computes an equal part of it after its whole tiles, as partitions
of one or two tiles.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class FastDivmods(NamedTuple):
    """The divisors for tile numbers, prepared by the host. A division by any other number is a
    chain of 30 instructions, and the first load waits for two divisions. `line`: tiles side by side
    in the order in which they are numbered; `matrix`: tiles of one matrix.
    """

    line: Any
    matrix: Any
    clusters: Any
    partitions: Any


class ScheduleParams(NamedTuple):
    """The schedule of a launch, made by the host.

    `divmods` divide quickly. `tiles` is the number for all matrices, `k_tiles` the number per tile.
    `wide_columns`: with a variable tile N, how many columns of tiles have the larger width.
    `table`: the tiles in their order, int32, or None. `partitions`: split-K partitions per tile.
    `clusters`: the number of launched clusters.
    """

    divmods: Any
    tiles: Any
    wide_columns: Any
    k_tiles: Any
    table: Any
    partitions: Any
    clusters: Any


class KPartition(NamedTuple):
    """A part of the K of a tile: `count` k tiles from `begin` on. It is partition `index` of
    `total` in the `split_tile`-th tile that is split; the partial sums of that tile's first
    partition lie at `workspace_index`.
    """

    begin: Int32
    count: Int32
    index: Int32
    total: Int32
    split_tile: Int32
    workspace_index: Int32


class WorkTile(NamedTuple):
    """The work of a CTA at one step: row tile `m`, the columns from `column` on in one matrix of
    the batch, and the `partition` of K. `narrow`: 1 if the tile has the smaller of the two widths.
    """

    m: Int32
    column: Int32
    narrow: Int32
    matrix: Int32
    partition: KPartition

    @property
    def end_row(self) -> None:
        """Where rows end that this tile may write: at the end of C. In a grouped product it is the
        end of a group.
        """

    def first_row(self, tile_m: int) -> Int32:
        """Returns the first row of the tile."""
        return self.m * tile_m


@dataclass(frozen=True)
class TileScheduler:
    """The inputs of a CTA's scheduling. `cluster`: the index of its cluster. `coord`: its position
    in the cluster. `table_entry`: the cluster's tile, if the cluster has only one, else None.
    `columns`: columns of C from one tile to the next. `batched`, `single_wave`: as in
    `KernelTraits`.
    """

    params: ScheduleParams
    cluster: Any
    coord: Any
    table_entry: Any
    columns: int
    batched: bool
    single_wave: bool

    def work_tile_count(self, config):
        """Returns the number of work tiles of the cluster."""
        return work_tile_count(self, config)

    def current_work(self, config, step):
        """Returns this CTA's work at the cluster's step `step`."""
        return current_work(self, config, step)

    def backwards(self, config, work: WorkTile, step):
        """Returns 1 where the k tiles of a work tile are loaded from the last to the first."""
        return step & 1 if config.k_serpentine else Int32(0)

    def tile_epilogue(self, epilogue, work: WorkTile):
        """Returns what the epilogue of a work tile reads: the same for all tiles."""
        return epilogue

    def scales_of(self, scales, work: WorkTile):
        """Returns the BlockScales of a work tile: those of the launch."""
        return scales


@cute.jit
def work_tile_count(scheduler: TileScheduler, config: cutlass.Constexpr):
    """Returns the number of work tiles of the cluster."""
    params = scheduler.params
    if cutlass.const_expr(scheduler.single_wave):
        return 1
    if cutlass.const_expr(config.stream_k):
        begin = stream_begin(params, scheduler.cluster)
        end = stream_begin(params, scheduler.cluster + 1)
        parts = Int32(0)
        if end > begin:
            parts = (end - 1) // params.k_tiles - begin // params.k_tiles + 1
        return params.tiles // params.divmods.clusters + parts
    items = params.tiles * params.partitions if cutlass.const_expr(config.split) else params.tiles
    return (items - scheduler.cluster + params.clusters - 1) // params.divmods.clusters


@cute.jit
def stream_clusters(params: ScheduleParams):
    """Returns the number of clusters that have a part of stream-K's sequence of k tiles: all, or as
    many as there are k tiles.
    """
    return cutlass.min(params.clusters, params.tiles % params.divmods.clusters * params.k_tiles)


@cute.jit
def stream_begin(params: ScheduleParams, cluster):
    """Returns where a cluster's part begins in stream-K's sequence of k tiles."""
    count = stream_clusters(params)
    begin = Int32(0)
    if count > 0:
        row = params.tiles % params.divmods.clusters * params.k_tiles
        begin = cutlass.min(cluster, count) * row // count
    return begin


@cute.jit
def current_work(scheduler: TileScheduler, config: cutlass.Constexpr, step):
    """Returns this CTA's work at the cluster's step `step`."""
    params = scheduler.params
    index = step * params.clusters + scheduler.cluster
    partition = KPartition(Int32(0), params.k_tiles, Int32(0), Int32(1), Int32(0), Int32(0))
    if cutlass.const_expr(config.stream_k):
        index, partition = stream_k_work(scheduler, index, partition, step)
    elif cutlass.const_expr(config.cluster_k > 1):
        partition = cluster_k_partition(scheduler, config, partition)
    elif cutlass.const_expr(config.split):
        index, partition = split_k_work(params, index)
    return tile_coord(scheduler, config, index, partition)


@cute.jit
def stream_k_work(scheduler: TileScheduler, index, partition: KPartition, step):
    """Returns the index of the tile and its partition of K, with stream-K. `index` and `partition`
    are those of a whole tile.
    """
    params = scheduler.params
    whole = params.tiles // params.divmods.clusters
    if step >= whole:
        row = params.tiles % params.divmods.clusters * params.k_tiles
        count_of = stream_clusters(params)
        first = stream_begin(params, scheduler.cluster)
        end = stream_begin(params, scheduler.cluster + 1)
        split_tile = first // params.k_tiles + (step - whole)
        low = split_tile * params.k_tiles
        begin = cutlass.max(first - low, 0)
        count = cutlass.min(end - low, params.k_tiles) - begin
        # The clusters that have the tile's first and its last k tile.
        begins_in = ((low + 1) * count_of + row - 1) // row - 1
        ends_in = ((low + params.k_tiles) * count_of + row - 1) // row - 1
        # Every next tile or cluster moves the index on, so no two partitions share a place for
        # their sums.
        workspace_index = begins_in + split_tile
        partition = KPartition(
            begin,
            count,
            scheduler.cluster - begins_in,
            ends_in - begins_in + 1,
            split_tile,
            workspace_index,
        )
        index = whole * params.clusters + split_tile
    return index, partition


@cute.jit
def cluster_k_partition(scheduler: TileScheduler, config: cutlass.Constexpr, partition: KPartition):
    """Returns the partition of K that this CTA of the cluster computes in every tile."""
    part, k_tiles = scheduler.coord.cta_k_in_cluster, scheduler.params.k_tiles
    begin = part * k_tiles // config.cluster_k
    count = (part + 1) * k_tiles // config.cluster_k - begin
    return partition._replace(begin=begin, count=count)


@cute.jit
def split_k_work(params: ScheduleParams, index):
    """Returns the index of the tile and its partition of K, for the `index`-th partition of all
    tiles.
    """
    tile, part = divmod(index, params.divmods.partitions)
    begin = part * params.k_tiles // params.divmods.partitions
    count = (part + 1) * params.k_tiles // params.divmods.partitions - begin
    workspace_index = tile * params.partitions
    return tile, KPartition(begin, count, part, params.partitions, tile, workspace_index)


@cute.jit
def tile_coord(scheduler: TileScheduler, config: cutlass.Constexpr, index, partition: KPartition):
    """Returns the work tile of this CTA in cluster tile `index`."""
    params, coord = scheduler.params, scheduler.coord
    matrix = Int32(0)
    if cutlass.const_expr(scheduler.table_entry is not None):
        index = scheduler.table_entry
    if cutlass.const_expr(scheduler.batched):
        matrix, index = divmod(index, params.divmods.matrix)
    if cutlass.const_expr(params.table is not None):
        if cutlass.const_expr(scheduler.table_entry is None):
            index = params.table[index]
        m, n = divmod(index, params.divmods.line)
    else:
        n, m = divmod(index, params.divmods.line)
    m = m * config.cluster_m + coord.cta_m_in_cluster
    n = n * config.cluster_n + coord.cta_n_in_cluster

    column, narrow = n * scheduler.columns, Int32(0)
    if cutlass.const_expr(config.variable_tile_n):
        column -= 8 * cutlass.max(n - params.wide_columns, 0)
        if n >= params.wide_columns:
            narrow = Int32(1)
    return WorkTile(m, column, narrow, matrix, partition)
