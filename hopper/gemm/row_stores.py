"""Stores of single rows of a tile, for grouped products (`hopper.grouped`): of a tile that reaches
into the next group, and of rows that are scattered over C. TMA stores whole tiles at once, so the
threads copy rows from a buffer of the epilogue, 16 bytes at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from outblas.hopper.gemm.epilogue_math import EpilogueTile
from outblas.hopper.parts.config import WARPGROUP


def scatters(tile: EpilogueTile, stores) -> bool:
    """Returns whether a pass (`epilogue_store.StorePass`) stores each row where its index says. x
    stays in the order of groups.
    """
    return tile.epilogue.tensors.scatter_index is not None and not stores.aux


@cute.jit
def store_rows(
    tile: EpilogueTile,
    stores: cutlass.Constexpr,
    number: cutlass.Constexpr,
    buffer: cutlass.Constexpr,
):
    """One consumer: copies those rows of subtile `number` that lie before the end of the group from
    a buffer to C, or to x, whose rows are contiguous.

    All threads have synchronised since the buffer was written, and do so again before it is
    overwritten; none waits in here.
    """
    epilogue, consumer, work = tile.epilogue, tile.consumer, tile.work
    config, writer, dtype = epilogue.config, consumer.writer, epilogue.dtype
    i, start = stores.subtiles[number]
    row = (
        work.first_row(config.tile_m)
        + (i * config.warpgroups_per_tile + consumer.warpgroup_in_tile) * 64
    )
    column, columns = work.column + start, writer.columns
    target = target_matrix(epilogue, stores)
    M, N = epilogue.extents
    vector = 128 // dtype.width
    across = columns // vector
    threads = cute.make_layout((WARPGROUP // across, across), stride=(across, 1))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector)))
    thread = copy.get_slice(consumer.context.thread % WARPGROUP)
    source = thread.partition_S(writer.buffers[None, None, buffer])
    coord = thread.partition_S(cute.make_identity_tensor((64, columns)))
    rows = [
        row_to_store(tile, stores, row + coord[0, m, 0][0])
        for m in range(cute.size(source, mode=[1]))
    ]  # all of them first, because an index comes from memory
    for m in cutlass.range_constexpr(len(rows)):
        to = rows[m]
        for n in cutlass.range_constexpr(cute.size(source, mode=[2])):
            c = column + coord[0, m, n][1]
            if to >= 0 and to < M and c < N:
                moved = cute.make_rmem_tensor_like(source[None, m, n])
                cute.copy(atom, source[None, m, n], moved)
                at = target.iterator + cute.crd2idx((to, c), target.layout)
                at = cute.make_ptr(dtype, at.toint(), at.memspace, assumed_align=16)
                cute.copy(atom, moved, cute.make_tensor(at, moved.layout))


def target_matrix(epilogue, stores):
    """Returns the matrix (M, N) that a pass stores: C, or x, of gated pairs one half of it."""
    target = epilogue.tensors.aux if stores.aux else epilogue.mC
    return target if cute.rank(target) == 2 else target[None, None, stores.half]


@cute.jit
def row_to_store(tile: EpilogueTile, stores: cutlass.Constexpr, row):
    """Returns the row in which row `row` of the product is stored. It is negative for one that is
    not the group's, and outside of C where its index is.
    """
    to = row
    if cutlass.const_expr(scatters(tile, stores)):
        last = tile.epilogue.extents[0] - 1
        to = tile.epilogue.tensors.scatter_index[cutlass.min(row, last)]
    if row >= tile.work.end_row:
        to = Int32(-1)
    return to
