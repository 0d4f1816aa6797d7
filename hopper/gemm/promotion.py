"""Sums of fp8 products in two steps. Tensor cores keep only 14 bits of a sum, so the products of
each stage are summed in accumulators of their own, and added in fp32 to those of the tile,
multiplied by the stage's scales where scales vary along K.

While a consumer adds, the tensor cores have to multiply for another one. Consumers that wait for
the same stage begin together, and two that multiply at once end together: then all add at the same
time, and the tensor cores wait. Consumers therefore take turns: each begins a stage when the
previous one has completed the first half of its wgmmas.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from ...core import fp8
from ..core import roles
from ..core.pipeline import PipelineState
from . import block_scales, epilogue_math, mma_order
from .pipeline import GroupPipeline
from .records import Consumer, Cta, TileMma

LAST_WGMMAS = 2  # of the four of a stage: those that overlap with the next consumer's first ones


@cute.jit
def multiply(
    cta: Cta, consumer: Consumer, mma: TileMma, pipeline: GroupPipeline, state: PipelineState, work
):
    """Consumers: multiply the k tiles of a work tile. Return the state after the last stage.

    With `alternates`, a consumer waits for its turn before it multiplies a stage, and passes it on
    when half of its wgmmas have completed. Every consumer has the same stages, so each turn that is
    passed on is taken.
    """
    alternates = cta.traits.alternates
    boundaries = first_boundaries(cta, work)
    mma.fragments.acc.fill(0.0)
    for _ in cutlass.range(work.partition.count, unroll=1):
        pipeline.consumer_wait(state)
        if cutlass.const_expr(alternates):
            mma_order.wait(consumer)
        roles.mma_stage(mma.partial, state.index, True, LAST_WGMMAS if alternates else 0)
        if cutlass.const_expr(alternates):
            warpgroup.wait_group(1)
            mma_order.arrive(cta, consumer)
        add_stage(cta, consumer, mma, pipeline, state, boundaries)
        state = pipeline.advance(state)
    return state


def first_boundaries(cta: Cta, work):
    """Returns `block_scales.first_boundaries` where 128 columns share a scale, else None."""
    if cta.traits.block_b != fp8.BLOCK:
        return None
    return block_scales.first_boundaries(cta, work)


@cute.jit
def add_stage(
    cta: Cta, consumer: Consumer, mma: TileMma, pipeline: GroupPipeline, state, boundaries
):
    """Waits for the products of a stage, releases it, and adds their sums to those of the tile."""
    registers_of = functools.partial(accumulators, cta.config, mma.width)
    if cutlass.const_expr(cta.traits.block_b == 0):
        warpgroup.wait_group(0)
        pipeline.consumer_release(state.index)
        acc, partial = mma.fragments.acc, mma.partial.acc
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] += partial[v]
    elif cutlass.const_expr(cta.traits.block_b == 1):
        warpgroup.wait_group(0)
        block_scales.add_by_columns(cta, consumer, mma, state.index, registers_of)
        pipeline.consumer_release(state.index)
    else:
        factors = block_scales.block_factors(cta, consumer, state.index, mma.width)
        warpgroup.wait_group(0)
        pipeline.consumer_release(state.index)
        block_scales.add_by_blocks(cta, mma, factors, boundaries, registers_of)


def accumulators(config, width: int, i: int, column: int) -> list[int]:
    """Returns the four accumulators of row group i in the eight columns from `column` on."""
    return epilogue_math.registers(config, width, i, column, 8)
