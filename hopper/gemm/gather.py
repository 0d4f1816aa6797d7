"""Loads rows of A that an index chooses. TMA on Hopper cannot gather rows, so two warps copy them
with cp.async, 16 bytes at a time, into the swizzled layout that TMA would have written.

The pipeline is that of `hopper.gemm` with one more kind of arrival. A thread that copies arrives at
`full` when its copies have landed, which the hardware does for it (cp.async.mbarrier.arrive). They
are writes of the generic proxy, and wgmma reads through the async proxy, so consumers fence between
the two.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import Cta
from outblas.hopper.parts.pipeline import PipelineState
from outblas.hopper.parts.records import WarpRole

WARPS = (WarpRole.GATHER, WarpRole.GATHER + 1)
THREADS = 32 * len(WARPS)
VECTOR = 8  # elements of 16 bits in a copy
ACROSS = 8  # copies in the 128 bytes of a row of a stage
TILE_K = ACROSS * VECTOR


@dataclass(frozen=True)
class GatherPipeline(GroupPipeline):
    """Besides those of the parent class:

    full[s], 1 + THREADS arrivals per phase:
        LOAD_A arrives and announces the bytes of B alone;
        each gathering thread arrives when its copies into the stage have landed;
        the consumers wait for the phase, and fence: what they multiply next was written by the
        generic proxy.
    empty[s]:
        the gathering warps wait for the previous phase as well. Nobody can overtake them, because
        the next phase of `full` needs their arrivals.
    """

    def arrival_counts(self) -> dict[str, int]:
        counts = super().arrival_counts()
        return counts | {"full": counts["full"] + THREADS}

    @cute.jit
    def arrive_when_copied(self, state: PipelineState):
        """A gathering thread: arrives when all its copies so far have landed."""
        self.record_arrivals("full", "gatherers", THREADS)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full + state.index)

    @cute.jit
    def consumer_wait(self, state: PipelineState):
        GroupPipeline.consumer_wait(self, state)
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def run(cta: Cta, pipeline: GatherPipeline):
    """The warps of warpgroup 0: those that gather copy all k tiles of A."""
    if cta.context.warp >= WarpRole.GATHER:
        copy_k_tiles(cta, pipeline)


@cute.jit
def copy_k_tiles(cta: Cta, pipeline: GatherPipeline):
    """The gathering warps. A thread copies the same 16 bytes of every eighth row of each k tile."""
    config, scheduler = cta.config, cta.scheduler
    state = pipeline.initial_state()
    for step in cutlass.range(scheduler.work_tile_count(config), unroll=1):
        work = scheduler.current_work(config, step)
        backwards = scheduler.backwards(config, work, step)
        offsets = row_offsets(cta, work)
        begin, count = work.partition.begin, work.partition.count
        for i in cutlass.range(count, unroll=1):
            pipeline.producer_acquire(state)
            k_tile = begin + i + backwards * (count - 1 - 2 * i)
            copy_k_tile(cta, offsets, k_tile, state.index)
            pipeline.arrive_when_copied(state)
            state = pipeline.advance(state)
    # No thread exits before its copies have landed.
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)


def rows_per_thread(config):
    """Returns how many rows of a k tile a thread copies a part of."""
    return config.tile_m * ACROSS // THREADS


@cute.jit
def row_offsets(cta: Cta, work):
    """Returns where the thread's rows of A begin, in units of 16 bytes, which 32 bits hold. An
    index outside of A counts as A's first or last row. Rows behind the last one are it once more.
    """
    config, thread = cta.config, cta.context.thread % THREADS
    a, index = cta.scheduler.params.a, cta.scheduler.params.a_index
    last, extent = index.shape[0] - 1, a.shape[0]
    stride = Int32(a.stride[0] // VECTOR)
    offsets = cute.make_rmem_tensor((rows_per_thread(config),), Int32)
    for i in cutlass.range_constexpr(rows_per_thread(config)):
        m = work.row + thread // ACROSS + i * (THREADS // ACROSS)
        chosen = index[cutlass.min(m, last)]
        offsets[i] = cutlass.min(cutlass.max(chosen, 0), extent - 1) * stride
    return offsets


@cute.jit
def copy_k_tile(cta: Cta, offsets, k_tile, stage):
    """Starts the thread's copies of a k tile into a stage. Behind the end of K it writes zeros.

    A row of a stage has 128 bytes, whose pieces of 16 bytes are exchanged by an XOR with the number
    of the row modulo 8 (the 128-byte swizzle).
    """
    config, thread, a = cta.config, cta.context.thread % THREADS, cta.scheduler.params.a
    row, piece = thread // ACROSS, thread % ACROSS
    first, K = k_tile * TILE_K + piece * VECTOR, a.shape[1]
    # Of the last piece of a row of A some bytes may lie behind its end. Of others all do: then an
    # address that is a multiple of 16 bytes is still needed, and nothing is read there.
    size = cutlass.min(cutlass.max(K - first, 0), VECTOR) * 2
    source = a.iterator.toint() + Int64(cutlass.min(first, (K - 1) // VECTOR * VECTOR)) * 2
    target = (
        cta.loads.stages.toint() + stage * (config.tile_m * 128) + row * 128 + (piece ^ row) * 16
    )
    for i in cutlass.range_constexpr(rows_per_thread(config)):
        cute.arch.inline_ptx(
            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
            read_only_args=[
                Int32(target + i * (THREADS // ACROSS) * 128),
                source + Int64(offsets[i]) * 16,
                size,
            ],
        )
