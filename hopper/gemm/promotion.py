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
    cta: Cta,
    consumer: Consumer,
    mma: TileMma,
    pipeline: GroupPipeline,
    state: PipelineState,
    work,
    backwards,
):
    """Consumers: multiply the k tiles of a work tile, whose order is reversed where `backwards` is
    1. Return the state after the last stage.

    The products of a stage are summed for 64 rows of a consumer after the other, in the same
    accumulators. A consumer with 128 rows so waits half as often for a stage as one with 64, for
    the same number of products and of accumulators besides its own.

    While its last products of a stage run, a consumer waits for the next stage and reads its
    scales. Were they read between the wgmmas of a stage, those behind them would wait for them.
    """
    groups, count = block_scales.row_groups_of(cta.config), work.partition.count
    by_blocks = cta.traits.block_b == fp8.BLOCK
    boundaries, factors = None, None
    mma.fragments.acc.fill(0.0)
    if cutlass.const_expr(by_blocks):
        boundaries = block_scales.first_boundaries(cta, work)
        factors = block_scales.make_factors(cta, work, mma.width, backwards)
        block_scales.read_blocks(factors, 0)
    if count > 0:
        pipeline.consumer_wait(state)
        if cutlass.const_expr(by_blocks):
            block_scales.read_rows(cta, consumer, factors, state.index)
    if cutlass.const_expr(by_blocks):
        block_scales.multiply_scales(factors)
    for i in cutlass.range(count, unroll=1):
        after, more = pipeline.advance(state), Int32(i + 1 < count)
        if cutlass.const_expr(by_blocks):
            block_scales.read_blocks(factors, more)
        for group in cutlass.range_constexpr(groups - 1):
            mma_row_group(mma.partial, group, state.index)
            warpgroup.wait_group(0)
            add(cta, consumer, RowGroup(mma, cta.config, group), state, factors, boundaries)
        mma_row_group(mma.partial, groups - 1, state.index)
        if more == 1:
            pipeline.consumer_wait(after)
            if cutlass.const_expr(by_blocks):
                block_scales.read_rows(cta, consumer, factors, after.index)
        warpgroup.wait_group(0)
        if cutlass.const_expr(cta.traits.block_b != 1):
            pipeline.consumer_release(state.index)
        add(cta, consumer, RowGroup(mma, cta.config, groups - 1), state, factors, boundaries)
        if cutlass.const_expr(cta.traits.block_b == 1):  # its scales were read for the additions
            pipeline.consumer_release(state.index)
        if cutlass.const_expr(by_blocks):
            block_scales.multiply_scales(factors)
        state = after
    return state


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


@cute.jit
def add(cta: Cta, consumer: Consumer, sums: RowGroup, state, factors, boundaries):
    """Adds the sums of 64 rows of a stage to those of the tile."""
    if cutlass.const_expr(cta.traits.block_b == 0):
        add_unscaled(sums)
    elif cutlass.const_expr(cta.traits.block_b == 1):
        block_scales.add_by_columns(cta, consumer, sums, state.index)
    else:
        block_scales.add_by_blocks(cta, sums, factors, boundaries)


@cute.jit
def add_unscaled(sums: RowGroup):
    """Adds the sums of 64 rows of a stage to those of the tile, where one scale holds for all
    terms.
    """
    acc, partial = sums.mma.fragments.acc, sums.partial
    for column in cutlass.range_constexpr(0, sums.mma.width, 8):
        own, added = sums.registers(column), sums.partial_registers(column)
        for v in cutlass.range_constexpr(4):
            acc[own[v]] = in_order(acc[own[v]], partial[added[v]])
