"""Sums of fp8 products in two steps. Tensor cores keep only 14 bits of a sum, so the products of
each stage are summed in accumulators of their own, and added in fp32 to those of the tile,
multiplied by the stage's scales where scales vary along K. While a consumer adds, the tensor cores
multiply for another one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
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
    boundaries, groups = first_boundaries(cta, work), row_groups(cta.config)
    mma.fragments.acc.fill(0.0)
    is_full = Boolean(False)
    for _ in cutlass.range(work.partition.count, unroll=1):
        pipeline.consumer_wait_unless(state, is_full)
        for group in cutlass.range_constexpr(groups - 1):
            mma_row_group(mma.partial, group, state.index)
            add_row_group(cta, consumer, mma, state, group, boundaries)
        mma_row_group(mma.partial, groups - 1, state.index)
        state, is_full = add_last_row_group(cta, consumer, mma, pipeline, state, boundaries)
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
def add_row_group(
    cta: Cta, consumer: Consumer, mma: TileMma, state, group: cutlass.Constexpr, boundaries
):
    """Waits for the products of 64 rows of a stage, and adds their sums to those of the tile."""
    sums = RowGroup(mma, cta.config, group)
    factors = factors_of(cta, consumer, sums, state)
    warpgroup.wait_group(0)
    add(cta, consumer, sums, state, factors, boundaries)


@cute.jit
def add_last_row_group(
    cta: Cta, consumer: Consumer, mma: TileMma, pipeline: GroupPipeline, state, boundaries
):
    """Does what `add_row_group` does for the last rows of a stage, and releases it. Returns the
    state of the next stage, and whether that one is full already: it is asked for before the
    additions, which hide how long the answer takes.
    """
    traits, following = cta.traits, pipeline.advance(state)
    sums = RowGroup(mma, cta.config, row_groups(cta.config) - 1)
    factors = factors_of(cta, consumer, sums, state)
    warpgroup.wait_group(0)
    if cutlass.const_expr(traits.block_b != 1):
        pipeline.consumer_release(state.index)
    is_full = pipeline.consumer_test_wait(following)
    add(cta, consumer, sums, state, factors, boundaries)
    if cutlass.const_expr(traits.block_b == 1):  # these scales are read while sums are added
        pipeline.consumer_release(state.index)
    return following, is_full


def factors_of(cta: Cta, consumer: Consumer, sums: RowGroup, state):
    """Returns `block_scales.block_factors` where 128 columns share a scale, else None."""
    if cta.traits.block_b != fp8.BLOCK:
        return None
    return block_scales.block_factors(cta, consumer, sums, state.index)


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
    acc, partial = sums.mma.fragments.acc, sums.mma.partial.acc
    for column in cutlass.range_constexpr(0, sums.mma.width, 8):
        own, added = sums.registers(column), sums.partial_registers(column)
        for v in cutlass.range_constexpr(4):
            acc[own[v]] = in_order(acc[own[v]], partial[added[v]])
