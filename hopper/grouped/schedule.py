"""The schedule of a grouped product with ragged rows, which each CTA makes from the ends of groups.

The tile rows of all groups are numbered one after the other. One warp writes to shared memory, for
each group, how many tile rows it and all groups before it have. A warp that needs a tile divides the
tile's number by the columns of tiles, and finds the group by comparing the number of the row with 32
groups at a time.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..gemm.tile_scheduler import KPartition
from .traits import BY_BALLOT, GroupedTraits

BAND = 8  # tile rows of a group that are walked together, column by column


class GroupedParams(NamedTuple):
    """The schedule of a launch.

    offs: the ends of groups, int32 (groups). M: the rows of A and C. columns, by_columns,
    by_band: the columns of tiles, and the divisors by them and by `BAND` rows of them.
    k_tiles: those of each tile. clusters: how many were launched. tile_rows: in shared memory, int32
    (capacity), the tile rows of each group and of all before it; None before it exists.
    """

    offs: Any
    M: Any
    columns: Any
    by_columns: Any
    by_band: Any
    k_tiles: Any
    clusters: Any
    tile_rows: Any


class GroupedWorkTile(NamedTuple):
    """The work of a CTA at one step: rows from `row` on, of which those before `end_row` are its
    group's; the columns from `column` on; the `matrix` of B, which is the group. The names are
    those of `tile_scheduler.WorkTile`.
    """

    row: Int32
    end_row: Int32
    column: Int32
    narrow: Int32
    matrix: Int32
    partition: KPartition

    def first_row(self, tile_m: int) -> Int32:
        """Returns the first row of the tile."""
        return self.row


@dataclass(frozen=True)
class GroupedScheduler:
    """The inputs of a CTA's scheduling; the names are those of `tile_scheduler.TileScheduler`."""

    params: GroupedParams
    cluster: Any
    coord: Any
    traits: GroupedTraits

    def work_tile_count(self, config):
        """Returns the number of work tiles of the cluster."""
        return work_tile_count(self)

    def current_work(self, config, step) -> GroupedWorkTile:
        """Returns this CTA's work at the cluster's step `step`."""
        return current_work(self, config, step)


@cute.jit
def bounds(params: GroupedParams, group):
    """Returns the first row of a group and the row behind its last one. The group behind all others
    has the rows that are left over. Ends that decrease or leave C are clamped.
    """
    groups = params.offs.shape[0]
    begin, end = Int32(0), params.M
    if group > 0 and group <= groups:
        begin = params.offs[group - 1]
    if group < groups:
        end = params.offs[group]
    begin = cutlass.min(cutlass.max(begin, 0), params.M)
    return begin, cutlass.min(cutlass.max(end, begin), params.M)


@cute.jit
def make_tile_rows(params: GroupedParams, rows: cutlass.Constexpr, traits: cutlass.Constexpr):
    """One warp: writes `params.tile_rows`, for cluster tiles of `rows` rows."""
    lane = cute.arch.lane_idx()
    count = params.offs.shape[0] + (1 if cutlass.const_expr(traits.zero_tail) else 0)
    before = Int32(0)
    for first in cutlass.range_constexpr(0, traits.capacity, BY_BALLOT):
        group = first + lane
        begin, end = bounds(params, group)
        total = Int32(0)
        if group < count:
            total = (end - begin + rows - 1) // rows
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << step)
            if lane >= 1 << step:
                total += below
        total += before
        params.tile_rows[group] = total
        before = cute.arch.shuffle_sync(total, BY_BALLOT - 1)


@cute.jit
def work_tile_count(scheduler: GroupedScheduler):
    params = scheduler.params
    tiles = params.tile_rows[scheduler.traits.capacity - 1] * params.columns
    return (tiles - scheduler.cluster + params.clusters - 1) // params.clusters


@cute.jit
def find_group(scheduler: GroupedScheduler, tile_row):
    """A whole warp: returns the group of a tile row: as many groups end before it."""
    lane, group = cute.arch.lane_idx(), Int32(0)
    for first in cutlass.range_constexpr(0, scheduler.traits.capacity, BY_BALLOT):
        is_before = scheduler.params.tile_rows[first + lane] <= tile_row
        group += cute.arch.popc(cute.arch.vote_ballot_sync(is_before))
    return cute.arch.make_warp_uniform(group)


@cute.jit
def current_work(scheduler: GroupedScheduler, config: cutlass.Constexpr, step):
    """Returns this CTA's work at the cluster's step `step`. In a group tiles follow each other down
    the columns of bands of `BAND` rows.
    """
    params, coord = scheduler.params, scheduler.coord
    index = step * params.clusters + scheduler.cluster
    tile_row, _ = divmod(index, params.by_columns)
    group = find_group(scheduler, tile_row)
    first = Int32(0)
    if group > 0:
        first = params.tile_rows[group - 1]
    rows = params.tile_rows[group] - first
    band, rest = divmod(index - first * params.columns, params.by_band)
    height = cutlass.min(rows - band * BAND, BAND)
    n = rest // height
    m = band * BAND + rest - n * height

    begin, end = bounds(params, group)
    row = begin + (m * config.cluster_m + coord.cta_m_in_cluster) * config.tile_m
    column = (n * config.cluster_n + coord.cta_n_in_cluster) * config.tile_n
    k_begin, k_tiles, matrix = Int32(0), params.k_tiles, group
    if cutlass.const_expr(scheduler.traits.zero_tail):
        if group == params.offs.shape[0]:
            # A k tile behind the end of K, for which TMA writes zeros.
            k_begin, k_tiles, matrix = params.k_tiles, Int32(1), group - 1
    partition = KPartition(k_begin, k_tiles, Int32(0), Int32(1), Int32(0), Int32(0))
    return GroupedWorkTile(row, end, column, Int32(0), matrix, partition)
