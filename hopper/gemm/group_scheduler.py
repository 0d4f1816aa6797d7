"""The schedules of grouped products, which each CTA makes from the ends of groups.

Ragged rows: the tiles of all groups are numbered one after the other. One warp writes to shared
memory, for each group, how many tiles it and all groups before it have. A warp that needs a tile
finds its group by comparing the tile's number with 32 groups at a time. Of groups that have places
of their own, the numbers of rows are given in place of their ends; `bounds` alone tells them apart.

A cluster of two CTAs, one below the other, shares the columns of B. Where a group has an odd number
of tile rows, the lower CTA would have nothing to do in the last one. So clusters turn there: both
CTAs compute the same rows, and share them, in two columns of tiles next to each other.

Ragged terms: every group has as many tiles as every other, and its own number of k tiles. Groups
with the most terms come first, so that the clusters, which take tiles in turns, end at about the
same time. All threads write the order of groups to shared memory. The tiles of a group follow each
other down the columns of bands, where operands are read again, or along the rows of the result,
where writing it takes longer than reading them.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from outblas.call.fp8 import BLOCK
from outblas.hopper.gemm.tile_scheduler import KPartition
from outblas.hopper.gemm.traits import BY_BALLOT, KernelTraits

TURN = 8  # columns of tiles after which K is walked in the other direction
BLOCK_WORDS = BLOCK // 2  # of two fp8 terms
BAND_ROWS = 2048  # of a group that are walked together, column by column


def band(config):
    """Returns the tile rows of a cluster that are walked together. 132 tiles of 128×256 read the
    least where they are 16 rows and 8 columns of tiles.
    """
    return max(1, BAND_ROWS // (config.tile_m * config.cluster_m))


class GroupedParams(NamedTuple):
    """The schedule of a launch.

    offs: the ends of groups, int32 (groups). extent: the size of the ragged dimension in their
    unit, which is one fp8 value where a k tile has words of two. rows,
    columns: of cluster tiles; with ragged rows, `rows` is not used. by_columns, by_matrix, by_band:
    divisors by the columns, by the tiles of a group with ragged terms, and by the tiles of `band`
    rows. k_tiles: those of each tile, with ragged rows. clusters: how many were launched. a,
    a_index: A and the index of its rows, where rows are gathered; else None. group_rows: the rows
    for which each group has room, where groups have places of their own, and `offs` holds the
    numbers of their rows; else None. turned: the TmaOperands A and B of clusters that turn; else
    None. table: in shared memory, int32 (capacity), what `make_tile_counts` or `make_order` writes;
    None before it exists.
    """

    offs: Any
    extent: Any
    rows: Any
    columns: Any
    by_columns: Any
    by_matrix: Any
    by_band: Any
    k_tiles: Any
    clusters: Any
    a: Any
    a_index: Any
    group_rows: Any
    turned: Any
    table: Any


class GroupedWorkTile(NamedTuple):
    """The work of a CTA at one step: rows from `row` on, of which those before `end_row` are its
    group's (None: all rows of C); the columns from `column` on; the `matrix` of B or of C, which is
    the group. The names are those of `tile_scheduler.WorkTile`.

    first_term: the term of K, or the word of fp8 terms, at which k tile 0 begins. terms: those of
    the last k tile. backwards: 1 where the last k tile comes first. turned: 1 where the cluster is.
    """

    row: Int32
    end_row: Any
    column: Int32
    matrix: Int32
    partition: KPartition
    first_term: Int32
    terms: Int32
    backwards: Int32
    turned: Int32

    def first_row(self, tile_m: int) -> Int32:
        """Returns the first row of the tile."""
        return self.row


@dataclass(frozen=True)
class GroupedScheduler:
    """The inputs of a CTA's scheduling; the names are those of `tile_scheduler.TileScheduler`."""

    params: GroupedParams
    cluster: Any
    coord: Any
    traits: KernelTraits

    def work_tile_count(self, config):
        """Returns the number of work tiles of the cluster."""
        return work_tile_count(self)

    def current_work(self, config, step):
        """Returns this CTA's work at the cluster's step `step`."""
        if self.traits.divides_terms:
            return work_of_terms(self, config, step)
        return work_of_rows(self, config, step)

    def backwards(self, config, work: GroupedWorkTile, step):
        """Returns 1 where the k tiles of a work tile are loaded from the last to the first."""
        return work.backwards

    def tile_epilogue(self, epilogue, work: GroupedWorkTile):
        """Returns what the epilogue of a work tile reads: of the bias, (groups, N), the group's
        vector.
        """
        tensors = epilogue.tensors
        if tensors.bias is None:
            return epilogue
        return replace(epilogue, tensors=tensors._replace(bias=tensors.bias[work.matrix, None]))

    def scales_of(self, scales, work: GroupedWorkTile):
        """Returns the BlockScales of a work tile, whose rows and k tiles are numbered as those of
        the tile: with ragged rows the group's of B, with ragged terms those from its first on.
        """
        a, b = scales.scale_a, scales.scale_b
        if self.traits.divides_terms:
            first = work.first_term // BLOCK_WORDS
            a, b = (cute.domain_offset((0, first), scale) for scale in (a, b))
        else:
            b = b[None, None, work.matrix]
            if self.traits.masked:
                a = numbered_through(a, work.matrix, self.params.group_rows)
        return replace(scales, scale_a=a, scale_b=b)


