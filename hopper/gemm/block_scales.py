"""Scales of fp8 operands that vary along K: one for each row of A, or for 128 rows, and each block
of 128 terms, and likewise for columns of B.

A stage of the pipeline holds one block of 128 terms. Its scales travel with it: a warp copies them
into shared memory of their own, 4 bytes at a time with cp.async, which takes scales of any strides.
Consumers multiply the sum of each stage by them when they add it up (`promotion`).

Of A a stage has one scale for each row of the tile. Of B it has one for each column or, where 128
columns share one, those of the blocks that the tile meets.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...core.fp8 import BLOCK
from ..core import config as config_module
from ..core.config import MOST_SCALE_BLOCKS, WARPGROUP
from ..core.pipeline import PipelineState, jitter
from .pipeline import GroupPipeline
from .records import Consumer, Cta
from .row_group import RowGroup, in_order

LANES = 32
FEWEST_COLUMNS = 32  # steps of a tile's first column for which there is code for each place


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
            copy_stage(own, work, rows, columns, k_tile, state.index)
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
    """Returns where the scales of this lane's rows of A begin; with `wide_scales` those of the
    first of four rows each. Rows behind the last one have its scales.
    """
    scales, config, per_copy = cta.scales, cta.config, rows_per_copy(cta.traits)
    first, lane = work.first_row(config.tile_m), cta.context.thread % LANES
    last = (scales.scale_a.shape[0] - 1) // per_copy * per_copy
    addresses = cute.make_rmem_tensor((copies_per_lane(config.tile_m, per_copy),), Int64)
    for i in cutlass.range_constexpr(cute.size(addresses)):
        row = (first + (lane + i * LANES) * per_copy) // scales.block_a
        addresses[i] = address(scales.scale_a, cutlass.min(row, last))
    return addresses


def rows_per_copy(traits) -> int:
    """Returns for how many rows of A a lane copies scales at once."""
    return 4 if traits.wide_scales else 1


def copies_per_lane(scales: int, per_copy: int = 1) -> int:
    """Returns how many copies a lane makes of this many scales."""
    return -(-scales // (per_copy * LANES))


@cute.jit
def column_addresses(cta: Cta, work):
    """Returns where the scales of this lane's columns of B begin, or of its block of columns. For
    gated pairs the halves of a stage follow each other.
    """
    scales, gated = cta.scales, cta.traits.gated
    lane, N = cta.context.thread % LANES, cta.epilogue.extents[1]
    of_b = stage_scales(cta.config, cta.traits) - cta.config.tile_m
    count = copies_per_lane(of_b)
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


@cute.jit
def address(scale, index):
    """Returns where the scales of a row, or of a column, begin; of the last one where there is no
    such row.
    """
    index = cutlass.min(index, scale.shape[0] - 1)
    return scale.iterator.toint() + Int64(index) * Int64(scale.stride[0]) * 4


@cute.jit
def copy_stage(cta: Cta, work, rows, columns, k_tile, stage):
    """Starts this lane's copies of the scales of a k tile into a stage."""
    config, scales = cta.config, cta.scales
    lane, per_stage = cta.context.thread % LANES, stage_scales(config, cta.traits)
    target = scales.shared.iterator.toint() + stage * per_stage * 4
    along_a = Int64(k_tile) * Int64(scales.scale_a.stride[1]) * 4
    along_b = Int64(k_tile) * Int64(scales.scale_b.stride[1]) * 4
    per_copy = rows_per_copy(cta.traits)
    for i in cutlass.range_constexpr(cute.size(rows)):
        place = lane + i * LANES
        if place * per_copy < config.tile_m:
            if cutlass.const_expr(cta.traits.wide_scales):
                left = scales.scale_a.shape[0] - work.first_row(config.tile_m) - place * 4
                size = cutlass.min(cutlass.max(left, 0), 4) * 4
                copy_four(target + place * 16, rows[i] + along_a, size)
            else:
                copy_scale(target + place * 4, rows[i] + along_a)
    of_b = per_stage - config.tile_m
    for i in cutlass.range_constexpr(cute.size(columns)):
        place = lane + i * LANES
        if place < of_b:
            copy_scale(target + (config.tile_m + place) * 4, columns[i] + along_b)


