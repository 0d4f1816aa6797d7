"""Split-K: CTAs that share a tile along K write their partial sums to memory, and the one that ends
last adds them all.

It adds in the order of K, its own among them, so that the bits do not depend on who was last.
Nobody waits for anyone: a counter says who is last, who sets it back to 0 for the next call. A
consumer warpgroup shares its part of a tile with the same warpgroup of the other CTAs, and has
counters and sums of its own.

Large tiles keep their own sums in registers while they add the others'. With stream-K, whoever
sees before its last products end that all others have arrived does not even write its own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode

from ..core.config import WARPGROUP
from ..core.records import NamedBarrier
from ..core.roles import sync_consumer
from .records import Consumer, SplitKReduction
from .tile_scheduler import KPartition

AHEAD = 8  # partitions of small tiles whose sums are on their way at the same time
VECTOR = 4  # floats that a thread writes at once; those of a warpgroup lie side by side
FEW = 2  # vectors of sums for which there are registers beside an accumulator


def keeps_own(registers: int) -> bool:
    """Whether the last to arrive adds its own sums from its registers: reading them back costs as
    much as reading a partition, which of small tiles is little, and all loads are on their way at
    once. `registers`: the accumulators that a thread has in the widest tile.
    """
    return registers > AHEAD * VECTOR


def opaque(value):
    """The value, kept in a register. Compilers read a thread's index again where registers are few,
    and then no longer see that the threads of a warp go the same way: each wgmma and each TMA
    store of the kernel gets its operands from vector registers.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


@cute.jit
def look_ahead(reduction: SplitKReduction, partition: KPartition):
    """How many partitions have arrived so far, as the consumer's first thread sees it; 0 for other
    threads and for tiles that are not split. It acquires what those partitions have written.

    It runs while the last products do, which hides the way to the counter and back.
    """
    seen = Int32(0)
    if reduction.lane == 0 and partition.total > 1:
        counter = reduction.workspace.counters.iterator + counter_index(reduction, partition)
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    return seen


@cute.jit
def reduce(
    reduction: SplitKReduction,
    consumer: Consumer,
    acc,
    partition: KPartition,
    registers: cutlass.Constexpr,
    seen,
):
    """One consumer: leaves its accumulator with the others'. Returns whether it ended last, and
    holds the sum then. `registers`: the accumulators that a thread has in the widest tile. `seen`:
    what `look_ahead` returned, None where nothing did.

    Who has seen that all others have arrived is last, and need not write: nobody else will read.
    """
    stride = registers * WARPGROUP
    if cutlass.const_expr(seen is None):
        last = leave_partial(reduction, consumer, acc, partition, stride)
    else:
        last = sync_consumer_any(consumer.index, seen == partition.total - 1)
        if last:
            if reduction.lane == 0:
                reduction.workspace.counters[counter_index(reduction, partition)] = Int32(0)
        else:
            last = leave_partial(reduction, consumer, acc, partition, stride)
    if last:
        if cutlass.const_expr(keeps_own(registers)):
            add_other_partials(reduction, acc, partition, stride)
        else:
            add_partials(reduction, acc, partition, stride)
    return last


@cute.jit
def sync_consumer_any(index, condition):
    """Waits for the 128 threads of consumer warpgroup `index`. Returns whether the condition is
    true for any of them.
    """
    found = cute.arch.inline_ptx(
        "{ .reg .pred mine, any; setp.ne.s32 mine, {$r2}, 0; "
        "bar.red.or.pred any, {$r0}, {$r1}, mine; selp.s32 {$w0}, 1, 0, any; }",
        write_only_types=[Int32],
        read_only_args=[index + NamedBarrier.CONSUMER, Int32(WARPGROUP), Int32(condition)],
    )
    return cute.arch.make_warp_uniform(found) != 0


