"""Which piece of the product a cluster computes at each of its steps.

Tiles of C are numbered by `k.table`, an order made by the host, or down the columns of the grid.
Where each cluster has one tile, of any matrix, `k.only` is its entry of that table. Without pieces
of K, cluster c has tiles c, c + clusters, and so on. With `split_k` the pieces of a tile count as
tiles do. With `stream_k` the tiles that fill no whole wave are one long row of slices, of which
every cluster has an equal part: pieces of one or two tiles, after its whole ones.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Work(NamedTuple):
    """A tile, or a piece of it: row tile `m` of the CTA, first column, index of its width, matrix
    of the batch, slices of K from `begin` on. It is one of `pieces`, number `piece`, of the
    `shared`-th tile that is cut; `place` is where the partial sums of the tile's first piece lie.
    """

    m: Int32
    column: Int32
    narrow: Int32
    matrix: Int32
    begin: Int32
    count: Int32
    piece: Int32
    pieces: Int32
    shared: Int32
    place: Int32


class Divisors(NamedTuple):
    """What numbers of tiles are divided by, made by the host: a division by anything else is 30
    instructions in a row, and the first load waits for two. `line`: tiles side by side in the order
    in which they are numbered; `matrix`: of one.
    """

    line: Any
    matrix: Any
    clusters: Any
    pieces: Any


@cute.jit
def steps(k, config: cutlass.Constexpr):
    """How many pieces of work the cluster has."""
    if cutlass.const_expr(k.single_wave):
        return 1
    if cutlass.const_expr(config.stream_k):
        begin, end = stream(k, k.cluster), stream(k, k.cluster + 1)
        parts = Int32(0)
        if end > begin:
            parts = (end - 1) // k.k_tiles - begin // k.k_tiles + 1
        return k.tiles // k.by.clusters + parts
    items = k.tiles * k.pieces if cutlass.const_expr(config.split) else k.tiles
    return (items - k.cluster + k.clusters - 1) // k.by.clusters


@cute.jit
def cutters(k):
    """Clusters that have a part of the row of slices: all, or as many as there are slices."""
    return cutlass.min(k.clusters, k.tiles % k.by.clusters * k.k_tiles)


@cute.jit
def stream(k, cluster):
    """Where a cluster's part begins in the row of slices of the tiles that fill no wave."""
    count = cutters(k)
    begin = Int32(0)
    if count > 0:
        begin = cutlass.min(cluster, count) * (k.tiles % k.by.clusters * k.k_tiles) // count
    return begin


@cute.jit
def at(k, config: cutlass.Constexpr, step):
    """The work of the cluster's step `step`, for this CTA."""
    index = step * k.clusters + k.cluster
    begin, count = Int32(0), k.k_tiles
    piece, pieces, shared, place = Int32(0), Int32(1), Int32(0), Int32(0)
    if cutlass.const_expr(config.stream_k):
        whole = k.tiles // k.by.clusters
        if step >= whole:
            slices, count_of = k.tiles % k.by.clusters * k.k_tiles, cutters(k)
            first, end = stream(k, k.cluster), stream(k, k.cluster + 1)
            shared = first // k.k_tiles + (step - whole)
            low = shared * k.k_tiles
            begin = cutlass.max(first - low, 0)
            count = cutlass.min(end - low, k.k_tiles) - begin
            begins_in = (
                (low + 1) * count_of + slices - 1
            ) // slices - 1  # the cluster with the tile's first slice
            ends_in = ((low + k.k_tiles) * count_of + slices - 1) // slices - 1
            piece, pieces = k.cluster - begins_in, ends_in - begins_in + 1
            place = (
                begins_in + shared
            )  # tile after tile, cluster after cluster: no two pieces have one sum
            index = whole * k.clusters + shared
    elif cutlass.const_expr(config.cluster_k > 1):
        begin = k.part_k * k.k_tiles // config.cluster_k
        count = (k.part_k + 1) * k.k_tiles // config.cluster_k - begin
    elif cutlass.const_expr(config.split):
        shared, piece = divmod(index, k.by.pieces)
        pieces = k.pieces
        begin = piece * k.k_tiles // k.by.pieces
        count = (piece + 1) * k.k_tiles // k.by.pieces - begin
        place = shared * pieces
        index = shared
    matrix = Int32(0)
    if cutlass.const_expr(k.only is not None):
        index = k.only
    if cutlass.const_expr(k.batched):
        matrix, index = divmod(index, k.by.matrix)
    if cutlass.const_expr(k.table is not None):
        m, n = divmod(index if k.only is not None else k.table[index], k.by.line)
    else:
        n, m = divmod(index, k.by.line)
    m, n = m * config.cluster_m + k.part_b, n * config.cluster_n + k.part_a
    column, narrow = n * k.columns, Int32(0)
    if cutlass.const_expr(config.elastic):
        column -= 8 * cutlass.max(n - k.wide, 0)
        if n >= k.wide:
            narrow = Int32(1)
    return Work(m, column, narrow, matrix, begin, count, piece, pieces, shared, place)
