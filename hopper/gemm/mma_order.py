"""The ordered sequence of consumers: who may multiply next. Consumers pass their turn on in the
order of their indices, and the last one to the first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from outblas.hopper.gemm.records import Consumer, Cta
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.records import NamedBarrier


@cute.jit
def wait(consumer: Consumer):
    """Waits until the previous consumer lets this one multiply."""
    cute.arch.barrier(
        barrier_id=consumer.index + NamedBarrier.MMA_ORDER, number_of_threads=2 * WARPGROUP
    )


@cute.jit
def arrive(cta: Cta, consumer: Consumer):
    """Lets the next consumer multiply; the last consumer lets the first one multiply."""
    following = 1 - consumer.index
    if cutlass.const_expr(cta.config.consumers > 2):
        last = cta.config.consumers - 1
        following = Int32(0) if consumer.index == last else consumer.index + 1
    cute.arch.barrier_arrive(
        barrier_id=NamedBarrier.MMA_ORDER + following, number_of_threads=2 * WARPGROUP
    )


@cute.jit
def begin(cta: Cta, consumer: Consumer):
    """Lets the first consumer start. The last consumer arrives on its behalf."""
    if consumer.index == cta.config.consumers - 1:
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrier.MMA_ORDER), number_of_threads=2 * WARPGROUP
        )
