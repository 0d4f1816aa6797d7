"""How the scales of fp8 operands that vary along K (`block_scales`) reach a stage of the pipeline.

TMA loads those of rows where neighbouring rows have neighbouring scales (`wide_scales`), and those
of columns that have scales of their own with them, where these are neighbours too. Else a warp
copies both, 4 bytes at a time with cp.async, which takes scales of any strides.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from outblas.hopper.gemm.block_scales import address, column_scales, of_work, stage_scales
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import Cta
from outblas.hopper.gemm.scale_layout import GRANULE
from outblas.hopper.gemm.splitk_reduce import opaque
from outblas.hopper.parts.config import WARPGROUP
from outblas.hopper.parts.pipeline import PipelineState, jitter
from outblas.hopper.parts.records import WarpRole

LANES = 32


# ---- the pipeline
@dataclass(frozen=True)
class ScaledPipeline(GroupPipeline):
    """Besides those of the parent class:

    empty[s], 4 · consumers that share a tile · cluster arrivals per phase:
        each warp of a consumer arrives when it has read the stage: its threads read scales
        themselves, where products are read by the whole warpgroup.

    The bytes of scales that TMA loads count among those that LOAD_A announces. `lane`: the thread's
    lane, of a consumer.
    """

    lane: Any = None

    @cute.jit
    def arrive_and_expect_scales(self, state: PipelineState, count: Int32):
        """LOAD_A: one elected thread arrives and announces the bytes of a k tile of both operands
        and of so many scales.
        """
        self.record_arrivals("full", "producer", 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.full + state.index, self.tx_bytes + count * 4
            )

    def arrival_counts(self) -> dict[str, int]:
        counts = super().arrival_counts()
        return counts | {"empty": counts["empty"] * (WARPGROUP // LANES)}

    @cute.jit
    def consumer_release(self, index: Int32):
        jitter(self.jitter)
        warps = WARPGROUP // LANES
        self.record_arrivals("empty", "consumers", warps * self.consumers * self.cluster)
        cute.arch.sync_warp()
        if cutlass.const_expr(self.cluster == 1):
            if self.lane == 0:
                cute.arch.mbarrier_arrive(self.empty + index)
        else:
            if self.lane < self.cluster:
                cute.arch.mbarrier_arrive(self.empty + index, self.first_rank + self.lane)


def with_lane(cta: Cta, pipeline: Any) -> Any:
    """Returns the pipeline as a consumer's thread uses it."""
    return replace(pipeline, lane=opaque(cta.context.thread % LANES))


@dataclass(frozen=True)
class CopiedScalesPipeline(ScaledPipeline):
    """Where a warp copies scales, besides:

    full[s], 1 + 32 arrivals per phase:
        LOAD_A arrives and announces the bytes of A and B;
        each thread of the warp LOAD_SCALES arrives when its copies into the stage have landed.
    empty[s]:
        LOAD_SCALES waits for the previous phase as well. Nobody can overtake it, because the next
        phase of `full` needs its arrivals.
    """

    def arrival_counts(self) -> dict[str, int]:
        counts = super().arrival_counts()
        return counts | {"full": counts["full"] + LANES}

    @cute.jit
    def arrive_when_copied(self, state: PipelineState):
        """A thread of LOAD_SCALES: arrives when all its copies so far have landed."""
        self.record_arrivals("full", "scales", LANES)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full + state.index)


# ---- scales that TMA loads
@dataclass(frozen=True)
class ScaleRun:
    """Scales of a work tile that are neighbours in memory: how many there are, which may be none;
    where they begin in the first block of K, and how many bytes further in the next one; and at
    which of the scales of a stage they begin.
    """

    count: Any
    source: Any
    along_k: Any
    place: int


@dataclass(frozen=True)
class TileScales:
    """The scales of a work tile that TMA loads: those of its rows, and where each column has its
    own those of its columns, of gated pairs in two runs. `count`: of all of them.
    """

    cta: Cta
    runs: list[ScaleRun]
    count: Any


def tile_scales(cta: Cta, work) -> TileScales:
    """Returns the scales of a work tile, of which the last one may have few or none."""
    own, config, traits = of_work(cta, work), cta.config, cta.traits
    first, most = work.first_row(config.tile_m), config.tile_m
    if traits.from_any_row:
        first, most = first - first % GRANULE, most + GRANULE
    runs = [scale_run(own.scales.scale_a, first, most, own.scales.scale_a.shape[0], 0)]
    if traits.block_b == 1:
        halves, N = 2 if traits.gated else 1, cta.epilogue.extents[1]
        width = config.stage_n // halves
        for half in range(halves):
            first, place = half * N + work.column, config.tile_m + half * width
            runs.append(scale_run(own.scales.scale_b, first, width, (half + 1) * N, place))
    return TileScales(own, runs, sum(run.count for run in runs))


