"""Sums of fp8 products in two steps. Tensor cores keep only 14 bits of a sum, so the products of
each stage are summed in accumulators of their own, and added in fp32 to those of the tile,
multiplied by the stage's scales where scales vary along K. While a consumer adds, the tensor cores
multiply for another one.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from outblas.call import fp8
from outblas.hopper.gemm import block_scales
from outblas.hopper.gemm.block_scales import RowGroup, column_parts, in_order
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import Consumer, Cta, TileMma
from outblas.hopper.parts.pipeline import PipelineState


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
    the same number of products and of accumulators besides its own. So does a consumer of wide
    gated pairs, whose halves are summed one after the other.

    While its last products of a stage run, a consumer waits for the next stage and reads its
    scales. Were they read between the wgmmas of a stage, those behind them would wait for them.
    """
    count, by_blocks = work.partition.count, cta.traits.block_b == fp8.BLOCK
    row, boundaries, factors = None, None, None
    mma.fragments.acc.fill(0.0)
    if cutlass.const_expr(cta.traits.block_scaled):
        row = block_scales.first_row(cta, consumer, work)
    if cutlass.const_expr(by_blocks):
        boundaries = block_scales.first_boundaries(cta, work)
        factors = block_scales.make_factors(cta, row, work, mma.width, backwards)
    if count > 0:
        if cutlass.const_expr(by_blocks):
            block_scales.read_blocks(factors, 0)
        pipeline.consumer_wait(state)
        if cutlass.const_expr(by_blocks):
            block_scales.read_rows(cta, factors, state.index)
            block_scales.multiply_scales(factors)
        for _ in cutlass.range(count - 1, unroll=1):
            state = multiply_stage(cta, row, mma, pipeline, state, factors, boundaries, True)
        state = multiply_stage(cta, row, mma, pipeline, state, factors, boundaries, False)
    return state


@cute.jit
def multiply_stage(
    cta: Cta,
    row,
    mma: TileMma,
    pipeline: GroupPipeline,
    state: PipelineState,
    factors,
    boundaries,
    follows: cutlass.Constexpr,
):
    """Consumers: multiply a stage that is full. Return the state of the next one, which is full too
    where one `follows`, with its factors made.
    """
    groups = row_groups(cta, mma)
    by_blocks, after = cta.traits.block_b == fp8.BLOCK, pipeline.advance(state)
    for i in cutlass.range_constexpr(len(groups) - 1):
        mma_row_group(groups[i], state.index)
        warpgroup.wait_group(0)
        add(cta, row, groups[i], state, factors, boundaries)
    mma_row_group(groups[-1], state.index)
    if cutlass.const_expr(follows):
        if cutlass.const_expr(by_blocks):
            block_scales.read_blocks(factors, 1)
        pipeline.consumer_wait(after)
        if cutlass.const_expr(by_blocks):
            block_scales.read_rows(cta, factors, after.index)
    warpgroup.wait_group(0)
    if cutlass.const_expr(cta.traits.block_b != 1):
        pipeline.consumer_release(state.index)
    add(cta, row, groups[-1], state, factors, boundaries)
    if cutlass.const_expr(cta.traits.block_b == 1):  # its scales were read for the additions
        pipeline.consumer_release(state.index)
    if cutlass.const_expr(by_blocks and follows):
        block_scales.multiply_scales(factors)
    return after


def row_groups(cta: Cta, mma: TileMma) -> list[RowGroup]:
    """Returns the row groups of a consumer, or their parts, whose sums of a stage are computed one
    after the other.
    """
    config, parts = cta.config, column_parts(cta.config, cta.traits.gated)
    count = block_scales.row_groups_of(config)
    return [RowGroup(mma, config, i, part, parts) for i in range(count) for part in range(parts)]


@cute.jit
def mma_row_group(sums: RowGroup, index: Int32):
    """Consumers: issue acc = A·B of 64 rows of a stage as one wgmma group, and leave it in
    flight.
    """
    fragments: Any = sums.mma.partial
    tCrA, tCrB, acc = fragments.tCrA, fragments.tCrB, fragments.acc
    warpgroup.fence()
    for kb in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
        mma = fragments.mma.overwriting if kb == 0 else fragments.mma.accumulating
        rows = cute.append_ones(tCrA[None, sums.group, kb, index], up_to_rank=2)
        columns = tCrB[None, None, kb, index]
        if cutlass.const_expr(sums.parts > 1):
            columns = cute.append_ones(tCrB[None, sums.part, kb, index], up_to_rank=2)
        cute.gemm(mma, acc, rows, columns, acc)
    warpgroup.commit_group()


@cute.jit
def add(cta: Cta, row, sums: RowGroup, state, factors, boundaries):
    """Adds the sums of 64 rows of a stage to those of the tile."""
    if cutlass.const_expr(cta.traits.block_b == 0):
        add_unscaled(sums)
    elif cutlass.const_expr(cta.traits.block_b == 1):
        block_scales.add_by_columns(cta, row, sums, state.index)
    else:
        block_scales.add_by_blocks(cta, sums, factors, boundaries)


@cute.jit
def add_unscaled(sums: RowGroup):
    """Adds the sums of 64 rows of a stage to those of the tile, where one scale holds for all
    terms.
    """
    acc, partial = sums.mma.fragments.acc, sums.partial
    for column in sums.columns:
        own, added = sums.registers(column), sums.partial_registers(column)
        for v in cutlass.range_constexpr(4):
            acc[own[v]] = in_order(acc[own[v]], partial[added[v]])