@cute.jit
def copy_scale(target, source):
    """Starts the copy of one scale to an address in shared memory."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;",
        read_only_args=[Int32(target), source],
    )


@cute.jit
def copy_four(target, source, size):
    """Starts the copy of up to four neighbouring scales, `size` bytes; what is left over gets
    zeros.
    """
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[Int32(target), source, size],
    )


# ---- a consumer
@cute.jit
def row_scales(cta: Cta, consumer: Consumer, group: cutlass.Constexpr, stage):
    """Returns the scales of this thread's two rows of a row group in a stage."""
    config, scales = cta.config, cta.scales
    thread = cta.context.thread % WARPGROUP
    row = (group * config.warpgroups_per_tile + consumer.warpgroup_in_tile) * 64
    row += thread // 32 * 16 + thread % 32 // 4
    first = stage * stage_scales(config, cta.traits) + row
    return [scales.shared[first + j * 8] for j in range(2)]


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


def row_groups_of(config) -> int:
    """Returns how many times 64 rows of a tile a consumer computes."""
    return int(config.tile_m // (64 * config.warpgroups_per_tile))


def factor_count(cta: Cta, width: int) -> int:
    """Returns how many numbers the sums of a stage are multiplied by in one thread, where 128
    columns of B share a scale: one for each of its rows, half of gated pairs and block of columns.
    """
    config, traits = cta.config, cta.traits
    halves = 2 if traits.gated else 1
    return int(2 * row_groups_of(config) * halves * blocks_of(config, traits, width // halves))


@cute.jit
def read_factors(cta: Cta, consumer: Consumer, width: cutlass.Constexpr, stage, factors):
    """Reads the scales of a stage, and sets the numbers of `factor_count`: for each row group,
    those of a half, of a block of columns and of two rows.
    """
    config, traits = cta.config, cta.traits
    halves = 2 if cutlass.const_expr(traits.gated) else 1
    blocks = blocks_of(config, traits, width // halves)
    first = stage * stage_scales(config, traits) + config.tile_m
    of_b = [
        cta.scales.shared[first + half * MOST_SCALE_BLOCKS + block]
        for half in range(halves)
        for block in range(blocks)
    ]
    for group in cutlass.range_constexpr(cute.size(factors) // (2 * len(of_b))):
        rows = row_scales(cta, consumer, group, stage)
        for block in cutlass.range_constexpr(len(of_b)):
            for r in cutlass.range_constexpr(2):
                factors[(group * len(of_b) + block) * 2 + r] = rows[r] * of_b[block]


def first_boundaries(cta: Cta, work) -> list:
    """Returns at which of the tile's columns the second block of 128 columns begins; for gated
    pairs in each half.
    """
    N = cta.epilogue.extents[1]
    return [
        BLOCK - (half * N + work.column) % BLOCK for half in range(2 if cta.traits.gated else 1)
    ]


@cute.jit
def add_by_blocks(cta: Cta, sums: RowGroup, factors, boundaries):
    """Adds the sums of a row group of a stage, multiplied by its part of `factors`, to those of the
    tile.

    Tensor cores that multiply for another consumer use half of the bandwidth of the register file,
    so what counts is how many registers the additions read. Those with the same factor follow each
    other, so that it is read less often; and where a tile can begin at few columns within a block,
    there is code for each, which selects no factors.
    """
    config, traits = cta.config, cta.traits
    step = math.gcd(config.tile_n, BLOCK)
    per_group = factor_count(cta, sums.mma.width) // row_groups_of(config)
    factors = [factors[sums.group * per_group + i] for i in range(per_group)]
    if cutlass.const_expr(traits.gated):
        half = sums.mma.width // 2
        if boundaries[0] >= half and boundaries[1] >= half:
            add_halves(cta, sums, factors)
        else:
            add_selected(cta, sums, factors, boundaries)
    elif cutlass.const_expr(is_aligned(config, traits)):
        add_beyond(sums, factors, BLOCK)
    elif cutlass.const_expr(config.variable_tile_n or step < FEWEST_COLUMNS):
        add_selected(cta, sums, factors, boundaries)
    else:
        for boundary in cutlass.range_constexpr(step, BLOCK + 1, step):
            if boundaries[0] == boundary:
                add_beyond(sums, factors, boundary)


@cute.jit
def add_halves(cta: Cta, sums: RowGroup, factors):
    """Adds the sums of a row group of gated pairs where each half lies in one block of columns."""
    half = sums.mma.width // 2
    blocks = blocks_of(cta.config, cta.traits, half)
    for row in cutlass.range_constexpr(2):
        for column in cutlass.range_constexpr(0, sums.mma.width, 8):
            add_pair(sums, row, column, [factors[column // half * blocks * 2 + row]] * 2)


@cute.jit
def add_beyond(sums: RowGroup, factors, boundary: cutlass.Constexpr):
    """Adds the sums of a row group where it is known that the tile's second block of columns begins
    at column `boundary`.
    """
    for row in cutlass.range_constexpr(2):
        for column in cutlass.range_constexpr(0, sums.mma.width, 8):
            block = (column + BLOCK - boundary) // BLOCK
            add_pair(sums, row, column, [factors[block * 2 + row]] * 2)


@cute.jit
def add_selected(cta: Cta, sums: RowGroup, factors, boundaries):
    """Adds the sums of a row group where a tile may begin at any multiple of 8 columns. The second
    half of gated pairs may begin at any column, so there each column has its own factor.
    """
    gated = cta.traits.gated
    halves = 2 if cutlass.const_expr(gated) else 1
    per_half = sums.mma.width // halves
    blocks = blocks_of(cta.config, cta.traits, per_half)
    own = cta.context.thread % 4 * 2
    for row in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(halves):
            for column in cutlass.range_constexpr(0, per_half, 8):
                low = half * blocks + column // BLOCK
                pair = [factors[low * 2 + row]] * 2
                if cutlass.const_expr(column // BLOCK + 1 < blocks):
                    first, above = column % BLOCK, factors[(low + 1) * 2 + row]
                    if cutlass.const_expr(gated):
                        pair = [
                            pair[v] if first + own + v < boundaries[half] else above
                            for v in range(2)
                        ]
                    else:
                        pair = [pair[0] if first < boundaries[half] else above] * 2
                add_pair(sums, row, half * per_half + column, pair)


@cute.jit
def add_pair(sums: RowGroup, row: cutlass.Constexpr, column: cutlass.Constexpr, pair):
    """Adds the two sums of a row in eight columns, each multiplied by its factor."""
    acc, partial = sums.mma.fragments.acc, sums.mma.partial.acc
    own, added = sums.registers(column), sums.partial_registers(column)
    for v in cutlass.range_constexpr(2):
        r = own[2 * row + v]
        acc[r] = in_order(acc[r], partial[added[2 * row + v]], pair[v])


@cute.jit
def add_by_columns(cta: Cta, consumer: Consumer, sums: RowGroup, stage):
    """Adds the sums of a row group of a stage to those of the tile, each multiplied by the scales
    of its row and its column.
    """
    acc, partial = sums.mma.fragments.acc, sums.mma.partial.acc
    config, scales = cta.config, cta.scales
    rows = row_scales(cta, consumer, sums.group, stage)
    first = stage * stage_scales(config, cta.traits) + config.tile_m
    first += cta.context.thread % 4 * 2
    for column in cutlass.range_constexpr(0, sums.mma.width, 8):
        of_b = [scales.shared[first + column + v] for v in range(2)]
        own, added = sums.registers(column), sums.partial_registers(column)
        for v in cutlass.range_constexpr(4):
            factor = rows[v // 2] * of_b[v % 2]
            acc[own[v]] = in_order(acc[own[v]], partial[added[v]], factor)
