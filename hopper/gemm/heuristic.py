"""The default config of `hopper.gemm` where none was tuned. Among some tiles, clusters and
partitions of K, it picks the one whose waves cost the fewest cycles by a simple model.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from outblas.call import fp8
from outblas.call.default_kernel import rows_of_choice
from outblas.call.epilogue import NONE
from outblas.call.problem import Problem, with_row_major_output
from outblas.device import clusters, l2
from outblas.hopper.gemm import operand_copies
from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.rule_cycles import (
    FEW,
    HELD,
    ONE_TILE,
    QUANTIZE_CYCLES,
    ConfigCycles,
    ModelCall,
)
from outblas.hopper.gemm.rule_cycles import Rates as Rates
from outblas.hopper.gemm.rule_cycles import rates as rates
from outblas.hopper.gemm.rule_tiles import (
    CLUSTER_K,
    RuleTile,
    Tiles,
    fixed_tiles,
    streaming_tiles,
    tiles_of,
)
from outblas.hopper.gemm.scale_layout import are_all_wide
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.config_limits import block_scaled_reason, gated_reason, quantized_reason

Keys = frozenset[HopperConfig]

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
    (64, 1, 2, 1, True, (64, 32)),
    (128, 2, 1, 1, True, (64, 32, 16)),
    (128, 2, 2, 1, True, (64, 32)),
    (192, 3, 1, 1, True, (32, 16)),
)
# Where a stage sums one half of gated pairs after the other, 128 columns each. Those that become
# outputs in fp8 all do: 128 columns of them share a scale. tile_m, consumers, cluster_m, cluster_n.
# To the model 2×1 and 1×2 are alike; the first is 3% to 5% faster from 1,024 rows on (WORKLOG.md).
_PROMOTED_PAIRS = ((128, 2, 2, 1), (128, 2, 1, 2), (128, 2, 1, 1), (64, 1, 2, 1), (64, 1, 1, 1))
_FEWEST_K_TILES = 4  # minimum k tiles per CTA
_ENOUGH_STAGES = 3  # of k tiles of 128 terms, for weights that come from DRAM
_IN_ONE_ORDER = replace(Config(), k_serpentine=False)
_ANY = torch.device("meta")  # the config depends on no device
_ENOUGH_PROMOTED = 5  # stages; more are worth less than another epilogue stage


def config(problem: Problem, gpu: Rates, keys: Keys | None = None) -> HopperConfig:
    """Returns the config for a problem on a GPU with these rates. `keys`: the compile keys of the
    configs to choose from, None for all. Raises ValueError where none of them takes the problem.

    A batch-invariant product processes K in one order. The heuristic may still choose tiles and
    their shape by M, because they do not change bits.
    """
    # The same for a call as for its workload, for which a lookup asks first.
    epilogue = problem.epilogue if problem.formats or problem.epilogue.gated else NONE
    alike = replace(
        problem,
        M=problem.M if _is_alone(problem) else rows_of_choice(problem.M),
        device=_ANY,
        c=None,
        alignment=problem.alignment[:3],
        scaled=False,
        epilogue=epilogue,
    )
    return _best(alike, gpu, keys)[1]


def _is_alone(problem: Problem) -> bool:
    """Returns whether a config suits one number of rows, as those of a batch do; whether TMA can
    load scales of blocks depends on the number.
    """
    return bool(problem.batch or (problem.formats and fp8.formats(problem.formats).block_a))


def quantizes(problem: Problem, gpu: Rates) -> bool:
    """Returns whether a C in fp8 with scales costs fewer cycles than one in fp32 and a pass that
    quantizes it, which reads four bytes of each element and writes one.
    """
    wide = _best(unquantized(problem), gpu)[0]
    quantized = QUANTIZE_CYCLES + 5 * problem.M * problem.N / gpu.dram_bytes_per_clock
    return _best(problem, gpu)[0] <= wide + quantized


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


@functools.lru_cache(maxsize=512)
def _best(problem: Problem, gpu: Rates, keys: Keys | None = None) -> tuple[float, HopperConfig]:
    """Returns the config of the fewest cycles, and how many these are."""
    call = call_of(problem, gpu)
    fewest, best = math.inf, None
    cycles = cycles_in(call)
    for candidate in candidates(call):
        if keys is None or candidate.key in keys:
            needed = cycles(candidate, call, fewest)
            if needed < fewest:
                fewest, best = needed, candidate.config
    if best is None:
        raise ValueError("no config of the rule takes this problem")
    return fewest, best


def cycles_in(call: ModelCall) -> Callable[[ConfigCycles, ModelCall, float], float]:
    """Returns the function of `ConfigCycles` that models a call."""
    formats = call.problem.formats
    promoted = bool(formats) and fp8.formats(formats).promoted
    return ConfigCycles.promoted_cycles if promoted else ConfigCycles.cycles


def candidates(call: ModelCall) -> Iterator[ConfigCycles]:
    """Returns the configs that may suit a call."""
    problem = call.problem
    tiles = tiles_of(_IN_ONE_ORDER if problem.batch_invariant else Config())
    formats = fp8.formats(problem.formats) if problem.formats else None
    promoted = formats is not None and formats.promoted
    suited = _promoted_candidates(call, tiles) if promoted else _candidates(call, tiles)
    if problem.epilogue.gated:
        in_halves = sums_halves(problem)
        suited = (c for c in suited if gated_reason(c.config, in_halves) is None)
    if formats is not None and formats.block_a:
        suited = _with_scales(call, formats, suited)
    if problem.epilogue.scale_out:
        gated = problem.epilogue.gated
        suited = (c for c in suited if quantized_reason(c.config, gated) is None)
    return suited


def call_of(problem: Problem, gpu: Rates) -> ModelCall:
    """Returns the call that a problem is for the model."""
    problem = operand_copies.aligned(problem)
    row_major = with_row_major_output(problem)[0]
    return ModelCall(
        problem,
        row_major.M,
        row_major.columns,
        math.prod(problem.batch),
        l2.lines(row_major),
        operand_copies.contiguous_columns(problem),
        gpu,
        *_dram_bound(row_major, gpu),
    )


def _with_scales(
    call: ModelCall, formats: fp8.Formats, candidates: Iterator[ConfigCycles]
) -> Iterator[ConfigCycles]:
    """Yields the candidates that can take scales: those whose threads have registers for them, with
    fewer stages, or one epilogue stage, where scales need the memory.
    """
    _, swapped = with_row_major_output(call.problem)
    loaded = formats.block_a == formats.block_b == 1 and are_all_wide(call.problem)
    for candidate in candidates:
        c = candidate.config
        block_b = formats.block_a if c.swap_ab != swapped else formats.block_b
        if call.problem.epilogue.gated and not c.mma_n:
            if c.tile_m * c.tile_n > 128 * 128:
                continue  # each half has scales of its own
            half = c.tile_n // 2
            if block_b > 1 and sums_halves(call.problem) and half % fp8.BLOCK and fp8.BLOCK % half:
                continue  # halves of other widths need a select for each column
        copied = block_b == 1 and not loaded
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
                yield candidate if config is candidate.config else ConfigCycles(config)
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
    loads = operands / gpu.dram_bytes_per_clock
    bounds = operands > HELD * gpu.l2_bytes and loads > products
    rows = min(M, N)
    return bounds and rows <= FEW, loads if bounds and FEW < rows <= ONE_TILE else 0.0


def _candidates(call: ModelCall, tiles: Tiles) -> Iterator[ConfigCycles]:
    problem, M, N = call.problem, call.M, call.N
    any_column = swaps_of_any_column(problem)[:1]
    # Two CTAs for every tile, the largest of which has 128 × 256 outputs, must have an SM each.
    divides = 2 * M * N * call.matrices <= 128 * 256 * call.gpu.sms
    for tile in fixed_tiles(min(M, N) <= FEW, any_column == [True]):
        deep = _with_deep_k_tiles(tile, tiles, call)
        yield tiles.model(deep)
        if divides and not problem.batch_invariant:
            yield from _partitioned(deep, tiles, call, CLUSTER_K)
    if call.streams:
        yield from _streaming_candidates(call, tiles)
        return
    if call.dram_cycles:
        yield from _whole_width_candidates(call, tiles)
    if M * N * math.prod(problem.batch) > 128**2 * call.gpu.sms // 2:
        for swap in any_column:
            gated = problem.epilogue.gated
            yield from tiles.variable(swap, gated, gated and sums_halves(problem))


def _streaming_candidates(call: ModelCall, tiles: Tiles) -> Iterator[ConfigCycles]:
    few_rows = call.M <= call.N
    problem = with_row_major_output(call.problem)[0]
    weights_along_k = problem.b[-2] == 1 if few_rows else problem.a[-1] == 1
    for tile, beyond in streaming_tiles(few_rows, weights_along_k):
        if beyond < min(call.M, call.N):
            deep = _with_deep_k_tiles(tile, tiles, call)
            yield tiles.model(deep)
            if not call.problem.batch_invariant and tile.cluster_m * tile.cluster_n == 1:
                yield from _partitioned(deep, tiles, call, CLUSTER_K[:1])


def _promoted_candidates(call: ModelCall, tiles: Tiles) -> Iterator[ConfigCycles]:
    pairs = [RuleTile(*shape, False, 2 * fp8.BLOCK, mma_n=fp8.BLOCK) for shape in _PROMOTED_PAIRS]
    if call.problem.epilogue.scale_out and call.problem.epilogue.gated:
        yield from map(tiles.model, pairs)
        return
    for tile_m, consumers, cluster_m, cluster_n, swap, widths in _PROMOTED_TILES:
        if swap and min(call.M, call.N) > FEW:
            continue
        for width in widths:
            tile = RuleTile(tile_m, consumers, cluster_m, cluster_n, swap, width)
            yield tiles.model(tile)
            if not call.problem.batch_invariant and tile_m * width <= 128 * 128:
                yield from _partitioned(tile, tiles, call, CLUSTER_K[:2])
    if sums_halves(call.problem):
        yield from map(tiles.model, pairs)


def _whole_width_candidates(call: ModelCall, tiles: Tiles) -> Iterator[ConfigCycles]:
    """Yields tiles that have all rows of the few as their columns, so that one CTA loads each
    weight.
    """
    width = -(-min(call.M, call.N) // 16) * 16
    for tile_m, consumers in ((64, 1), (128, 2)):
        tile = RuleTile(tile_m, consumers, 1, 1, call.M <= call.N, width)
        deep = tile._replace(tile_k=128)
        if tiles.config(deep).stages >= _ENOUGH_STAGES:
            tile = deep
        yield tiles.model(tile)
        if not call.problem.batch_invariant:
            yield from _partitioned(tile, tiles, call, CLUSTER_K[:1])


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
    tile: RuleTile, tiles: Tiles, call: ModelCall, cluster_ks: tuple[int, ...]
) -> Iterator[ConfigCycles]:
    """Yields the config of a tile with partitions of K, where its tiles leave SMs without work."""
    c, K, sms = tiles.model(tile), call.problem.K, call.gpu.sms
    count, tile_k = c.cluster_tiles(call), c.config.tile_k
    if count > 1 and 2 * count * c.cluster > sms:
        return  # no two partitions of every tile would run at a time
    for cluster_k, partitioned in tiles.partitions(tile):
        possible = cluster_k in cluster_ks and cluster_k * _FEWEST_K_TILES * tile_k <= K
        if possible and clusters.at_once(sms, partitioned.cluster) >= count:
            yield partitioned
    split_k = min(sms // (count * c.cluster), K // (8 * tile_k), 32)
    if split_k > max(CLUSTER_K):
        yield tiles.model(tile._replace(split_k=split_k))


def _with_deep_k_tiles(tile: RuleTile, tiles: Tiles, call: ModelCall) -> RuleTile:
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
