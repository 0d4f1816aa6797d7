"""Scales of fp8 operands that vary along K: one for each row of A, or for 128 rows, and each block
of 128 terms, and likewise for columns of B.

A stage of the pipeline holds one block of 128 terms. Its scales travel with it: a warp copies them
into shared memory of their own, 4 bytes at a time with cp.async, which takes scales of any strides.
Consumers multiply the sum of each stage by them when they add it up (`promotion`).

Of A a stage has one scale for each row of the tile. Of B it has one for each column or, where 128
columns share one, those of the blocks that the tile meets.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...core.fp8 import BLOCK
from ..core import config as config_module
from ..core.config import MOST_SCALE_BLOCKS, WARPGROUP
from ..core.pipeline import PipelineState, jitter
from .pipeline import GroupPipeline
from .records import Consumer, Cta, TileMma

LANES = 32


@dataclass(frozen=True)
class BlockScales:
    """The scales of a launch, and where they lie in a stage.

    scale_a: fp32, (rows of A, blocks of K), or (blocks of rows, blocks of K). scale_b: the same for
    columns of B. `block_a`, `block_b`: 1, or 128 where so many rows or columns share a scale.
    `shared`: the scales in shared memory, of each stage `tile_m` of A, then those of B.
    """

    scale_a: Any
    scale_b: Any
    block_a: int
    block_b: int
    shared: Any


def stage_scales(config, traits) -> int:
    """Returns the number of scales of a stage."""
    return int(config_module.stage_scales(config, traits.block_b, traits.gated))


def orient(scale_a, scale_b, transposed: bool):
    """Host: returns the scales of the caller's A, (rows, blocks of K), and B, (blocks of K,
    columns), as those of the kernel's A and B, each with the blocks of K last.
    """
    scale_b = cute.make_tensor(scale_b.iterator, cute.select(scale_b.layout, mode=[1, 0]))
    return (scale_b, scale_a) if transposed else (scale_a, scale_b)


# ---- the pipeline
@dataclass(frozen=True)
class ScaledPipeline(GroupPipeline):
    """Besides those of the parent class:

    full[s], 1 + 32 arrivals per phase:
        LOAD_A arrives and announces the bytes of A and B;
        each thread of the warp LOAD_SCALES arrives when its copies into the stage have landed.
    empty[s], 4 · consumers that share a tile · cluster arrivals per phase:
        each warp of a consumer arrives when it has read the stage: its threads read scales
        themselves, where products are read by the whole warpgroup;
        LOAD_SCALES waits for the previous phase as well. Nobody can overtake it, because the next
        phase of `full` needs its arrivals.
    """

    def arrival_counts(self) -> dict[str, int]:
        counts = super().arrival_counts()
        warps = WARPGROUP // LANES
        return {"full": counts["full"] + LANES, "empty": counts["empty"] * warps}

    @cute.jit
    def arrive_when_copied(self, state: PipelineState):
        """A thread of LOAD_SCALES: arrives when all its copies so far have landed."""
        self.record_arrivals("full", "scales", LANES)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full + state.index)

    @cute.jit
    def consumer_release(self, index: Int32):
        jitter(self.jitter)
        warps = WARPGROUP // LANES
        self.record_arrivals("empty", "consumers", warps * self.consumers * self.cluster)
        cute.arch.sync_warp()
        lane = cute.arch.thread_idx()[0] % LANES
        if cutlass.const_expr(self.cluster == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(self.empty + index)
        else:
            if lane < self.cluster:
                cute.arch.mbarrier_arrive(self.empty + index, self.first_rank + lane)


# ---- the warp that loads
@cute.jit
def load(cta: Cta, pipeline: ScaledPipeline):
    """The warp LOAD_SCALES: copies the scales of all k tiles. In stages that hold the epilogue's
    source it only arrives.
    """
    config, scheduler = cta.config, cta.scheduler
    state = pipeline.initial_state()
    for step in cutlass.range(scheduler.work_tile_count(config), unroll=1):
        work = scheduler.current_work(config, step)
        backwards = scheduler.backwards(config, work, step)
        own = replace(cta, scales=scheduler.tile_scales(cta.scales, work))
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
    """Returns where the scales of this lane's columns of B begin, or of its block of columns. For
    gated pairs the halves of a stage follow each other.
    """
    scales, gated = cta.scales, cta.traits.gated
    lane, N = cta.context.thread % LANES, cta.epilogue.extents[1]
    count = columns_per_lane(cta.config, cta.traits)
    addresses = cute.make_rmem_tensor((count,), Int64)
    per_half = cta.config.stage_n // 2 if gated else cta.config.stage_n
    for i in cutlass.range_constexpr(count):
        position = lane + i * LANES
        if cutlass.const_expr(scales.block_b == 1):
            half = position // per_half
            index = half * N + work.column + position - half * per_half
        else:
            half = cutlass.min(position // MOST_SCALE_BLOCKS, 1 if gated else 0)
            index = (half * N + work.column) // BLOCK + position - half * MOST_SCALE_BLOCKS
        addresses[i] = address(scales.scale_b, index)
    return addresses


def columns_per_lane(config, traits) -> int:
    """Returns how many scales of B a lane copies for each stage."""
    return -(-(stage_scales(config, traits) - config.tile_m) // LANES)


@cute.jit
def address(scale, index):
    """Returns where the scales of a row, or of a column, begin; of the last one where there is no
    such row.
    """
    index = cutlass.min(index, scale.shape[0] - 1)
    return scale.iterator.toint() + Int64(index) * Int64(scale.stride[0]) * 4


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
    of_b = per_stage - config.tile_m
    for i in cutlass.range_constexpr(cute.size(columns)):
        if lane + i * LANES < of_b:
            copy_scale(target + (config.tile_m + i * LANES) * 4, columns[i] + along_b)


@cute.jit
def copy_scale(target, source):
    """Starts the copy of one scale to an address in shared memory."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;",
        read_only_args=[Int32(target), source],
    )


