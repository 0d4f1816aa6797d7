"""Split-K: CTAs that share a tile along K write their partial sums to memory, and the last one to
finish adds them all.

It adds in the order of K, its own sums included, so the bits do not depend on which CTA was last.
No CTA waits for another: a counter shows which one is last, and the last one resets it to 0 for the
next call. A consumer warpgroup shares its part of a tile with the same warpgroup of the other CTAs,
and has its own counters and sums.

For large tiles, the last CTA keeps its own sums in registers while it adds the others'. With
stream-K, a CTA that sees, before its last products end, that all others have arrived does not even
write its own sums.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode

from outblas.hopper.gemm.records import Consumer, SplitKReduction
from outblas.hopper.gemm.tile_scheduler import KPartition
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.records import NamedBarrier
from outblas.hopper.parts.roles import sync_consumer

AHEAD = 8  # partitions of small tiles whose sums are loaded at the same time
VECTOR = 4  # floats that a thread writes at once; the vectors of a warpgroup are contiguous
FEW = 2  # vectors of sums for which registers remain besides an accumulator


def keeps_own(registers: int) -> bool:
    """Returns whether the last to arrive adds its own sums from its registers.

    Reading them back costs as much as reading another partition. For small tiles that is little,
    and then all loads can be issued at once. `registers`: the accumulators that a thread has in the
    widest tile.
    """
    return registers > AHEAD * VECTOR


def opaque(value):
    """Returns the value in a register that compilers cannot recompute. Where registers are scarce,
    compilers read a thread's index again, and then no longer see that the threads of a warp take
    the same path: each wgmma and each TMA store of the kernel would get its operands from vector
    registers.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


@cute.jit
def look_ahead(reduction: SplitKReduction, partition: KPartition):
    """Returns how many partitions have arrived so far, in the consumer's first thread; 0 in other
    threads and for tiles that are not split. Acquires what those partitions have written.

    It runs during the last products, which hides the latency of the counter.
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
    """One consumer: adds its accumulator to those of the other partitions. Returns whether it
    finished last; if so, its accumulator holds the sum.

    `registers`: the accumulators that a thread has in the widest tile. `seen`: the result of
    `look_ahead`, None where that was not called. A consumer that has seen that all others have
    arrived is the last. It need not write its sums, because no other consumer will read them.
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
    """Synchronises the 128 threads of consumer warpgroup `index`. Returns whether the condition is
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
    """Writes the accumulator and counts this partition. Returns whether all others had been counted
    before.

    All threads write their sums, synchronise at the warpgroup's barrier, and one thread counts for
    all of them. After the next barrier the last consumer reads, bypassing L1.
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
    """Returns the index of the counter for this warpgroup's part of the tile."""
    return partition.split_tile * reduction.units + reduction.unit


@cute.jit
def count_arrival(reduction: SplitKReduction, consumer: Consumer, partition: KPartition):
    """The consumer's first thread counts this partition, and tells the others how many arrived
    before.

    The first fence makes all writes before the warpgroup's barrier visible to the GPU before the
    count; the second one orders the count before the reads after the next barrier.
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
    """Replaces the accumulator by the sum of all partitions, in the order of K. All of them are
    read from the workspace.
    """
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
    """Replaces the accumulator, which holds this partition's sums, by the sum of all partitions, in
    the order of K. Only the others are read from the workspace.

    Partitions before this one are added up first. A sum of two terms does not depend on their
    order, so a single earlier partition is added directly, several a few vectors at a time. Later
    partitions are added to the accumulator.
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
    """Adds vectors of the partition in this place to `sums`: as many as `sums` has, from `start`
    on. `first`: it is the tile's first partition, which comes before the sums and is itself added
    to 0.
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
    """Loads a vector of the partial sums as a tensor."""
    start = reduction.workspace.sums.iterator + offset
    aligned = cute.make_ptr(Float32, start.toint(), start.memspace, assumed_align=16)
    return cute.make_tensor(aligned, VECTOR)
