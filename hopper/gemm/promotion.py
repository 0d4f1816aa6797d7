"""Sums of fp8 products in two steps. Tensor cores keep only 14 bits of a sum, so the products of
each stage are summed in accumulators of their own, and added in fp32 to those of the tile,
multiplied by the stage's scales where scales vary along K. While a consumer adds, the tensor cores
multiply for another one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from ...core import fp8
from ..core.pipeline import PipelineState
from ..core.records import MmaFragments
from . import block_scales
from .pipeline import GroupPipeline
from .records import Consumer, Cta, TileMma
from .row_group import RowGroup, in_order


@cute.jit
def multiply(
    cta: Cta, consumer: Consumer, mma: TileMma, pipeline: GroupPipeline, state: PipelineState, work
):
    """Consumers: multiply the k tiles of a work tile. Return the state after the last stage.

    The products of a stage are summed for 64 rows of a consumer after the other, in the same
    accumulators. A consumer with 128 rows so waits half as often for a stage as one with 64, for
    the same number of products and of accumulators besides its own.
    """
    boundaries = first_boundaries(cta, work)
    groups = row_groups(cta.config)
    mma.fragments.acc.fill(0.0)
    for _ in cutlass.range(work.partition.count, unroll=1):
        pipeline.consumer_wait(state)
        for group in cutlass.range_constexpr(groups):
            mma_row_group(mma.partial, group, state.index)
            is_last = group == groups - 1
            add_stage(cta, consumer, mma, pipeline, state, group, is_last, boundaries)
        state = pipeline.advance(state)
    return state


def row_groups(config) -> int:
    """Returns how many times 64 rows of a tile a consumer computes."""
    return int(config.tile_m // (64 * config.warpgroups_per_tile))


@cute.jit
def mma_row_group(fragments: MmaFragments, group: cutlass.Constexpr, index: Int32):
    """Consumers: issue acc = A·B of 64 rows of a stage as one wgmma group, and leave it in
    flight.
    """
    tCrA, tCrB, acc = fragments.tCrA, fragments.tCrB, fragments.acc
    warpgroup.fence()
    for kb in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        mma = fragments.mma.overwriting if kb == 0 else fragments.mma.accumulating
        rows = cute.append_ones(tCrA[None, group, kb, index], up_to_rank=2)
        cute.gemm(mma, acc, rows, tCrB[None, None, kb, index], acc)
    warpgroup.commit_group()


def first_boundaries(cta: Cta, work):
    """Returns `block_scales.first_boundaries` where 128 columns share a scale, else None."""
    if cta.traits.block_b != fp8.BLOCK:
        return None
    return block_scales.first_boundaries(cta, work)


@cute.jit
def add_stage(
    cta: Cta,
    consumer: Consumer,
    mma: TileMma,
    pipeline: GroupPipeline,
    state: PipelineState,
    group: cutlass.Constexpr,
    is_last: cutlass.Constexpr,
    boundaries,
):
    """Waits for the products of 64 rows of a stage, and adds their sums to those of the tile.
    `is_last`: the stage is not read any more then, and is released.
    """
    sums = RowGroup(mma, cta.config, group)
    if cutlass.const_expr(cta.traits.block_b == 0):
        warpgroup.wait_group(0)
        if cutlass.const_expr(is_last):
            pipeline.consumer_release(state.index)
        add(sums)
    elif cutlass.const_expr(cta.traits.block_b == 1):
        warpgroup.wait_group(0)
        block_scales.add_by_columns(cta, consumer, sums, state.index)
        if cutlass.const_expr(is_last):
            pipeline.consumer_release(state.index)
    else:
        factors = block_scales.block_factors(cta, consumer, sums, state.index)
        warpgroup.wait_group(0)
        if cutlass.const_expr(is_last):
            pipeline.consumer_release(state.index)
        block_scales.add_by_blocks(cta, sums, factors, boundaries)


@cute.jit
def add(sums: RowGroup):
    """Adds the sums of 64 rows of a stage to those of the tile."""
    acc, partial = sums.mma.fragments.acc, sums.mma.partial.acc
    for column in cutlass.range_constexpr(0, sums.mma.width, 8):
        own, added = sums.registers(column), sums.partial_registers(column)
        for v in cutlass.range_constexpr(4):
            acc[own[v]] = in_order(acc[own[v]], partial[added[v]])