def scale_run(scale, first, most: int, end, place: int) -> ScaleRun:
    """Returns the run of up to `most` scales of the rows or columns from `first` to `end`."""
    count = cutlass.min(cutlass.max(end - first, 0), most)
    return ScaleRun(count, address(scale, first), Int64(scale.stride[1]) * 4, place)


@cute.jit
def load_scales(tile: TileScales, pipeline: ScaledPipeline, state: PipelineState, k_tile):
    """The warp LOAD_A: announces the bytes of a stage, and loads its scales."""
    shared, per_stage = tile.cta.scales.shared, stage_scales(tile.cta.config, tile.cta.traits)
    pipeline.arrive_and_expect_scales(state, tile.count)
    target = shared.iterator.toint() + state.index * per_stage * 4
    barrier = pipeline.producer_get_barrier(state).toint()
    for i in cutlass.range_constexpr(len(tile.runs)):
        run = tile.runs[i]
        if run.count > 0:
            with cute.arch.elect_one():
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                    "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        Int32(target + run.place * 4),
                        run.source + Int64(k_tile) * run.along_k,
                        run.count * 4,
                        Int32(barrier),
                    ],
                )


# ---- the warp that copies
@cute.jit
def run(cta: Cta, pipeline: CopiedScalesPipeline):
    """The warps of warpgroup 0: LOAD_SCALES copies the scales of all k tiles."""
    if cta.context.warp == WarpRole.LOAD_SCALES:
        copy_all(cta, pipeline)


@cute.jit
def copy_all(cta: Cta, pipeline: CopiedScalesPipeline):
    """The warp LOAD_SCALES: copies the scales of all k tiles. In stages that hold the epilogue's
    source it only arrives.
    """
    config, scheduler = cta.config, cta.scheduler
    state = pipeline.initial_state()
    for step in cutlass.range(scheduler.work_tile_count(config), unroll=1):
        work = scheduler.current_work(config, step)
        backwards = scheduler.backwards(config, work, step)
        own = of_work(cta, work)
        rows, columns = row_addresses(own, work), column_addresses(own, work)
        begin, count = work.partition.begin, work.partition.count
        for i in cutlass.range(count, unroll=1):
            pipeline.producer_acquire(state)
            k_tile = begin + i + backwards * (count - 1 - 2 * i)
            copy_stage(own, rows, columns, k_tile, state.index)
            pipeline.arrive_when_copied(state)
            state = pipeline.advance(state)
        for _ in cutlass.range_constexpr(cta.source_stages):
            pipeline.producer_acquire(state)
            pipeline.arrive_when_copied(state)
            state = pipeline.advance(state)
    # No thread exits before its copies have landed.
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)


@cute.jit
def row_addresses(cta: Cta, work):
    """Returns where the scales of this lane's rows of A begin. Rows behind the last one have its
    scales.
    """
    scales, config = cta.scales, cta.config
    first = work.first_row(config.tile_m) + cta.context.thread % LANES
    addresses = cute.make_rmem_tensor((config.tile_m // LANES,), Int64)
    for i in cutlass.range_constexpr(config.tile_m // LANES):
        addresses[i] = address(scales.scale_a, (first + i * LANES) // scales.block_a)
    return addresses


@cute.jit
def column_addresses(cta: Cta, work):
    """Returns where the scales of this lane's columns of B begin, each of which has its own. For
    gated pairs the halves of a stage follow each other.
    """
    scales, gated = cta.scales, cta.traits.gated
    lane, N = cta.context.thread % LANES, cta.epilogue.extents[1]
    count = -(-column_scales(cta.config, cta.traits) // LANES)
    addresses = cute.make_rmem_tensor((max(count, 1),), Int64)
    per_half = cta.config.stage_n // 2 if gated else cta.config.stage_n
    for i in cutlass.range_constexpr(count):
        position = lane + i * LANES
        half = position // per_half
        index = half * N + work.column + position - half * per_half
        addresses[i] = address(scales.scale_b, index)
    return addresses


@cute.jit
def copy_stage(cta: Cta, rows, columns, k_tile, stage):
    """Starts this lane's copies of the scales of a k tile into a stage."""
    config, scales = cta.config, cta.scales
    lane, per_stage = cta.context.thread % LANES, stage_scales(config, cta.traits)
    target = scales.shared.iterator.toint() + (stage * per_stage + lane) * 4
    along_a = Int64(k_tile) * Int64(scales.scale_a.stride[1]) * 4
    along_b = Int64(k_tile) * Int64(scales.scale_b.stride[1]) * 4
    for i in cutlass.range_constexpr(cute.size(rows)):
        copy_scale(target + i * LANES * 4, rows[i] + along_a)
    of_b = column_scales(config, cta.traits)
    for i in cutlass.range_constexpr(-(-of_b // LANES)):
        if lane + i * LANES < of_b:
            copy_scale(target + (config.tile_m + i * LANES) * 4, columns[i] + along_b)


@cute.jit
def copy_scale(target, source):
    """Starts the copy of one scale to an address in shared memory."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;",
        read_only_args=[Int32(target), source],
    )
