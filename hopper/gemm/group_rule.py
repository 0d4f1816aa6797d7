"""The config of a product of groups where none was tuned: the tile with the fewest cycles by a
simple model, for groups of equal size.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from outblas.call.fp8 import BLOCK
from outblas.call.grouped import FEW_ROWS, GroupedProblem
from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.group_variant import are_scales_wide, has_whole_halves, turns
from outblas.hopper.gemm.rule_cycles import REACHED, STEADY_BYTES, Rates
from outblas.hopper.gemm.rule_tiles import RuleTile, tiles_of
from outblas.hopper.gemm.scale_layout import GRANULE
from outblas.hopper.gemm.traits import CAPACITIES
from outblas.hopper.parts.config import SHARED_MEMORY, HopperConfig, stage_scales

_BASE = replace(Config(), k_serpentine=False, gpc_local=False, stagger="never")
# tile_m, consumers, cluster_m, cluster_n, swap_ab, tile_n
_TILES = (
    RuleTile(128, 2, 2, 1, False, 256),
    RuleTile(128, 2, 1, 2, False, 256),
    RuleTile(128, 2, 1, 1, False, 256),
    RuleTile(128, 2, 2, 1, False, 192),
    RuleTile(128, 2, 2, 1, False, 128),
    RuleTile(128, 2, 1, 1, False, 128),
    RuleTile(64, 1, 1, 1, False, 128),
    RuleTile(64, 1, 1, 1, False, 64),
)
# The same for scales that vary along K. Each consumer adds up 64 rows of a tile at a time.
_SCALED_TILES = (
    RuleTile(256, 2, 1, 2, False, 128),
    RuleTile(256, 2, 1, 1, False, 128),
    RuleTile(128, 2, 2, 1, False, 128),
    RuleTile(128, 2, 1, 1, False, 128),
    RuleTile(64, 1, 1, 1, False, 128),
    RuleTile(64, 1, 1, 1, False, 64),
)
# Of gated pairs whose halves have whole blocks of 128 columns. A stage sums one half after the
# other. 64 rows with as many columns were slower than 128×128, and nobody timed them where groups
# have few rows.
_SCALED_PAIRS = (
    RuleTile(128, 2, 1, 2, False, 256, mma_n=BLOCK),
    RuleTile(128, 2, 2, 1, False, 256, mma_n=BLOCK),
    RuleTile(128, 2, 1, 1, False, 256, mma_n=BLOCK),
)
LOADING_REGISTERS = 56  # of warps that copy
TMA_REGISTERS = 40  # of warps that only start TMA loads
_REGISTERS_OF_THREE = 504  # of a thread each of three warpgroups
# An estimate of the cycles between two tiles of a CTA: finding a group, the first load, the last
# store. The other constants of the model are those of `rule_cycles`.
_TILE_CYCLES = 1500.0
# The bytes of results that tiles of 64×128 with few terms write, by cycle and SM: a tile every
# 1,270 cycles. That is what the DRAM of an H100 takes, and less than that of an H200 does.
_SMALL_TILES_WRITE = 12.9
_DRAM_TAKES = 0.8  # of its peak, of results


def config_for(problem: GroupedProblem, rates: Rates) -> HopperConfig:
    """Returns the config of the fewest cycles. fp8 operands are in words, of which tensor cores
    multiply as many in a cycle as of 16-bit values.

    Where DRAM bounds the call, small tiles share the work more evenly: groups of few rows wait for
    the weights, sums of few terms for the results to be written. Measured on an H100; the DRAM of
    an H200 takes results faster than small tiles write them (WORKLOG.md).
    """
    problem = replace(problem, M=problem.expected_rows)
    configs = candidates(problem)
    small = [config for config in configs if config.tile_m == 64]
    if problem.form == "ragged_m" and problem.M / problem.groups <= FEW_ROWS:
        return _fastest(small, problem, rates)
    best = _fastest(configs, problem, rates)
    cycles, dram = _cycles(best, problem, rates)
    if problem.form == "ragged_m" or dram <= cycles:
        return best
    # Results wait for DRAM: small tiles where these write them as fast as DRAM takes them, else
    # large ones without a cluster, which follow the rows of the result.
    dram_rate = _DRAM_TAKES * rates.dram_bytes_per_clock / rates.sms
    if dram_rate <= _SMALL_TILES_WRITE or problem.scales is not None:
        return small[0]
    large = [config for config in configs if config.tile_m == 128 and config.cluster == 1]
    return replace(_fastest(large, problem, rates), order="row")


def candidates(problem: GroupedProblem) -> tuple[HopperConfig, ...]:
    """Returns the configs among which the rule chooses for a product, whose fp8 operands are in
    words.
    """
    if problem.scales is None:
        return _unscaled(problem.gathers)
    return _scaled(
        problem.scales.columns,
        problem.epilogue.gated,
        has_whole_halves(problem),
        are_scales_wide(problem),
        _loading_registers(problem),
    )


@functools.cache
def _unscaled(gathers: bool) -> tuple[HopperConfig, ...]:
    """Returns the candidates without scales. Gathered rows of a CTA are its own, so no cluster
    shares them, and one that shares B gains nothing (WORKLOG.md). The warps that gather need more
    registers than those that start TMA loads.
    """
    configs = map(tiles_of(_BASE).config, _TILES)
    if not gathers:
        return tuple(configs)
    return tuple(_with_loading_registers(c, LOADING_REGISTERS) for c in configs if c.cluster == 1)


@functools.cache
def _scaled(
    block_b: int, gated: bool, in_halves: bool, wide: bool, loading_registers: int
) -> tuple[HopperConfig, ...]:
    """Returns the candidates for scales that vary along K, of which `block_b` columns of B share
    one. They leave room for the sums of a stage, and for its scales. The warp that copies scales
    has `loading_registers`. Consumers with 128 rows have none left for the scales of both halves of
    gated pairs, and the warp has none for the addresses in a cluster where each column has a scale,
    unless TMA loads `wide` ones. `in_halves`: as `KernelTraits.whole_halves`.
    """
    most_rows = 128 if gated and block_b > 1 else 256
    configs = [tiles_of(_BASE).config(tile) for tile in _SCALED_TILES]
    if in_halves:
        configs = [c for c in configs if c.tile_m == 64]
        configs = [*map(tiles_of(_BASE).config, _SCALED_PAIRS), *configs]
    return tuple(
        _with_room_for_scales(_with_loading_registers(c, loading_registers), block_b)
        for c in configs
        if c.tile_m <= most_rows
        and (wide or not (c.tile_m == 256 and c.cluster > 1 and block_b == 1))
    )


def _loading_registers(problem: GroupedProblem) -> int:
    """Returns how many registers a thread has that copies scales. Where each column has one, the
    addresses of 256 rows and 128 columns need 64, unless an epilogue leaves none for them: measured
    by what ptxas spills.
    """
    epilogue = problem.epilogue
    adds = epilogue.bias is not None or epilogue.residual is not None
    if problem.form != "ragged_k":
        return LOADING_REGISTERS
    if are_scales_wide(problem):
        return TMA_REGISTERS
    frees = adds or (problem.out_dtype.itemsize == 2 and not epilogue.gated)
    return 64 if frees else LOADING_REGISTERS


def _with_loading_registers(config: HopperConfig, registers: int) -> HopperConfig:
    """Returns the config with registers for warps that copy more than they start TMA loads, of
    which two consumers leave so many.
    """
    if not config.producer_registers:
        return config
    consumer_registers = (_REGISTERS_OF_THREE - registers) // 2 // 8 * 8
    return replace(config, producer_registers=registers, consumer_registers=consumer_registers)


def _with_room_for_scales(config: HopperConfig, block_b: int) -> HopperConfig:
    """Returns the config with as many stages as fit beside their scales and the schedule. Where few
    fit, another stage is worth more than an epilogue stage, as in `rule_tiles.filled`.
    """
    most = SHARED_MEMORY - 4 * CAPACITIES[-1]
    while True:
        scales = 4 * config.stages * (stage_scales(config, block_b) + GRANULE)
        if config.shared_memory_bytes + scales <= most:
            return config
        if config.stages < 5 and config.epilogue_stages > 1:
            config = replace(config, epilogue_stages=1)
        else:
            config = replace(config, stages=config.stages - 1)


def _fastest(
    configs: Sequence[HopperConfig], problem: GroupedProblem, rates: Rates
) -> HopperConfig:
    """Returns the config of the fewest cycles; loads from DRAM overlap with products."""

    def cycles(config: HopperConfig) -> float:
        computing, dram = _cycles(config, problem, rates)
        return float((computing**4 + dram**4) ** 0.25)

    return min(configs, key=cycles)


def _cycles(config: HopperConfig, problem: GroupedProblem, rates: Rates) -> tuple[float, float]:
    """Returns the cycles of the SMs, and those of DRAM, for groups of equal size."""
    M, N, K, groups = problem.M, problem.N, problem.K, problem.groups
    epilogue = problem.epilogue
    # The columns of all matrices that lie as the result does.
    results = problem.columns * (1 if epilogue.residual is None else 2)
    results += 0 if epilogue.aux is None else N
    together = 1 if turns(problem, config) else config.cluster_m  # tile rows that are used or not
    rows = config.tile_m * together
    if problem.form == "ragged_m":
        groups = min(groups, max(M, 1))
        # A group ends in the middle of a tile on average.
        mean = M / groups
        tile_rows = groups * (1.0 if mean <= rows else mean / rows + 0.5)
        moved, depth = M * K + groups * K * N + M * results, float(K)
    else:
        tile_rows = groups * math.ceil(M / rows)
        moved, depth = (M + N) * K + groups * M * results, K / groups + config.tile_k / 2
    columns = config.tile_n * config.cluster_n
    tiles = tile_rows * together * math.ceil(N / columns) * config.cluster_n
    products = 2 * config.tile_m * config.tile_n * depth / (REACHED * 4096)
    own_rows = config.tile_m / config.cluster_n + config.tile_n / config.cluster_m
    loads = 2 * own_rows * depth / STEADY_BYTES
    tile = (products**3 + loads**3) ** (1 / 3) + _TILE_CYCLES
    dram = 2 * moved / rates.dram_bytes_per_clock
    return math.ceil(tiles / rates.sms) * tile, dram
