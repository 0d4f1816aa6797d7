"""Scales of fp8 operands that vary along K: one for each row of A, or for 128 rows, and each block
of 128 terms, and likewise for columns of B.

A stage of the pipeline holds one block of 128 terms. The scales of its rows of A travel with it, in
shared memory of their own (`scale_loads`), and so do those of B where each column has its own.
Where 128 columns share one, a tile meets few of them, and consumers read them from memory.

Consumers multiply the sum of each stage by its scales when they add it up (`promotion`). A
`RowGroup` names the accumulators of both sums, also where there are no such scales.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from outblas.call.fp8 import BLOCK
from outblas.hopper.gemm import epilogue_math
from outblas.hopper.gemm.records import Consumer, Cta, TileMma
from outblas.hopper.gemm.scale_layout import GRANULE
from outblas.hopper.gemm.splitk_reduce import opaque
from outblas.hopper.gemm.views import batch_last
from outblas.hopper.parts import config as config_module
from outblas.hopper.parts.config import WARPGROUP

FEWEST_COLUMNS = 32  # steps of a tile's first column for which there is code for each place


@dataclass(frozen=True)
class BlockScales:
    """The scales of a launch, and where they lie in a stage.

    scale_a: fp32, (rows of A, blocks of K), or (blocks of rows, blocks of K). scale_b: the same for
    columns of B. `block_a`, `block_b`: 1, or 128 where so many rows or columns share a scale.
    `shared`: the scales in shared memory, of each stage `tile_m` of A, then those of B if each
    column has its own.
    """

    scale_a: Any
    scale_b: Any
    block_a: int
    block_b: int
    shared: Any


def stage_scales(config, traits) -> int:
    """Returns the number of scales that a stage has in shared memory. Rows that begin anywhere have
    those of other rows before and behind them.
    """
    others = GRANULE if traits.from_any_row else 0
    return int(config_module.stage_scales(config, traits.block_b)) + others


def column_scales(config, traits) -> int:
    """Returns how many of them are those of columns of B."""
    return int(config_module.stage_scales(config, traits.block_b) - config.tile_m)


def orient(scale_a, scale_b, transposed: bool):
    """Host: returns the scales of the caller's A, (rows, blocks of K), and B, (blocks of K,
    columns), as those of the kernel's A and B, each with the blocks of K second. Groups, which come
    first where they have scales of their own, come last.
    """
    scale_a, scale_b = batch_last(scale_a, False), batch_last(scale_b, True)
    return (scale_b, scale_a) if transposed else (scale_a, scale_b)


def of_work(cta: Cta, work) -> Cta:
    """Returns the state of the CTA with the scales of a work tile, which a group may have of its
    own.
    """
    return replace(cta, scales=cta.scheduler.scales_of(cta.scales, work))


@cute.jit
def address(scale, index):
    """Returns where the scales of a row, or of a column, begin; of the last one where there is no
    such row.
    """
    index = cutlass.min(index, scale.shape[0] - 1)
    return scale.iterator.toint() + Int64(index) * Int64(scale.stride[0]) * 4


# ---- the accumulators of a consumer where sums are promoted: those of the tile, and of a stage
@dataclass(frozen=True)
class RowGroup:
    """Row group `group` of a consumer: 64 of its rows. The accumulators of a stage in `mma.partial`
    hold part `part` of the `parts` of its columns; those of the tile all rows and columns.
    """

    mma: TileMma
    config: Any
    group: int
    part: int = 0
    parts: int = 1

    @property
    def columns(self) -> range:
        """The first of each eight columns of the tile whose sums a stage has."""
        width = self.mma.width // self.parts
        return range(self.part * width, (self.part + 1) * width, 8)

    def registers(self, column: int) -> list[int]:
        """Returns the four accumulators of the tile in the eight columns from `column` on: two
        neighbours in a row, and two in the row eight below.
        """
        return epilogue_math.registers(self.config, self.mma.width, self.group, column, 8)

    @property
    def partial(self) -> Any:
        """The accumulators of a stage."""
        assert self.mma.partial is not None, "row groups are of promoted sums"
        return self.mma.partial.acc

    def partial_registers(self, column: int) -> list[int]:
        """Returns the same of the accumulators of a stage."""
        mma_n = self.config.mma_n or self.mma.width
        column -= self.columns.start
        first = column % mma_n // 2 + mma_n // 2 * (column // mma_n)
        return [first + v for v in range(4)]


def column_parts(config: Any, gated: bool) -> int:
    """Returns in how many parts a stage's sums of a row group are computed: two where wgmmas have
    as many columns as a half of gated pairs. Their accumulators then serve both halves.
    """
    return 2 if gated and 2 * config.mma_n == config.tile_n else 1


def in_order(total, product, factor=None):
    """Returns total + product · factor, without a factor total + product, rounded once.

    The instruction is explicit because compilers keep its place among those that wait for tensor
    cores. An addition that they moved behind the next products would need its sums twice.
    """
    if factor is None:
        return cute.arch.inline_ptx(
            "add.rn.f32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Float32],
            read_only_args=[total, product],
        )
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[product, factor, total],
    )


# ---- a consumer
def first_row(cta: Cta, consumer: Consumer, work):
    """Returns where this thread's first row of a tile lies among the rows whose scales a stage has.
    Its register saves a chain of instructions for each stage, which would delay the wgmmas behind
    it.
    """
    thread = cta.context.thread % WARPGROUP
    row = consumer.warpgroup_in_tile * 64 + thread // 32 * 16 + thread % 32 // 4
    if cutlass.const_expr(cta.traits.from_any_row):
        row += work.first_row(cta.config.tile_m) % GRANULE
    return opaque(row)


@cute.jit
def row_scales(cta: Cta, row, group: cutlass.Constexpr, stage):
    """Returns the scales of two rows of a row group in a stage: those of `row`, a thread's first
    one, and eight below.
    """
    config, scales = cta.config, cta.scales
    first = stage * stage_scales(config, cta.traits) + row
    first += group * config.warpgroups_per_tile * 64
    return [scales.shared[first + j * 8] for j in range(2)]


def is_aligned(config, traits) -> bool:
    """Returns whether tiles begin at multiples of 128 columns, or divide them, so that it is known
    which columns share a scale. For gated pairs their halves do.
    """
    if config.variable_tile_n or (traits.gated and not traits.whole_halves):
        return False
    width = config.tile_n // (2 if traits.gated else 1)
    return bool(width % BLOCK == 0 or BLOCK % width == 0)


def blocks_of(config, traits, width: int) -> int:
    """Returns how many blocks of 128 columns a tile, or its half of gated pairs, may meet."""
    if is_aligned(config, traits):
        return -(-width // BLOCK)
    return (width - 8) // BLOCK + 2


def row_groups_of(config) -> int:
    """Returns how many times 64 rows of a tile a consumer computes."""
    return int(config.tile_m // (64 * config.warpgroups_per_tile))


@dataclass(frozen=True)
class Factors:
    """What the sums of a stage are multiplied by in one thread, where 128 columns of B share a
    scale. All are registers.

    values: fp32, for each row group, half of gated pairs, block of columns and of two rows the
    product of two scales. `rows`, `of_b`: the scales of the next stage, two of each row group, and
    one of each half and block of columns. `addresses`: where those of B were read, `step` bytes
    apart from one stage to the next.

    Scales are read a stage ahead, and multiplied when the sums of this stage have been added: what
    reads shared memory beside wgmma waits for long.
    """

    values: Any
    rows: Any
    of_b: Any
    addresses: Any
    step: Any
    row: Any


@cute.jit
def make_factors(cta: Cta, row, work, width: cutlass.Constexpr, backwards):
    """Returns the factors of a work tile before its first stage."""
    config, scales, begin = cta.config, of_work(cta, work).scales, work.partition.begin
    halves = 2 if cutlass.const_expr(cta.traits.gated) else 1
    blocks, groups = blocks_of(config, cta.traits, width // halves), row_groups_of(config)
    values = cute.make_rmem_tensor((2 * groups * halves * blocks,), Float32)
    rows = cute.make_rmem_tensor((2 * groups,), Float32)
    of_b = cute.make_rmem_tensor((halves * blocks,), Float32)
    addresses = cute.make_rmem_tensor((halves * blocks,), Int64)
    along_k = Int64(scales.scale_b.stride[1]) * 4
    first = Int64(begin + backwards * (work.partition.count - 1)) * along_k
    for i in cutlass.range_constexpr(halves * blocks):
        column = i // blocks * cta.epilogue.extents[1] + work.column
        addresses[i] = address(scales.scale_b, column // BLOCK + i % blocks) + first
    rows.fill(0.0)
    step = opaque(Int32(along_k) * (1 - 2 * backwards))
    return Factors(values, rows, of_b, addresses, step, row)


@cute.jit
def read_blocks(factors: Factors, advance: cutlass.Constexpr):
    """Reads the scales of B of the next stage, which is `advance` stages after the last: 0 or 1."""
    for i in cutlass.range_constexpr(cute.size(factors.of_b)):
        if cutlass.const_expr(advance == 1):
            factors.addresses[i] = factors.addresses[i] + Int64(factors.step)
        factors.of_b[i] = cute.arch.inline_ptx(
            "ld.global.nc.f32 {$w0}, [{$r0}];",
            write_only_types=[Float32],
            read_only_args=[factors.addresses[i]],
        )


@cute.jit
def read_rows(cta: Cta, factors: Factors, stage):
    """Reads the scales of this thread's rows of a stage that is full."""
    for group in cutlass.range_constexpr(cute.size(factors.rows) // 2):
        rows = row_scales(cta, factors.row, group, stage)
        for r in cutlass.range_constexpr(2):
            factors.rows[2 * group + r] = rows[r]


@cute.jit
def multiply_scales(factors: Factors):
    """Makes the factors of the next stage."""
    count = cute.size(factors.of_b)
    for group in cutlass.range_constexpr(cute.size(factors.rows) // 2):
        for block in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                product = factors.rows[2 * group + r] * factors.of_b[block]
                factors.values[(group * count + block) * 2 + r] = product


def first_boundaries(cta: Cta, work) -> list[Any]:
    """Returns at which of the tile's columns the second block of 128 columns begins; for gated
    pairs in each half.
    """
    N = cta.epilogue.extents[1]
    return [
        BLOCK - (half * N + work.column) % BLOCK for half in range(2 if cta.traits.gated else 1)
    ]


@cute.jit
def add_by_blocks(cta: Cta, sums: RowGroup, all_factors: Factors, boundaries):
    """Adds the sums of a row group of a stage, multiplied by its part of the factors, to those of
    the tile.

    Tensor cores that multiply for another consumer use half of the bandwidth of the register file,
    so what counts is how many registers the additions read. Those with the same factor follow each
    other, so that it is read less often; and where a tile can begin at few columns within a block,
    there is code for each, which selects no factors.
    """
    config, traits = cta.config, cta.traits
    step = math.gcd(config.tile_n, BLOCK)
    per_group = 2 * cute.size(all_factors.of_b)
    factors = [all_factors.values[sums.group * per_group + i] for i in range(per_group)]
    if cutlass.const_expr(traits.gated and is_aligned(config, traits)):
        add_halves(cta, sums, factors)
    elif cutlass.const_expr(traits.gated):
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
        for column in sums.columns:
            block = column // half * blocks + column % half // BLOCK
            add_pair(sums, row, column, [factors[block * 2 + row]] * 2)


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
            for column in columns_of_half(sums, half, per_half):
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


def columns_of_half(sums: RowGroup, half: int, per_half: int) -> list[int]:
    """Returns the columns of a half, counted from its first one, whose sums a stage has."""
    columns = range(half * per_half, (half + 1) * per_half, 8)
    return [column - half * per_half for column in columns if column in sums.columns]


@cute.jit
def add_pair(sums: RowGroup, row: cutlass.Constexpr, column: cutlass.Constexpr, pair):
    """Adds the two sums of a row in eight columns, each multiplied by its factor."""
    acc, partial = sums.mma.fragments.acc, sums.partial
    own, added = sums.registers(column), sums.partial_registers(column)
    for v in cutlass.range_constexpr(2):
        r = own[2 * row + v]
        acc[r] = in_order(acc[r], partial[added[2 * row + v]], pair[v])


@cute.jit
def add_by_columns(cta: Cta, row, sums: RowGroup, stage):
    """Adds the sums of a row group of a stage to those of the tile, each multiplied by the scales
    of its row and its column. `row`: this thread's first row.
    """
    acc, partial = sums.mma.fragments.acc, sums.partial
    config, scales = cta.config, cta.scales
    rows = row_scales(cta, row, sums.group, stage)
    first = stage * stage_scales(config, cta.traits) + config.tile_m
    first += cta.context.thread % 4 * 2
    for column in sums.columns:
        of_b = [scales.shared[first + column + v] for v in range(2)]
        own, added = sums.registers(column), sums.partial_registers(column)
        for v in cutlass.range_constexpr(4):
            factor = rows[v // 2] * of_b[v % 2]
            acc[own[v]] = in_order(acc[own[v]], partial[added[v]], factor)