@cute.jit
def leave_partial(
    reduction: SplitKReduction,
    consumer: Consumer,
    acc,
    partition: KPartition,
    stride: cutlass.Constexpr,
):
    """Writes the accumulator and counts it. Returns whether all others had been counted before.

    The sums are written, the barrier of the warpgroup follows, and one thread counts for all of
    them; after the next barrier whoever is last reads, past L1.
    """
    write_partial(reduction, consumer, acc, partition, stride)
    sync_consumer(consumer.index)
    count_arrival(reduction, consumer, partition)
    sync_consumer(consumer.index)
    return reduction.arrived[consumer.index] == partition.total - 1


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
    atom = cute.make_copy_atom(CopyR2GOp(), Float32, num_bits_per_copy=128)
    for j in cutlass.range_constexpr(cute.size(acc) // VECTOR):
        vector = cute.make_tensor(acc.iterator + VECTOR * j, VECTOR)
        offset = place * stride + (j * WARPGROUP + reduction.lane) * VECTOR
        cute.copy(atom, vector, partial_vector(reduction, offset))


def counter_index(reduction: SplitKReduction, partition: KPartition):
    """The counter of this warpgroup's part of the tile."""
    return partition.split_tile * reduction.units + reduction.unit


@cute.jit
def count_arrival(reduction: SplitKReduction, consumer: Consumer, partition: KPartition):
    """The consumer's first thread counts it, and tells the others how many came before.

    The first fence makes what all threads wrote before the warpgroup's barrier visible to the GPU
    ahead of the count; the second one orders the count before what is read after the next barrier.
    """
    arrived = reduction.arrived
    if reduction.lane == 0:
        cute.arch.fence_acq_rel_gpu()
        counters = reduction.workspace.counters
        index = counter_index(reduction, partition)
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
    acc,
    partition: KPartition,
    stride: cutlass.Constexpr,
):
    """The accumulator becomes the sum of all partitions, in the order of K. All are read."""
    acc.fill(0.0)
    count = cute.size(acc) // VECTOR
    for p in cutlass.range(partition.total, unroll=AHEAD if count <= AHEAD else 1):
        add_partial(reduction, acc, 0, partition.workspace_index + p, stride)


@cute.jit
def add_other_partials(
    reduction: SplitKReduction,
    acc,
    partition: KPartition,
    stride: cutlass.Constexpr,
):
    """The accumulator, which holds this partition's sums, becomes the sum of all partitions, in the
    order of K. The others are read.

    Those before this one are added up first; a sum of two terms does not depend on which of them
    comes first, so a single one is added as it comes, and several a few vectors at a time. Those
    after it are added to the accumulator.
    """
    count, place = cute.size(acc) // VECTOR, partition.workspace_index
    if partition.index == 1:
        add_partial(reduction, acc, 0, place, stride, first=True)
    else:
        for start in cutlass.range_constexpr(0, count, FEW):
            before = cute.make_rmem_tensor((min(count - start, FEW) * VECTOR,), Float32)
            before.fill(0.0)
            for p in cutlass.range(partition.index, unroll=1):
                add_partial(reduction, before, start, place + p, stride)
            for v in cutlass.range_constexpr(cute.size(before)):
                acc[VECTOR * start + v] = before[v] + acc[VECTOR * start + v]
    for p in cutlass.range(partition.index + 1, partition.total, unroll=1):
        add_partial(reduction, acc, 0, place + p, stride)


@cute.jit
def add_partial(
    reduction: SplitKReduction,
    sums,
    start: cutlass.Constexpr,
    partition_index,
    stride: cutlass.Constexpr,
    first: cutlass.Constexpr = False,
):
    """Adds to `sums` as many vectors, from `start` on, of the partition in this place. `first`: it
    is the tile's first one, which comes before the sums and is added to 0 itself.
    """
    place = partition_index * reduction.units + reduction.unit
    atom = cute.make_copy_atom(
        CopyG2ROp(), Float32, num_bits_per_copy=128, load_cache_mode=LoadCacheMode.GLOBAL
    )
    received = cute.make_rmem_tensor((VECTOR,), Float32)
    for j in cutlass.range_constexpr(cute.size(sums) // VECTOR):
        offset = place * stride + ((start + j) * WARPGROUP + reduction.lane) * VECTOR
        cute.copy(atom, partial_vector(reduction, offset), received)
        for v in cutlass.range_constexpr(VECTOR):
            if cutlass.const_expr(first):
                sums[VECTOR * j + v] = Float32(0.0) + received[v] + sums[VECTOR * j + v]
            else:
                sums[VECTOR * j + v] += received[v]


def partial_vector(reduction: SplitKReduction, offset):
    """A vector of the partial sums, as a tensor."""
    start = reduction.workspace.sums.iterator + offset
    aligned = cute.make_ptr(Float32, start.toint(), start.memspace, assumed_align=16)
    return cute.make_tensor(aligned, VECTOR)
