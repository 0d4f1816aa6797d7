"""Partial sums: CTAs that share a tile along K write theirs to memory, and the one that ends last
adds them all.

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

AHEAD = 8  # pieces of small tiles whose sums are on their way at the same time
VECTOR = 4  # floats that a thread writes at once; those of a warpgroup lie side by side


@cute.jit
def combine(k, work, registers: cutlass.Constexpr):
    """One consumer: leaves its accumulator with the others'. Returns whether it ended last, and
    holds the sum then.

    `registers`: accumulators a thread has in the widest tile. The sums are written, the barrier of
    the warpgroup follows, and one thread fences for all of them, counts, and fences again; after
    the next barrier whoever is last reads, past L1.
    """
    acc = k.acc
    mine = (work.place + work.piece) * k.parts + k.part
    stride = registers * WARPGROUP
    lane = k.tidx % WARPGROUP
    writing = cute.make_copy_atom(CopyR2GOp(), Float32, num_bits_per_copy=128)
    count = cute.size(acc) // VECTOR
    for j in cutlass.range_constexpr(count):
        held = cute.make_tensor(acc.iterator + VECTOR * j, VECTOR)
        cute.copy(writing, held, place(k, mine * stride + (j * WARPGROUP + lane) * VECTOR))
    cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
    said = k.said
    if lane == 0:
        cute.arch.fence_acq_rel_gpu()
        counter = k.counters.iterator + (work.shared * k.parts + k.part)
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        if before == work.pieces - 1:
            counters = k.counters
            counters[work.shared * k.parts + k.part] = Int32(0)
        said[k.consumer] = before
        cute.arch.fence_acq_rel_gpu()
    cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
    last = said[k.consumer] == work.pieces - 1
    if last:
        acc.fill(0.0)
        reading = cute.make_copy_atom(
            CopyG2ROp(), Float32, num_bits_per_copy=128, load_cache_mode=LoadCacheMode.GLOBAL
        )
        received = cute.make_rmem_tensor((VECTOR,), Float32)
        for p in cutlass.range(work.pieces, unroll=AHEAD if count <= AHEAD else 1):
            theirs = ((work.place + p) * k.parts + k.part) * stride
            for j in cutlass.range_constexpr(count):
                cute.copy(reading, place(k, theirs + (j * WARPGROUP + lane) * VECTOR), received)
                for v in cutlass.range_constexpr(VECTOR):
                    acc[VECTOR * j + v] += received[v]
    return last


def place(k, at):
    """A vector of the partial sums, as a tensor."""
    start = k.sums.iterator + at
    aligned = cute.make_ptr(Float32, start.toint(), start.memspace, assumed_align=16)
    return cute.make_tensor(aligned, VECTOR)