def numbered_through(scale, group, rows):
    """Returns the scales of a group from (rows, blocks of K, groups), as those of a matrix that
    has the `rows` rows of each group up to this one.
    """
    own = cute.domain_offset((-group * rows, 0), scale[None, None, group])
    layout = cute.make_layout(((group + 1) * rows, own.shape[1]), stride=own.stride)
    return cute.make_tensor(own.iterator, layout)


@cute.jit
def bounds(params: GroupedParams, group):
    """Returns the first row of a group and the row behind its last one. The group behind all others
    has the rows that are left over. Ends that decrease or leave C are clamped, and so are numbers
    of rows for which there is no room.
    """
    if cutlass.const_expr(params.group_rows is not None):
        return own_place(params, group)
    groups = params.offs.shape[0]
    begin, end = Int32(0), params.extent
    if group > 0 and group <= groups:
        begin = params.offs[group - 1]
    if group < groups:
        end = params.offs[group]
    begin = cutlass.min(cutlass.max(begin, 0), params.extent)
    return begin, cutlass.min(cutlass.max(end, begin), params.extent)


@cute.jit
def own_place(params: GroupedParams, group):
    """Returns `bounds` where groups have places of their own. Those behind all others, for which
    lanes ask, have no rows.
    """
    begin, end = Int32(0), Int32(0)
    if group < params.offs.shape[0]:
        begin = group * params.group_rows
        end = begin + cutlass.min(cutlass.max(params.offs[group], 0), params.group_rows)
    return begin, end


@cute.jit
def make_tile_counts(params: GroupedParams, config: cutlass.Constexpr, traits: cutlass.Constexpr):
    """One warp: writes to `params.table` the cluster tiles of each group and of all groups before
    it.
    """
    lane = cute.arch.lane_idx()
    count = params.offs.shape[0] + (1 if cutlass.const_expr(traits.zero_tail) else 0)
    before = Int32(0)
    for first in cutlass.range_constexpr(0, traits.capacity, BY_BALLOT):
        group = first + lane
        begin, end = bounds(params, group)
        total = Int32(0)
        if group < count:
            total = tile_count(params, config, traits, end - begin)
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << step)
            if lane >= 1 << step:
                total += below
        total += before
        params.table[group] = total
        before = cute.arch.shuffle_sync(total, BY_BALLOT - 1)


