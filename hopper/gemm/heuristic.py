"""The default config of `hopper.gemm` where none was tuned. Among some tiles, clusters and
partitions of K, it picks the one whose waves cost the fewest cycles by a simple model.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from ...core import fp8
from ...core.machines import Machine
from ...core.problem import Problem, with_row_major_output
from ...device import clusters, l2
from ..core import tile_order
from ..core.config import (
    SHARED_MEMORY,
    SUBTILE_BYTES,
    HopperConfig,
    block_scaled_reason,
    gated_reason,
    quantized_reason,
)
from . import operand_copies
from .scale_layout import are_all_wide

# The model's constants. Those for the start of a call and for GPC-local loads come from time stamps
# and times of short calls (WORKLOG.md); the others are estimates.
CALL_CYCLES = 3500.0  # of a call besides its tiles: the first load 2000, the last store 1500
TILE_CYCLES = 600.0  # between two tiles of a CTA
REDUCE_CYCLES = 6000.0  # of partial sums that go through memory, besides their bytes
REDUCE_BYTES = 20.0  # bytes of partial sums per cycle
# Bytes of operands that reach an SM per cycle:
GPC_LOCAL_BYTES = 90.0  # in a call of one wave where the SMs of a GPC compute neighbouring tiles
SPLIT_BYTES = 60.0  # in a call of one wave whose CTAs compute partitions of K
STEADY_BYTES = 40.0  # in a longer call
STREAMED_BYTES = 60.0  # of weights that come from DRAM, in a call of few rows
LINE_BYTES = 60.0  # of cache lines that are requested more than once, each request counted
REACHED = 0.97  # the fraction of that rate that a tile reaches
FEW_STAGES = 1.05  # factor for tiles that fewer than four stages feed
# Where fp8 sums are promoted, fitted to 20 tiles at 12 shapes and 26 at 18 (WORKLOG.md):
PROMOTED_STAGE_CYCLES = 200.0  # of a stage besides its products: waiting, and additions not hidden
PROMOTED_BYTES = 48.0  # bytes of operands that reach an SM per cycle
PROMOTED_STEADY_BYTES = 36.0  # the same in several waves of many rows and columns
PROMOTED_TILE_CYCLES = 300.0  # between two tiles of a CTA, besides those of its sums:
PROMOTED_SUM_CYCLES = 0.036  # for each of them, and twice that with one epilogue stage for several
# Of a pass that quantizes C, besides its bytes, which are estimates: a launch, and waiting for it.
QUANTIZE_CYCLES = 3500.0
THREE_CONSUMERS = 1.03  # factor for tiles of three consumers
SHORT_REQUESTS = 1.01  # factor for weights from DRAM whose rows are requested 128 bytes at a time
HELD = 0.8  # the fraction of L2 that operands may fill and still be held from call to call

# tile_m, consumers, cluster_m, cluster_n, swap, and widths. Pingpong is left to tuning.
_TILES = (
    (64, 1, 1, 1, False, (128, 96, 64, 48)),
    (64, 1, 2, 1, False, (128, 64, 32)),
    (128, 2, 2, 1, False, (256, 192, 128, 64)),
    (128, 2, 1, 1, False, (256, 128, 64)),
    (64, 1, 1, 1, True, (64, 32, 16)),
)
# Where few rows meet weights that come from DRAM: tile_m, consumers, whether the few rows are the
# columns of the tile, and widths. Sweeps with cold weights on an H100 (WORKLOG.md) led to tall
# tiles, which leave fewer CTAs that read for longer.
_STREAMING_TILES = (
    (64, 1, True, (64, 32, 16)),
    (128, 2, True, (64, 32, 16)),
    (192, 3, True, (32, 16)),
    (256, 2, True, (16,)),
    (64, 1, False, (224, 160, 128, 96, 64, 48)),
)
_STREAMING_CLUSTERS = ((1, 1), (2, 1), (1, 2))
# tile_m, consumers, cluster_m, cluster_n, widths
_VARIABLE_N_TILES = (
    (64, 1, 1, 1, range(256, 87, -8)),
    (128, 2, 2, 1, range(256, 135, -8)),
    (128, 2, 1, 1, range(256, 87, -8)),
    (128, 2, 1, 2, range(208, 135, -8)),
    (192, 3, 1, 1, range(192, 87, -8)),
    (192, 3, 1, 2, range(192, 135, -8)),
    (256, 2, 1, 2, range(200, 127, -8)),
)
# Where sums are promoted: tile_m, consumers, cluster_m, cluster_n, swap, widths. Wider tiles than
# these need more registers.
_PROMOTED_TILES = (
    (256, 2, 1, 2, False, (128,)),
    (256, 2, 2, 1, False, (128,)),
    (192, 3, 1, 2, False, (128,)),
    (192, 3, 2, 1, False, (128,)),
    (128, 2, 1, 2, False, (192, 128)),
    (128, 2, 2, 1, False, (192, 128)),
    (128, 2, 1, 1, False, (192, 128, 96, 64, 32)),
    (64, 1, 2, 1, False, (192, 128, 64)),
    (64, 1, 1, 1, False, (192, 128, 96, 64, 32, 16)),
    (64, 1, 1, 1, True, (64, 32, 16)),
    (128, 2, 1, 1, True, (64, 32, 16)),
)
# Where a stage sums one half of gated pairs after the other, 128 columns each. Those that become
# outputs in fp8 all do: 128 columns of them share a scale. tile_m, consumers, cluster_m, cluster_n.
# To the model 2×1 and 1×2 are alike; the first is 3% to 5% faster from 1,024 rows on (WORKLOG.md).
_PROMOTED_PAIRS = ((128, 2, 2, 1), (128, 2, 1, 2), (128, 2, 1, 1), (64, 1, 2, 1), (64, 1, 1, 1))
# Registers for setmaxnreg, for numbers of consumers that need other values than the base config.
_REGISTERS = {1: (0, 0), 3: (32, 160)}
_CLUSTER_K = (2, 4, 8)  # CTAs of a cluster that divide K
_FEWEST_K_TILES = 4  # minimum k tiles per CTA
_MOST_STAGES = 16
_ENOUGH_STAGES = 3  # of k tiles of 128 terms, for weights that come from DRAM
_ENOUGH_PROMOTED = 5  # stages; more are worth less than another epilogue stage
FEW = 64  # this few rows or columns may be faster as columns of the tile
ONE_TILE = 256  # up to this many, all of them fit in one tile, so that each weight is loaded once


class Rates(NamedTuple):
    """What the model knows of a GPU; the defaults are those of an H100.

    Attributes:
        sms: its SMs.
        flops_per_clock: FLOP of one SM per cycle on 16-bit operands; an H20 has a quarter.
        dram_bytes_per_clock: bytes from DRAM per cycle at the boost clock.
        l2_bytes: the size of L2.
    """

    sms: int = 132
    flops_per_clock: int = 4096
    dram_bytes_per_clock: float = 1832.0
    l2_bytes: int = 50 * 2**20


def rates(machine: Machine) -> Rates:
    """Returns the rates of a GPU of the list of machines."""
    return Rates(
        machine.sms,
        machine.flops_per_sm_clock["bfloat16"],
        1e3 * machine.dram_gbs / machine.boost_mhz,
        machine.l2_bytes,
    )


class _Call(NamedTuple):
    """A call in the model.

    Attributes:
        problem: the problem with operands that TMA can load.
        M, N: the rows and columns of the product whose output lies by rows.
        cache_lines: the cache lines that A and B take per 128 bytes of a row (`l2.lines`).
        contiguous_columns: whether the columns of tiles are contiguous in memory, as operands are
            and where they are exchanged.
        gpu: the rates of the GPU.
        streams: whether few rows meet weights that come from DRAM, which bounds the call.
        dram_cycles: the cycles in which the operands come from DRAM, where up to `ONE_TILE` rows,
            more than few, meet such weights; else 0.
    """

    problem: Problem
    M: int
    N: int
    cache_lines: tuple[int, int]
    contiguous_columns: tuple[bool, bool]
    gpu: Rates
    streams: bool
    dram_cycles: float


@functools.lru_cache(maxsize=512)
def config(problem: Problem, gpu: Rates, base: HopperConfig) -> HopperConfig:
    """Returns the config for a problem on a GPU with these rates. `base` provides the fields that
    the heuristic does not set.

    A batch-invariant product processes K in one order. The heuristic may still choose tiles and
    their shape by M, because they do not change bits.
    """
    return _best(problem, gpu, base)[1]


@functools.lru_cache(maxsize=512)
def quantizes(problem: Problem, gpu: Rates, base: HopperConfig) -> bool:
    """Returns whether a C in fp8 with scales costs fewer cycles than one in fp32 and a pass that
    quantizes it, which reads four bytes of each element and writes one.
    """
    wide = _best(unquantized(problem), gpu, base)[0]
    quantized = QUANTIZE_CYCLES + 5 * problem.M * problem.N / gpu.dram_bytes_per_clock
    return _best(problem, gpu, base)[0] <= wide + quantized


def unquantized(problem: Problem) -> Problem:
    """Returns the problem with a C in fp32 in the place of one in fp8 with scales."""
    plain = replace(problem.epilogue, scale_out=None, power_of_two=False)
    return replace(problem, out_dtype=torch.float32, epilogue=plain)


def sums_halves(problem: Problem) -> bool:
    """Returns whether the halves of gated pairs may be summed one after the other: where their sums
    are promoted, and each half has whole blocks of columns.
    """
    if not problem.epilogue.gated or not problem.formats or problem.N % fp8.BLOCK:
        return False
    return fp8.formats(problem.formats).promoted


def _best(problem: Problem, gpu: Rates, base: HopperConfig) -> tuple[float, HopperConfig]:
    """Returns the config of the fewest cycles, and how many these are."""
    problem = operand_copies.aligned(problem)
    row_major = with_row_major_output(problem)[0]
    call = _Call(
        problem,
        row_major.M,
        row_major.columns,
        l2.lines(row_major),
        operand_copies.contiguous_columns(problem),
        gpu,
        *_dram_bound(row_major, gpu),
    )
    if problem.batch_invariant:
        base = replace(base, k_serpentine=False)
    tiles, formats = _tiles_of(base), fp8.formats(problem.formats) if problem.formats else None
    promoted = formats is not None and formats.promoted
    candidates = _promoted_candidates(call, tiles) if promoted else _candidates(call, tiles)
    if problem.epilogue.gated:
        in_halves = sums_halves(problem)
        candidates = (c for c in candidates if gated_reason(c, in_halves) is None)
    if formats is not None and formats.block_a:
        candidates = _with_scales(call, formats, candidates)
    if problem.epilogue.scale_out:
        gated = problem.epilogue.gated
        candidates = (c for c in candidates if quantized_reason(c, gated) is None)
    cycles = _promoted_cycles if promoted else _cycles
    return min(((cycles(c, call), c) for c in candidates), key=lambda found: found[0])


def _with_scales(
    call: _Call, formats: fp8.Formats, candidates: Iterator[HopperConfig]
) -> Iterator[HopperConfig]:
    """Yields the candidates that can take scales: those whose threads have registers for them, with
    fewer stages, or one epilogue stage, where scales need the memory.
    """
    _, swapped = with_row_major_output(call.problem)
    loaded = formats.block_a == formats.block_b == 1 and are_all_wide(call.problem)
    for c in candidates:
        block_b = formats.block_a if c.swap_ab != swapped else formats.block_b
        if call.problem.epilogue.gated and not c.mma_n:
            if c.tile_m * c.tile_n > 128 * 128:
                continue  # each half has scales of its own
            half = c.tile_n // 2
            if block_b > 1 and sums_halves(call.problem) and half % fp8.BLOCK and fp8.BLOCK % half:
                continue  # halves of other widths need a select for each column
        copied = block_b == 1 and (c.weights_ready or not loaded)
        if copied and c.tile_m > 192:
            continue
        if copied and c.mma_n and c.producer_registers:
            # The warp that copies the scales of 256 columns has their addresses in registers.
            c = replace(c, producer_registers=56, consumer_registers=224)
        fewer_subtiles = replace(c, epilogue_stages=1) if c.epilogue_stages > 1 else c
        smaller = [replace(c, stages=stages) for stages in range(c.stages, 1, -1)]
        spared = [*smaller[:2], fewer_subtiles] if c.stages > _ENOUGH_PROMOTED else [fewer_subtiles]
        for config in (c, *spared, *smaller):
            if block_scaled_reason(config, block_b) is None:
                yield config
                break


def _dram_bound(problem: Problem, gpu: Rates) -> tuple[bool, float]:
    """Returns `streams` and `dram_cycles` of a call. It waits for operands from DRAM rather than
    for tensor cores where L2 cannot hold them from call to call, and it has few rows or columns.
    """
    M, N, K, size = problem.M, problem.columns, problem.K, problem.dtype.itemsize
    # An operand that is broadcast over a batch has one matrix.
    count_a, count_b = (
        math.prod(n for n, stride in zip(problem.batch, strides, strict=False) if stride)
        for strides in (problem.a, problem.b)
    )
    operands = size * K * (count_a * M + count_b * N)
    products = 2 * M * N * K * math.prod(problem.batch) / (gpu.sms * gpu.flops_per_clock)
    cycles = operands / gpu.dram_bytes_per_clock
    bounds = operands > HELD * gpu.l2_bytes and cycles > products
    rows = min(M, N)
    return bounds and rows <= FEW, cycles if bounds and FEW < rows <= ONE_TILE else 0.0


class _Tile(NamedTuple):
    """The fields in which candidates differ; the meaning of each is that of `HopperConfig`."""

    tile_m: int
    consumers: int
    cluster_m: int
    cluster_n: int
    swap_ab: bool
    tile_n: int
    variable_tile_n: bool = False
    tile_k: int = 0  # 0: that of the base config
    cluster_k: int = 1
    mma_n: int = 0  # 0: that of the base config


class _Tiles:
    """The filled configs of tiles beside one base config. A planned call looks at a hundred of
    them, and making one takes longer than judging it, so they are kept.
    """

    def __init__(self, base: HopperConfig) -> None:
        self.base = base
        self._made: dict[_Tile, HopperConfig] = {}

    def config(self, tile: _Tile) -> HopperConfig:
        """Returns the filled config of a tile."""
        found = self._made.get(tile)
        if found is None:
            found = filled(
                replace(
                    shaped(self.base, *tile[:4]),
                    swap_ab=tile.swap_ab,
                    tile_n=tile.tile_n,
                    variable_tile_n=tile.variable_tile_n,
                    tile_k=tile.tile_k or self.base.tile_k,
                    cluster_k=tile.cluster_k,
                    mma_n=tile.mma_n or self.base.mma_n,
                )
            )
            self._made[tile] = found
        return found


_tiles_of = functools.lru_cache(maxsize=16)(_Tiles)


def _candidates(call: _Call, tiles: _Tiles) -> Iterator[HopperConfig]:
    problem, M, N = call.problem, call.M, call.N
    any_column = swaps_of_any_column(problem)[:1]
    for tile_m, consumers, cluster_m, cluster_n, swap, widths in _TILES:
        if swap and min(M, N) > FEW:
            continue
        for width in widths:
            swapped = swap or (any_column == [True] and width % 64 > 0)
            tile = _Tile(tile_m, consumers, cluster_m, cluster_n, swapped, width)
            tile = _with_deep_k_tiles(tile, tiles, call)
            yield tiles.config(tile)
            if not problem.batch_invariant:
                yield from _partitioned(tile, tiles, call, _CLUSTER_K)
    if call.streams:
        yield from _streaming_candidates(call, tiles)
        return
    if call.dram_cycles:
        yield from _whole_width_candidates(call, tiles)
    if M * N * math.prod(problem.batch) > 128**2 * call.gpu.sms // 2:
        for (*shape, widths_of_shape), swap in product(_VARIABLE_N_TILES, any_column):
            tile_m, consumers, cluster_m, cluster_n = shape
            for width in widths_of_shape:
                tile = _Tile(tile_m, consumers, cluster_m, cluster_n, swap, width, True)
                yield tiles.config(tile)


def _streaming_candidates(call: _Call, tiles: _Tiles) -> Iterator[HopperConfig]:
    few_rows = call.M <= call.N
    problem = with_row_major_output(call.problem)[0]
    weights_along_k = problem.b[-2] == 1 if few_rows else problem.a[-1] == 1
    for kind, (cluster_m, cluster_n) in product(_STREAMING_TILES, _STREAMING_CLUSTERS):
        tile_m, consumers, few_are_columns, widths = kind
        swap = few_are_columns == few_rows
        for width in widths:
            whole_lines = few_are_columns or weights_along_k or width % 64 == 0
            # A cluster along the few rows or columns needs two tiles there.
            along_few = cluster_n if few_are_columns else cluster_m
            side = width if few_are_columns else tile_m
            full = along_few * side - side < min(call.M, call.N)
            if whole_lines and full and width % (16 * cluster_m) == 0:
                tile = _Tile(tile_m, consumers, cluster_m, cluster_n, swap, width)
                tile = _with_deep_k_tiles(tile, tiles, call)
                yield tiles.config(tile)
                if not call.problem.batch_invariant and cluster_m * cluster_n == 1:
                    yield from _partitioned(tile, tiles, call, _CLUSTER_K[:1])


def _promoted_candidates(call: _Call, tiles: _Tiles) -> Iterator[HopperConfig]:
    pairs = [_Tile(*shape, False, 2 * fp8.BLOCK, mma_n=fp8.BLOCK) for shape in _PROMOTED_PAIRS]
    if call.problem.epilogue.scale_out and call.problem.epilogue.gated:
        yield from map(tiles.config, pairs)
        return
    for tile_m, consumers, cluster_m, cluster_n, swap, widths in _PROMOTED_TILES:
        if swap and min(call.M, call.N) > FEW:
            continue
        for width in widths:
            tile = _Tile(tile_m, consumers, cluster_m, cluster_n, swap, width)
            yield tiles.config(tile)
            if not call.problem.batch_invariant and tile_m * width <= 128 * 128:
                yield from _partitioned(tile, tiles, call, _CLUSTER_K[:2])
    if sums_halves(call.problem):
        yield from map(tiles.config, pairs)


def _whole_width_candidates(call: _Call, tiles: _Tiles) -> Iterator[HopperConfig]:
    """Yields tiles that have all rows of the few as their columns, so that one CTA loads each
    weight.
    """
    width = -(-min(call.M, call.N) // 16) * 16
    for tile_m, consumers in ((64, 1), (128, 2)):
        tile = _Tile(tile_m, consumers, 1, 1, call.M <= call.N, width)
        deep = tile._replace(tile_k=128)
        if tiles.config(deep).stages >= _ENOUGH_STAGES:
            tile = deep
        yield tiles.config(tile)
        if not call.problem.batch_invariant:
            yield from _partitioned(tile, tiles, call, _CLUSTER_K[:1])


def shaped(
    base: HopperConfig, tile_m: int, consumers: int, cluster_m: int, cluster_n: int
) -> HopperConfig:
    """Returns the config with these fields, and with the registers for this number of consumers."""
    default = (base.producer_registers, base.consumer_registers)
    producer_registers, consumer_registers = _REGISTERS.get(consumers, default)
    return replace(
        base,
        tile_m=tile_m,
        consumers=consumers,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        producer_registers=producer_registers,
        consumer_registers=consumer_registers,
    )


def swaps_of_any_column(problem: Problem) -> list[bool]:
    """Returns the values of `swap_ab` with which tiles may begin at any column, because B is stored
    by columns; the better value first.

    Where the rows of B are contiguous, a tile that does not begin at a multiple of 64 columns
    requests twice the cache lines (1280 nn on an H100: 17.3 µs, in 128 columns 8.8). The transpose
    of C must be stored by TMA, which can store 16-bit elements by columns, but not fp32.
    """
    row_major = with_row_major_output(problem)[0]
    in_granules = row_major.N % 8 == 0 and row_major.out[-2] % 8 == 0
    can_stage = problem.out_dtype.itemsize == 2 and in_granules and row_major.alignment[2] >= 16
    swaps = []
    if row_major.b[-2] == 1:
        swaps.append(False)
    if row_major.a[-1] == 1 and can_stage:
        swaps.append(True)
    return swaps


def _partitioned(
    tile: _Tile, tiles: _Tiles, call: _Call, cluster_ks: tuple[int, ...]
) -> Iterator[HopperConfig]:
    """Yields the config of a tile with partitions of K, where its tiles leave SMs without work."""
    c, K, sms = tiles.config(tile), call.problem.K, call.gpu.sms
    count = _count(c, call)
    for cluster_k in cluster_ks:
        cluster = c.cluster * cluster_k
        possible = (
            cluster <= 8
            and c.tile_n % (8 * cluster_k) == 0
            and cluster_k * _FEWEST_K_TILES * c.tile_k <= K
        )
        if possible and clusters.at_once(sms, cluster) >= count:
            yield tiles.config(tile._replace(cluster_k=cluster_k))
    split_k = min(sms // (count * c.cluster), K // (8 * c.tile_k), 32)
    if split_k > max(_CLUSTER_K):
        yield filled(replace(c, split_k=split_k, k_serpentine=False))


def _with_deep_k_tiles(tile: _Tile, tiles: _Tiles, call: _Call) -> _Tile:
    """Gives small tiles k tiles of 128 terms, which halves the number of loads and barriers. Tiles
    of weights from DRAM get them where enough stages fit, because longer parts of rows arrive
    faster.
    """
    if call.problem.K < 8 * 128 or "promoted" in call.problem.formats:
        return tile
    deep = tile._replace(tile_k=128)
    small = tile.tile_m * tile.tile_n < 64 * 128 and tile.cluster_m * tile.cluster_n == 1
    if small or (call.streams and tiles.config(deep).stages >= _ENOUGH_STAGES):
        return deep
    if call.dram_cycles and tiles.config(deep).stages > _ENOUGH_STAGES:
        return deep
    return tile


def filled(c: HopperConfig) -> HopperConfig:
    """Returns the config with as many epilogue stages as help, and as many stages as still fit.
    Where few stages fit, another stage is worth more than an epilogue stage.
    """
    epilogue_stage_bytes = c.consumers * SUBTILE_BYTES
    pipeline_bytes, epilogue_bytes = (
        c.stages * c.stage_bytes,
        c.epilogue_stages * epilogue_stage_bytes,
    )
    fixed_bytes = c.shared_memory_bytes - pipeline_bytes - epilogue_bytes

    def stages_beside(epilogue_stages: int) -> int:
        room = SHARED_MEMORY - fixed_bytes - epilogue_stages * epilogue_stage_bytes
        return max(1, min(_MOST_STAGES, room // c.stage_bytes))

    two, one = min(2, c.epilogue_subtiles), min(1, c.epilogue_subtiles)
    prefer_one = stages_beside(one) > stages_beside(two) and stages_beside(two) < 5
    epilogue_stages = one if prefer_one else two
    return replace(c, stages=stages_beside(epilogue_stages), epilogue_stages=epilogue_stages)


def _count(c: HopperConfig, call: _Call) -> int:
    """Returns the number of cluster tiles of a call."""
    M, N = (call.N, call.M) if c.swap_ab else (call.M, call.N)
    rows, columns = tile_order.cluster_tiles(c, M, N)
    return rows * columns * math.prod(call.problem.batch)


def _cycles(c: HopperConfig, call: _Call) -> float:
    """The model: returns the cycles of a call.

    Where weights stream from DRAM, these are the cycles that its CTAs would need if DRAM were not
    the limit. The call then takes longer the closer they come to what DRAM needs, so that the
    config with the fewest is still the best.
    """
    gpu, problem = call.gpu, call.problem
    waves = -(-_count(c, call) * c.split_k // clusters.at_once(gpu.sms, c.cluster))
    N_of_tiles = call.M if c.swap_ab else call.N
    tile_n = N_of_tiles / tile_order.columns(c, N_of_tiles) if c.variable_tile_n else c.tile_n
    products = 2 * c.tile_m * max(tile_n, 32) * problem.K / (REACHED * gpu.flops_per_clock)
    loads = _load_cycles(c, call, waves)
    # Products and loads overlap: the longer of the two counts, plus a little of the other.
    both: float = (products**3 + loads**3) ** (1 / 3)
    tile = both / (c.cluster_k * c.split_k) + TILE_CYCLES
    exchange = clusters.exchange(c.exchange_bytes) if c.cluster_k > 1 else 0.0
    if not call.dram_cycles:
        tile += exchange
    if c.split_k > 1:
        tile += REDUCE_CYCLES + c.tile_m * c.tile_n * 4 * c.split_k / REDUCE_BYTES
    if c.stages < 4:
        tile *= FEW_STAGES
    if c.consumers == 3:
        tile *= THREE_CONSUMERS
    if call.streams:
        together = clusters.TOGETHER if c.multicast_size > 1 else 0.0
        return together + waves * tile * (SHORT_REQUESTS if c.tile_k < 128 else 1.0)
    start = CALL_CYCLES + (clusters.TOGETHER if c.cluster > 1 else 0)
    if call.dram_cycles:  # partial sums are exchanged when all loads have ended
        loaded: float = ((waves * tile) ** 4 + call.dram_cycles**4) ** 0.25
        return start + loaded + exchange
    return start + waves * tile


def _promoted_cycles(c: HopperConfig, call: _Call) -> float:
    """The model where sums are promoted: returns the cycles of a call."""
    gpu, K = call.gpu, call.problem.K
    waves = -(-_count(c, call) * c.split_k // clusters.at_once(gpu.sms, c.cluster))
    products = 2 * c.tile_m * max(c.tile_n, 16) * c.tile_k / gpu.flops_per_clock
    stage_bytes = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * c.tile_k * 2
    steady = waves > 1 and min(call.M, call.N) > ONE_TILE
    rate = PROMOTED_STEADY_BYTES if steady else PROMOTED_BYTES
    stage = max(products + PROMOTED_STAGE_CYCLES, stage_bytes / rate)
    stages = -(-K // c.tile_k) / (c.cluster_k * c.split_k)
    sums = PROMOTED_SUM_CYCLES * c.tile_m * c.tile_n
    if c.epilogue_stages < min(2, c.epilogue_subtiles):
        sums *= 2  # each subtile waits until the one before has left
    tile = stages * stage + PROMOTED_TILE_CYCLES + sums
    if c.cluster_k > 1:
        tile += clusters.exchange(c.exchange_bytes)
    if c.split_k > 1:
        tile += REDUCE_CYCLES + c.tile_m * c.tile_n * 4 * c.split_k / REDUCE_BYTES
    operands = 2 * K * (call.M + call.N)
    dram = operands / gpu.dram_bytes_per_clock if operands > HELD * gpu.l2_bytes else 0.0
    together: float = ((waves * tile) ** 4 + dram**4) ** 0.25
    return CALL_CYCLES + (clusters.TOGETHER if c.cluster > 1 else 0) + together


def _load_cycles(c: HopperConfig, call: _Call, waves: int) -> float:
    """Returns the cycles in which the operands of a tile reach its SM."""
    gpc_local = waves == 1 and not c.split and not call.streams
    multicast_bytes = SPLIT_BYTES if waves == 1 else STEADY_BYTES
    if call.streams:
        multicast_bytes = STREAMED_BYTES
    lines_a, lines_b = call.cache_lines[::-1] if c.swap_ab else call.cache_lines
    if call.contiguous_columns[c.swap_ab]:
        lines_b = max(lines_b, operand_copies.lines_of_columns(c))
    cycles = 0.0
    for rows, multicast, lines_per_row in (
        (c.tile_m, c.cluster_n, lines_a),
        (c.tile_n, c.cluster_m, lines_b),
    ):
        if lines_per_row > 1:
            cycles += rows * lines_per_row / multicast / LINE_BYTES
        elif gpc_local:
            cycles += rows / GPC_LOCAL_BYTES
        else:
            cycles += rows / multicast / multicast_bytes
    return 2 * call.problem.K * cycles
