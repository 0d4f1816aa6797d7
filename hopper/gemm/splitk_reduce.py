"""Split-K: CTAs that share a tile along K write their partial sums to memory, and the one that ends
last adds them all.

It adds in the order of K, its own among them, so that the bits do not depend on who was last.
Nobody waits for anyone: a counter says who is last, who sets it back to 0 for the next call. A
consumer warpgroup shares its part of a tile with the same warpgroup of the other CTAs, and has
counters and sums of its own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode

from ..core.config import WARPGROUP
from ..core.roles import sync_consumer
from .records import Consumer, SplitKReduction
from .tile_scheduler import KPartition

AHEAD = 8  # partitions of small tiles whose sums are on their way at the same time
VECTOR = 4  # floats that a thread writes at once; those of a warpgroup lie side by side


@cute.jit
def reduce(
    reduction: SplitKReduction,
    consumer: Consumer,
    acc,
    partition: KPartition,
    registers: cutlass.Constexpr,
):
    """One consumer: leaves its accumulator with the others'. Returns whether it ended last, and
    holds the sum then. `registers`: the accumulators that a thread has in the widest tile.

    The sums are written, the barrier of the warpgroup follows, and one thread counts for all of
    them; after the next barrier whoever is last reads, past L1.
    """
    stride = registers * WARPGROUP
    write_partial(reduction, consumer, acc, partition, stride)
    sync_consumer(consumer.index)
    count_arrival(reduction, consumer, partition)
    sync_consumer(consumer.index)
    last = reduction.arrived[consumer.index] == partition.total - 1
    if last:
        add_partials(reduction, consumer, acc, partition, stride)
    return last


@cute.jit
def write_partial(
    reduction: SplitKReduction,
    consumer: Consumer,
    acc,
    partition: KPartition,
    stride: cutlass.Constexpr,
):
    """Writes the accumulator to this partition's place in the workspace."""
    place = (partition.workspace_index + partition.index) * reduction.units + reduction.unit
    lane = consumer.context.thread % WARPGROUP
    atom = cute.make_copy_atom(CopyR2GOp(), Float32, num_bits_per_copy=128)
    for j in cutlass.range_constexpr(cute.size(acc) // VECTOR):
        vector = cute.make_tensor(acc.iterator + VECTOR * j, VECTOR)
        offset = place * stride + (j * WARPGROUP + lane) * VECTOR
        cute.copy(atom, vector, partial_vector(reduction, offset))


@cute.jit
def count_arrival(reduction: SplitKReduction, consumer: Consumer, partition: KPartition):
    """The consumer's first thread counts it, and tells the others how many came before.

    The first fence makes what all threads wrote before the warpgroup's barrier visible to the GPU
    ahead of the count; the second one orders the count before what is read after the next barrier.
    """
    arrived = reduction.arrived
    if consumer.context.thread % WARPGROUP == 0:
        cute.arch.fence_acq_rel_gpu()
        counters = reduction.workspace.counters
        index = partition.split_tile * reduction.units + reduction.unit
        before = cute.arch.atomic_add(
            counters.iterator + index, Int32(1), sem="acq_rel", scope="gpu"
        )
        if before == partition.total - 1:
            counters[index] = Int32(0)
        arrived[consumer.index] = before
        cute.arch.fence_acq_rel_gpu()


@cute.jit
def add_partials(
    reduction: SplitKReduction,
    consumer: Consumer,
    acc,
    partition: KPartition,
    stride: cutlass.Constexpr,
):
    """The accumulator becomes the sum of all partitions, in the order of K."""
    acc.fill(0.0)
    lane, count = consumer.context.thread % WARPGROUP, cute.size(acc) // VECTOR
    atom = cute.make_copy_atom(
        CopyG2ROp(), Float32, num_bits_per_copy=128, load_cache_mode=LoadCacheMode.GLOBAL
    )
    received = cute.make_rmem_tensor((VECTOR,), Float32)
    for p in cutlass.range(partition.total, unroll=AHEAD if count <= AHEAD else 1):
        place = (partition.workspace_index + p) * reduction.units + reduction.unit
        for j in cutlass.range_constexpr(count):
            offset = place * stride + (j * WARPGROUP + lane) * VECTOR
            cute.copy(atom, partial_vector(reduction, offset), received)
            for v in cutlass.range_constexpr(VECTOR):
                acc[VECTOR * j + v] += received[v]


def partial_vector(reduction: SplitKReduction, offset):
    """A vector of the partial sums, as a tensor."""
    start = reduction.workspace.sums.iterator + offset
    aligned = cute.make_ptr(Float32, start.toint(), start.memspace, assumed_align=16)
    return cute.make_tensor(aligned, VECTOR)