def tile_count(params: GroupedParams, config, traits, rows):
    """Returns how many cluster tiles a group of `rows` rows has."""
    if traits.turns:
        tile_rows = (rows + config.tile_m - 1) // config.tile_m
        return tile_rows // 2 * params.columns + tile_rows % 2 * ((params.columns + 1) // 2)
    high = config.tile_m * config.cluster_m
    return (rows + high - 1) // high * params.columns


@cute.jit
def make_order(
    params: GroupedParams, thread, threads: cutlass.Constexpr, capacity: cutlass.Constexpr
):
    """All threads: write to `params.table` the groups in the order of their numbers of terms, the
    greatest first, and equal ones in their own order.
    """
    groups = params.offs.shape[0]
    for first in cutlass.range_constexpr(0, capacity, threads):
        group = first + thread
        if group < groups:
            begin, end = bounds(params, group)
            rank, before = Int32(0), Int32(0)
            for other in cutlass.range(groups, unroll=4):
                stop = cutlass.min(cutlass.max(params.offs[other], 0), params.extent)
                terms = cutlass.max(stop - before, 0)
                if terms > end - begin or (terms == end - begin and other < group):
                    rank += 1
                before = stop
            params.table[rank] = group


@cute.jit
def work_tile_count(scheduler: GroupedScheduler):
    """Returns the number of work tiles of the cluster."""
    params = scheduler.params
    if cutlass.const_expr(scheduler.traits.divides_terms):
        tiles = params.offs.shape[0] * params.rows * params.columns
    else:
        tiles = params.table[scheduler.traits.capacity - 1]
    return (tiles - scheduler.cluster + params.clusters - 1) // params.clusters


@cute.jit
def find_group(scheduler: GroupedScheduler, tile):
    """A whole warp: returns the group of a tile: as many groups end before it."""
    lane, group = cute.arch.lane_idx(), Int32(0)
    for first in cutlass.range_constexpr(0, scheduler.traits.capacity, BY_BALLOT):
        is_before = scheduler.params.table[first + lane] <= tile
        group += cute.arch.popc(cute.arch.vote_ballot_sync(is_before))
    return cute.arch.make_warp_uniform(group)


