"""Products of fp8 operands whose blocks of 128 terms have scales.

A k tile is a block. Its products are summed in the tensor cores, in an accumulator of their own;
the sums are multiplied by the scales of their rows and columns, and added in fp32, while another
consumer multiplies. A thread reads the scales of its rows and columns from memory before it waits
for the stage, so that they are there when the sums are.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from ..core import roles
from ..core.pipeline import PipelineState
from .epilogue_math import EpilogueTile, read_elements
from .pipeline import GroupPipeline
from .records import Consumer, Cta, TileMma

BLOCK = 128  # terms, and columns, that share a scale


@cute.jit
def multiply(
    cta: Cta, consumer: Consumer, mma: TileMma, pipeline: GroupPipeline, state: PipelineState, work
):
    """Consumers: multiply the k tiles of a work tile. Return the state after the last stage."""
    acc, sums = mma.fragments.acc, mma.partial.acc
    tile = EpilogueTile(cta.epilogue, consumer, work, acc, mma.width)
    acc.fill(0.0)
    first, count = work.partition.begin + work.first_term // cta.config.tile_k, work.partition.count
    for i in cutlass.range(count, unroll=1):
        block = first + i + work.backwards * (count - 1 - 2 * i)
        of_rows, of_columns = row_scales(cta, tile, block), column_scales(cta, tile, block)
        pipeline.consumer_wait(state)
        roles.mma_stage(mma.partial, state.index, True)
        warpgroup.wait_group(0)
        pipeline.consumer_release(state.index)
        add_scaled(tile, sums, of_rows, of_columns)
        state = pipeline.advance(state)
    return state


def row_groups(tile: EpilogueTile):
    """Returns the indices of the groups of 64 rows that a consumer has."""
    config = tile.epilogue.config
    return range(config.tile_m // (64 * config.warpgroups_per_tile))


def halves(tile: EpilogueTile):
    """Returns the halves of the columns of B that a tile has: two for gated pairs."""
    return range(2 if tile.epilogue.traits.gated else 1)


def row_scales(cta: Cta, tile: EpilogueTile, block):
    """Returns, for each row group, the scales of A of a thread's two rows; for rows behind the last
    one, those of the last.
    """
    scale_a = cta.epilogue.tensors.scale_a
    rows, found = scale_a.shape[-2], []
    for i in row_groups(tile):
        row, pair = tile.first_coord(i, 0).row, []
        for r in range(2):
            index = (cutlass.min(row + r * 8, rows - 1), block)
            if cta.traits.masked:
                matrix = tile.work.matrix
                within = row + r * 8 - matrix * cta.scheduler.params.group_rows
                index = (matrix, cutlass.min(within, rows - 1), block)
            pair.append(scale_a[index])
        found.append(pair)
    return found


def column_scales(cta: Cta, tile: EpilogueTile, block):
    """Returns, for each half of the columns, their scale of B, or one for each value of a row
    group.
    """
    traits, scale_b = cta.traits, cta.epilogue.tensors.scale_b
    coord, columns = tile.first_coord(0, 0), tile.epilogue.extents[1]
    across, found = scale_b.shape[-1], []
    for half in halves(tile):
        if traits.scale_b == "blocks":
            column = (tile.work.column + half * columns) // BLOCK
            found.append(scale_b[tile.work.matrix, block, cutlass.min(column, across - 1)])
            continue
        count = tile.width // (2 * len(halves(tile)))
        vector = scale_b[block, None]
        found.append(read_elements(tile, vector, traits.scale_b, coord, half, count))
    return found


@cute.jit
def add_scaled(tile: EpilogueTile, sums, of_rows, of_columns):
    """Adds the sums of a block, times their scales, to the accumulator."""
    for i in cutlass.range_constexpr(len(of_rows)):
        for half in cutlass.range_constexpr(len(of_columns)):
            which = tile.registers(i, 0, tile.width // len(of_columns), half)
            scales, pair = of_columns[half], of_rows[i]
            if cutlass.const_expr(not isinstance(scales, list)):
                both = [row * scales for row in pair]
                for v in cutlass.range_constexpr(len(which)):
                    at = which[v]
                    tile.acc[at] = cute.math.fma(sums[at], both[v % 4 // 2], tile.acc[at])
            else:
                for v in cutlass.range_constexpr(len(which)):
                    at = which[v]
                    by_row = sums[at] * pair[v % 4 // 2]
                    tile.acc[at] = cute.math.fma(by_row, scales[v], tile.acc[at])
