"""Products over a part of K that ends inside a k tile, for sums that belong to a group of terms
(`hopper.grouped`).

TMA fills with zeros what lies outside of a tensor, but the terms behind a group are those of the
next one. The k tile in which a group ends is therefore loaded first, and the consumers overwrite
its foreign terms with zeros, in both operands, because a term that is not finite would not vanish
in a product with zero.

The columns of both operands are contiguous in memory, so that a term is a row of 128-byte lines in
shared memory, and a swizzle moves 16 bytes within a line only.
"""

import math

import cutlass
import cutlass.cute as cute

from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import Consumer, Cta, TileMma
from outblas.hopper.parts import roles
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.pipeline import PipelineState
from outblas.hopper.parts.records import NamedBarrier


@cute.jit
def multiply(
    cta: Cta,
    consumer: Consumer,
    mma: TileMma,
    pipeline: GroupPipeline,
    state: PipelineState,
    count,
    terms,
):
    """Consumers: multiply `count` k tiles, of which the first one has `terms` terms. The results
    are those of `consumer.multiply`.
    """
    config, fragments = cta.config, mma.fragments
    pipeline.consumer_wait(state)
    if terms < config.tile_k:
        thread = consumer.index * WARPGROUP + cta.context.thread % WARPGROUP
        threads = config.consumers * WARPGROUP
        clear_terms(cta.operands.sA, state.index, terms, thread, threads)
        clear_terms(cta.operands.sB, state.index, terms, thread, threads)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=int(NamedBarrier.ALL_CONSUMERS), number_of_threads=threads)
    roles.mma_stage(fragments, state.index, True)
    previous = state.index
    state = pipeline.advance(state)
    return roles.mma_k_loop_rest(
        fragments, pipeline, state, previous, count - 1, config.in_flight, None
    )


def divides(columns: int, terms: int, threads: int) -> bool:
    """Returns whether so many threads, each of which writes 8 columns of a term at once, divide
    a stage of an operand evenly.
    """
    across = math.gcd(columns // 8, threads)
    return columns % (across * 8) == 0 and terms % (threads // across) == 0


@cute.jit
def clear_terms(operand, stage, terms, thread, threads: cutlass.Constexpr):
    """All consumers: write zeros over the terms of a stage from `terms` on. `operand`: (columns,
    bK, STAGE).
    """
    columns, k = cute.size(operand, mode=[0]), cute.size(operand, mode=[1])
    dtype = operand.element_type
    vector = 128 // dtype.width
    across = math.gcd(columns // vector, threads)
    assert divides(columns, k, threads), f"{threads} threads do not divide {columns}x{k} evenly"
    layout = cute.make_layout((across, threads // across))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(atom, layout, cute.make_layout((vector, 1)))
    part = copy.get_slice(thread)
    target = part.partition_D(operand[None, None, stage])
    coord = part.partition_D(cute.make_identity_tensor((columns, k)))
    zeros = cute.make_rmem_tensor_like(target[None, 0, 0])
    zeros.fill(0.0)
    for m in cutlass.range_constexpr(cute.size(target, mode=[1])):
        for n in cutlass.range_constexpr(cute.size(target, mode=[2])):
            _, term = coord[0, m, n]
            if term >= terms:
                cute.copy(atom, zeros, target[None, m, n])