# ---- a consumer
@cute.jit
def row_scales(cta: Cta, consumer: Consumer, stage):
    """Returns the scales of this thread's rows in a stage, two of each row group."""
    config, scales = cta.config, cta.scales
    thread = cta.context.thread % WARPGROUP
    groups = config.tile_m // (64 * config.warpgroups_per_tile)
    row = consumer.warpgroup_in_tile * 64 + thread // 32 * 16 + thread % 32 // 4
    first = stage * stage_scales(config, cta.traits) + row
    found = cute.make_rmem_tensor((2 * groups,), Float32)
    for i in cutlass.range_constexpr(groups):
        for j in cutlass.range_constexpr(2):
            found[2 * i + j] = scales.shared[first + i * config.warpgroups_per_tile * 64 + j * 8]
    return found


def is_aligned(config, traits) -> bool:
    """Returns whether tiles begin at multiples of 128 columns, or divide them, so that it is known
    which columns share a scale.
    """
    if config.variable_tile_n or traits.gated:
        return False
    return bool(config.tile_n % BLOCK == 0 or BLOCK % config.tile_n == 0)


def blocks_of(config, traits, width: int) -> int:
    """Returns how many blocks of 128 columns a tile, or its half of gated pairs, may meet."""
    if is_aligned(config, traits):
        return -(-width // BLOCK)
    return (width - 8) // BLOCK + 2


@cute.jit
def block_factors(cta: Cta, consumer: Consumer, stage, width: cutlass.Constexpr):
    """Returns what the sums of a stage are multiplied by, where 128 columns of B share a scale:
    for each half of gated pairs, block of columns and row of this thread.
    """
    config, traits = cta.config, cta.traits
    rows = row_scales(cta, consumer, stage)
    halves, per_half = (2, width // 2) if cutlass.const_expr(traits.gated) else (1, width)
    blocks, count = blocks_of(config, traits, per_half), cute.size(rows)
    factors = cute.make_rmem_tensor((halves * blocks * count,), Float32)
    first = stage * stage_scales(config, traits) + config.tile_m
    for half in cutlass.range_constexpr(halves):
        for block in cutlass.range_constexpr(blocks):
            of_b = cta.scales.shared[first + half * MOST_SCALE_BLOCKS + block]
            for r in cutlass.range_constexpr(count):
                factors[(half * blocks + block) * count + r] = rows[r] * of_b
    return factors


def first_boundaries(cta: Cta, work) -> list:
    """Returns at which of the tile's columns the second block of 128 columns begins; for gated
    pairs in each half.
    """
    N = cta.epilogue.extents[1]
    return [
        BLOCK - (half * N + work.column) % BLOCK for half in range(2 if cta.traits.gated else 1)
    ]


@cute.jit
def add_by_blocks(cta: Cta, mma: TileMma, factors, boundaries, registers_of: cutlass.Constexpr):
    """Adds the sums of a stage, multiplied by `factors`, to those of the tile. `registers_of(i,
    column)`: the four accumulators of row group i in the eight columns from `column` on.
    """
    acc, partial = mma.fragments.acc, mma.partial.acc
    config, traits = cta.config, cta.traits
    halves = 2 if cutlass.const_expr(traits.gated) else 1
    per_half = mma.width // halves
    blocks, aligned = blocks_of(config, traits, per_half), is_aligned(config, traits)
    rows = 2 * (config.tile_m // (64 * config.warpgroups_per_tile))
    for half in cutlass.range_constexpr(halves):
        for column in cutlass.range_constexpr(0, per_half, 8):
            low = half * blocks + column // BLOCK
            for i in cutlass.range_constexpr(rows // 2):
                which = registers_of(i, half * per_half + column)
                for j in cutlass.range_constexpr(2):
                    factor = factors[low * rows + 2 * i + j]
                    if cutlass.const_expr(not aligned and column // BLOCK + 1 < blocks):
                        above = factors[(low + 1) * rows + 2 * i + j]
                        factor = factor if column % BLOCK < boundaries[half] else above
                    for v in cutlass.range_constexpr(2):
                        r = which[2 * j + v]
                        acc[r] = cute.math.fma(partial[r], factor, acc[r])


@cute.jit
def add_by_columns(
    cta: Cta, consumer: Consumer, mma: TileMma, stage, registers_of: cutlass.Constexpr
):
    """Adds the sums of a stage to those of the tile, each multiplied by the scales of its row and
    its column.
    """
    acc, partial = mma.fragments.acc, mma.partial.acc
    config, scales = cta.config, cta.scales
    rows = row_scales(cta, consumer, stage)
    first = stage * stage_scales(config, cta.traits) + config.tile_m
    first += cta.context.thread % 4 * 2
    for column in cutlass.range_constexpr(0, mma.width, 8):
        of_b = [scales.shared[first + column + v] for v in range(2)]
        for i in cutlass.range_constexpr(cute.size(rows) // 2):
            which = registers_of(i, column)
            for j in cutlass.range_constexpr(2):
                for v in cutlass.range_constexpr(2):
                    r, factor = which[2 * j + v], rows[2 * i + j] * of_b[v]
                    acc[r] = cute.math.fma(partial[r], factor, acc[r])
