"""The default config of `hopper.gemm` where none was tuned. Among some tiles, clusters and
partitions of K, it picks the one whose waves cost the fewest cycles by a simple model.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ...core.problem import Problem, with_row_major_output
from ...device import clusters, l2
from ..core import tile_order
from ..core.config import SHARED_MEMORY, SUBTILE_BYTES, HopperConfig, gated_reason, promoted_reason
from . import operand_copies

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
MISALIGNED_BYTES = 30.0  # for rows that begin inside cache lines: twice the requests, not merged
SM_FLOPS_PER_CLOCK = 4096  # Hopper's tensor cores with 16-bit operands; an H20 has a quarter
REACHED = 0.97  # the fraction of that rate that a tile reaches
FEW_STAGES = 1.05  # factor for tiles that fewer than four stages feed
THREE_CONSUMERS = 1.03  # factor for tiles of three consumers

# tile_m, consumers, cluster_m, cluster_n, swap, and widths. Pingpong is left to tuning.
_TILES = (
    (64, 1, 1, 1, False, (128, 96, 64, 48)),
    (64, 1, 2, 1, False, (128, 64, 32)),
    (128, 2, 2, 1, False, (256, 192, 128, 64)),
    (128, 2, 1, 1, False, (256, 128, 64)),
    (64, 1, 1, 1, True, (64, 32, 16)),
)
# tile_m, consumers, cluster_m, cluster_n, widths
_VARIABLE_N_TILES = (
    (64, 1, 1, 1, range(256, 87, -8)),
    (128, 2, 2, 1, range(256, 135, -8)),
    (128, 2, 1, 1, range(256, 87, -8)),
    (192, 3, 1, 1, range(192, 87, -8)),
    (192, 3, 1, 2, range(192, 135, -8)),
    (256, 2, 1, 2, range(200, 127, -8)),
)
# Registers for setmaxnreg, for numbers of consumers that need other values than the base config.
_REGISTERS = {1: (0, 0), 3: (32, 160)}
_CLUSTER_K = (2, 4, 8)  # CTAs of a cluster that divide K
_FEWEST_K_TILES = 4  # minimum k tiles per CTA
_MOST_STAGES = 16
FEW = 64  # this few rows or columns may be faster as columns of the tile


class _Gpu(NamedTuple):
    """A GPU in the model: its SMs, and the FLOP of one SM per cycle."""

    sms: int
    flop_per_cycle: float


@functools.lru_cache(maxsize=512)
def config(
    problem: Problem, sms: int, base: HopperConfig, sm_flops_per_clock: int = SM_FLOPS_PER_CLOCK
) -> HopperConfig:
    """Returns the config for a problem on a GPU with `sms` SMs, each with a rate of
    `sm_flops_per_clock` on 16-bit operands. `base` provides the fields that the heuristic does not
    set.

    A batch-invariant product processes K in one order. The heuristic may still choose tiles and
    their shape by M, because they do not change bits.
    """
    problem = operand_copies.aligned(problem)
    row_major = with_row_major_output(problem)[0]
    M, N, cache_lines = row_major.M, row_major.columns, l2.lines(row_major)
    if problem.batch_invariant:
        base = replace(base, k_serpentine=False)
    candidates = _candidates(problem, M, N, sms, base)
    if problem.epilogue.gated:
        candidates = (c for c in candidates if gated_reason(c) is None)
    if "promoted" in problem.formats:
        candidates = (c for c in candidates if promoted_reason(c) is None)
    gpu = _Gpu(sms, REACHED * sm_flops_per_clock)
    return min(candidates, key=lambda c: _cycles(c, M, N, problem, gpu, cache_lines))


def _candidates(
    problem: Problem, M: int, N: int, sms: int, base: HopperConfig
) -> Iterator[HopperConfig]:
    any_column = swaps_of_any_column(problem)[:1]
    for tile_m, consumers, cluster_m, cluster_n, swap, widths in _TILES:
        if swap and min(M, N) > FEW:
            continue
        shape = shaped(base, tile_m, consumers, cluster_m, cluster_n)
        for width in widths:
            swapped = swap or (any_column == [True] and width % 64 > 0)
            c = _with_deep_k_tiles(replace(shape, tile_n=width, swap_ab=swapped), problem)
            yield filled(c)
            if not problem.batch_invariant:
                yield from _partitioned(c, problem, _tiles(c, M, N, problem), sms)
    if M * N * math.prod(problem.batch) > 128**2 * sms // 2:
        for (*tile, widths_of_tile), swap in product(_VARIABLE_N_TILES, any_column):
            c = replace(shaped(base, *tile), swap_ab=swap, variable_tile_n=True)
            yield from (filled(replace(c, tile_n=width)) for width in widths_of_tile)


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


def _partitioned(c: HopperConfig, problem: Problem, tiles: int, sms: int) -> Iterator[HopperConfig]:
    """Yields the config with partitions of K, where its tiles leave SMs without work."""
    for cluster_k in _CLUSTER_K:
        cut = replace(c, cluster_k=cluster_k)
        possible = (
            cut.cluster <= 8
            and c.tile_n % (8 * cluster_k) == 0
            and cluster_k * _FEWEST_K_TILES * c.tile_k <= problem.K
        )
        if possible and clusters.at_once(sms, cut.cluster) >= tiles:
            yield filled(cut)
    split_k = min(sms // (tiles * c.cluster), problem.K // (8 * c.tile_k), 32)
    if split_k > max(_CLUSTER_K):
        yield filled(replace(c, split_k=split_k, k_serpentine=False))


def _with_deep_k_tiles(c: HopperConfig, problem: Problem) -> HopperConfig:
    """Gives small tiles k tiles of 128 terms, which halves the number of loads and barriers."""
    small = c.tile_m * c.tile_n < 64 * 128 and c.multicast_size == 1
    deep = small and problem.K >= 8 * 128 and "promoted" not in problem.formats
    return replace(c, tile_k=128) if deep else c


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


def _tiles(c: HopperConfig, M: int, N: int, problem: Problem) -> int:
    """Returns the cluster tiles of a call."""
    if c.swap_ab:
        M, N = N, M
    rows, columns = tile_order.cluster_tiles(c, M, N)
    return rows * columns * math.prod(problem.batch)


def _cycles(
    c: HopperConfig, M: int, N: int, problem: Problem, gpu: _Gpu, cache_lines: tuple[int, int]
) -> float:
    """The model: returns the cycles of a call C[M, N] whose A and B take `cache_lines` cache lines
    per 128 bytes of a row (`l2.lines`).
    """
    waves = -(-_tiles(c, M, N, problem) * c.split_k // clusters.at_once(gpu.sms, c.cluster))
    N_of_tiles = M if c.swap_ab else N
    tile_n = N_of_tiles / tile_order.columns(c, N_of_tiles) if c.variable_tile_n else c.tile_n
    products = 2 * c.tile_m * max(tile_n, 32) * problem.K / gpu.flop_per_cycle
    loads = _load_cycles(c, problem, waves, cache_lines[::-1] if c.swap_ab else cache_lines)
    # Products and loads overlap: the longer of the two counts, plus a little of the other.
    both: float = (products**3 + loads**3) ** (1 / 3)
    tile = both / (c.cluster_k * c.split_k) + TILE_CYCLES
    if c.cluster_k > 1:
        tile += clusters.exchange(c.exchange_bytes)
    if c.split_k > 1:
        tile += REDUCE_CYCLES + c.tile_m * c.tile_n * 4 * c.split_k / REDUCE_BYTES
    if c.stages < 4:
        tile *= FEW_STAGES
    if c.consumers == 3:
        tile *= THREE_CONSUMERS
    return CALL_CYCLES + (clusters.TOGETHER if c.cluster > 1 else 0) + waves * tile


def _load_cycles(
    c: HopperConfig, problem: Problem, waves: int, cache_lines: tuple[int, int]
) -> float:
    """Returns the cycles in which the operands of a tile reach its SM. `cache_lines` are those of
    the kernel's A and B.
    """
    gpc_local = waves == 1 and not c.split
    multicast_bytes = SPLIT_BYTES if waves == 1 else STEADY_BYTES
    cycles = 0.0
    for rows, multicast, lines_per_row in (
        (c.tile_m, c.cluster_n, cache_lines[0]),
        (c.tile_n, c.cluster_m, cache_lines[1]),
    ):
        if lines_per_row > 1:
            cycles += rows / multicast / MISALIGNED_BYTES
        elif gpc_local:
            cycles += rows / GPC_LOCAL_BYTES
        else:
            cycles += rows / multicast / multicast_bytes
    return 2 * problem.K * cycles