@cute.jit
def work_of_rows(scheduler: GroupedScheduler, config: cutlass.Constexpr, step):
    """Returns this CTA's work at the cluster's step `step`, with ragged rows. In a group tiles
    follow each other down the columns of bands.

    The direction of K changes with every `TURN` columns, about as many as all CTAs compute
    together: what they loaded last of A is then what they need first. It does not depend on other
    groups.
    """
    params = scheduler.params
    index = step * params.clusters + scheduler.cluster
    group = find_group(scheduler, index)
    if group > 0:
        index -= params.table[group - 1]
    begin, end = bounds(params, group)
    turned = Int32(0)
    if cutlass.const_expr(scheduler.traits.turns):
        tile_rows = (end - begin + config.tile_m - 1) // config.tile_m
        m, n, turned = in_turning_bands(params, config, index, tile_rows)
        row, column = own_part(scheduler, config, m, n, turned)
    else:
        high = config.tile_m * config.cluster_m
        m, n = in_bands(params, config, index, (end - begin + high - 1) // high)
        row, column = own_tile(scheduler, config, m, n)
    k_begin, k_tiles, matrix = Int32(0), params.k_tiles, group
    backwards = n // TURN & 1
    if cutlass.const_expr(scheduler.traits.zero_tail):
        groups = params.offs.shape[0]
        if group == groups:
            # A k tile behind the end of K, for which TMA writes zeros.
            k_begin, k_tiles, matrix = params.k_tiles, Int32(1), group - 1
    partition = KPartition(k_begin, k_tiles, Int32(0), Int32(1), Int32(0), Int32(0))
    nothing = Int32(0)
    return GroupedWorkTile(
        begin + row, end, column, matrix, partition, nothing, nothing, backwards, turned
    )


@cute.jit
def work_of_terms(scheduler: GroupedScheduler, config: cutlass.Constexpr, step):
    """Returns this CTA's work at the cluster's step `step`, with ragged terms."""
    params = scheduler.params
    place, rest = divmod(step * params.clusters + scheduler.cluster, params.by_matrix)
    group = params.table[place]
    if cutlass.const_expr(scheduler.traits.row_order):
        m, n = divmod(rest, params.by_columns)
    else:
        m, n = in_bands(params, config, rest, params.rows)
    begin, end = bounds(params, group)
    if cutlass.const_expr(scheduler.traits.masks_terms):
        count = cutlass.max((end - begin + config.tile_k - 1) // config.tile_k, 1)
        terms = end - begin - (count - 1) * config.tile_k
        if begin == end:
            # A k tile behind the end of K, for which TMA writes zeros.
            begin, terms = params.extent, Int32(config.tile_k)
    else:
        # A k tile is a block. Without any the sums, which are added in fp32, stay zero.
        count = (end + BLOCK - 1) // BLOCK - begin // BLOCK
        count = Int32(0) if begin == end else count
        begin, terms = begin // BLOCK * config.tile_k, Int32(config.tile_k)
    partition = KPartition(Int32(0), count, Int32(0), Int32(1), Int32(0), Int32(0))
    row, column = own_tile(scheduler, config, m, n)
    straight = Int32(0)
    return GroupedWorkTile(row, None, column, group, partition, begin, terms, Int32(1), straight)


@cute.jit
def in_bands(params: GroupedParams, config: cutlass.Constexpr, index, rows):
    """Returns the row and column of tile `index` in a matrix with `rows` rows of cluster tiles."""
    above, rest = divmod(index, params.by_band)
    above *= band(config)
    height = cutlass.min(rows - above, band(config))
    n = rest // height
    return above + rest - n * height, n


@cute.jit
def in_turning_bands(params: GroupedParams, config: cutlass.Constexpr, index, tile_rows):
    """Returns the first tile row and the first column of tiles of cluster tile `index` in a group
    with `tile_rows` rows, and 1 where the cluster is turned.

    Two rows at a time are walked down the columns of bands. If a row is left over, two columns at a
    time are walked in the last band: after the tiles of both comes the one of a turned cluster,
    which reads the same columns of B once more.
    """
    pairs, height = tile_rows // 2, band(config)
    last = cutlass.max((pairs + height - 1) // height - 1, 0)
    above, _ = divmod(index, params.by_band)
    above = cutlass.min(above, last) * height
    rest = index - above * params.columns
    height = cutlass.min(pairs - above, height)
    m, n, turned = Int32(0), Int32(0), Int32(0)
    if tile_rows % 2 == 1 and above + height == pairs:
        n = rest // (2 * height + 1) * 2
        m = rest - n // 2 * (2 * height + 1)
        if m >= height * cutlass.min(params.columns - n, 2):
            m, turned = pairs - above, Int32(1)
        elif m >= height:
            m, n = m - height, n + 1
    else:
        n = rest // height
        m = rest - n * height
    return (above + m) * 2, n, turned


def own_tile(scheduler: GroupedScheduler, config, m, n):
    """Returns the first row and column of this CTA in a cluster tile."""
    coord = scheduler.coord
    return (
        (m * config.cluster_m + coord.cta_m_in_cluster) * config.tile_m,
        (n * config.cluster_n + coord.cta_n_in_cluster) * stored_columns(scheduler, config),
    )


def own_part(scheduler: GroupedScheduler, config, m, n, turned):
    """Returns the first row and column of this CTA in the tile of a cluster that may be turned,
    which begins at tile row m and in column n of tiles.
    """
    rank = scheduler.coord.cta_m_in_cluster
    return (
        (m + rank * (1 - turned)) * config.tile_m,
        (n + rank * turned) * stored_columns(scheduler, config),
    )


def stored_columns(scheduler: GroupedScheduler, config) -> int:
    """Returns the columns of a tile. A gated pair counts as one."""
    columns: int = config.tile_n // (2 if scheduler.traits.gated else 1)
    return columns
