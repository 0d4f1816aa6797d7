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
from ...core.epilogue import NONE
from ...core.problem import Problem, with_row_major_output
from ...device import clusters, l2
from ..core.config import (
    SHARED_MEMORY,
    SUBTILE_BYTES,
    HopperConfig,
    block_scaled_reason,
    gated_reason,
    quantized_reason,
)
from . import operand_copies
from .rule_cycles import FEW, HELD, ONE_TILE, QUANTIZE_CYCLES, Call, ConfigCycles, VariableWidths
from .rule_cycles import Rates as Rates
from .rule_cycles import rates as rates
from .scale_layout import are_all_wide

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
    (64, 1, 2, 1, True, (64, 32)),
    (128, 2, 1, 1, True, (64, 32, 16)),
    (128, 2, 2, 1, True, (64, 32)),
    (192, 3, 1, 1, True, (32, 16)),
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
_ANY = torch.device("meta")  # the config depends on no device
_ENOUGH_PROMOTED = 5  # stages; more are worth less than another epilogue stage


def config(problem: Problem, gpu: Rates, base: HopperConfig) -> HopperConfig:
    """Returns the config for a problem on a GPU with these rates. `base` provides the fields that
    the heuristic does not set.

    A batch-invariant product processes K in one order. The heuristic may still choose tiles and
    their shape by M, because they do not change bits.
    """
    # The same for a call as for its workload, for which a lookup asks first.
    epilogue = problem.epilogue if problem.formats or problem.epilogue.gated else NONE
    alike = replace(
        problem,
        device=_ANY,
        c=None,
        alignment=problem.alignment[:3],
        scaled=False,
        epilogue=epilogue,
    )
    return _config(alike, gpu, base)


@functools.lru_cache(maxsize=512)
def _config(problem: Problem, gpu: Rates, base: HopperConfig) -> HopperConfig:
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
    call = _call_of(problem, gpu)
    problem = call.problem
    if problem.batch_invariant:
        base = replace(base, k_serpentine=False)
    tiles, formats = _tiles_of(base), fp8.formats(problem.formats) if problem.formats else None
    promoted = formats is not None and formats.promoted
    candidates = _promoted_candidates(call, tiles) if promoted else _candidates(call, tiles)
    if problem.epilogue.gated:
        in_halves = sums_halves(problem)
        candidates = (c for c in candidates if gated_reason(c.config, in_halves) is None)
    if formats is not None and formats.block_a:
        candidates = _with_scales(call, formats, candidates)
    if problem.epilogue.scale_out:
        gated = problem.epilogue.gated
        candidates = (c for c in candidates if quantized_reason(c.config, gated) is None)
    cycles = ConfigCycles.promoted_cycles if promoted else ConfigCycles.cycles
    fewest, best = math.inf, base
    for candidate in candidates:
        found = cycles(candidate, call, fewest)
        if found < fewest:
            fewest, best = found, candidate.config
    if fewest == math.inf:
        raise ValueError("no config of the rule takes this problem")
    return fewest, best


def _call_of(problem: Problem, gpu: Rates) -> Call:
    """Returns the call that a problem is for the model."""
    problem = operand_copies.aligned(problem)
    row_major = with_row_major_output(problem)[0]
    return Call(
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
    call: Call, formats: fp8.Formats, candidates: Iterator[ConfigCycles]
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
    split_k: int = 1


def _fixed_tiles() -> Iterator[_Tile]:
    for tile_m, consumers, cluster_m, cluster_n, swap, widths in _TILES:
        for width in widths:
            yield _Tile(tile_m, consumers, cluster_m, cluster_n, swap, width)


def _streaming_tiles(few_rows: bool, weights_along_k: bool) -> Iterator[tuple[_Tile, int]]:
    for kind, (cluster_m, cluster_n) in product(_STREAMING_TILES, _STREAMING_CLUSTERS):
        tile_m, consumers, few_are_columns, widths = kind
        for width in widths:
            whole_lines = few_are_columns or weights_along_k or width % 64 == 0
            if whole_lines and width % (16 * cluster_m) == 0:
                swap = few_are_columns == few_rows
                along_few, side = (cluster_n, width) if few_are_columns else (cluster_m, tile_m)
                tile = _Tile(tile_m, consumers, cluster_m, cluster_n, swap, width)
                yield tile, (along_few - 1) * side


class _Tiles:
    """The filled configs of tiles beside one base config. A planned call looks at a hundred of
    them, and making one takes longer than judging it, so they are kept.
    """

    def __init__(self, base: HopperConfig) -> None:
        self.base = base
        self._made: dict[_Tile, ConfigCycles] = {}
        self._deep: dict[_Tile, _Tile] = {}
        self._partitions: dict[_Tile, list[tuple[int, ConfigCycles]]] = {}
        self._variable: dict[tuple[bool, bool, bool], VariableWidths] = {}
        self._fixed: dict[tuple[bool, bool], list[_Tile]] = {}
        self._streaming: dict[tuple[bool, bool], list[tuple[_Tile, int]]] = {}

    def variable(self, swap: bool, gated: bool, in_halves: bool) -> VariableWidths:
        """Returns the configs of tiles of variable width, with this `swap_ab`. `gated`: those that
        can take gated pairs, also `in_halves`.
        """
        key = swap, gated, in_halves
        if key not in self._variable:
            models = [
                self.model(_Tile(tile_m, consumers, cluster_m, cluster_n, swap, width, True))
                for tile_m, consumers, cluster_m, cluster_n, widths in _VARIABLE_N_TILES
                for width in widths
            ]
            if gated:
                models = [c for c in models if gated_reason(c.config, in_halves) is None]
            self._variable[key] = VariableWidths(models, swap)
        return self._variable[key]

    def fixed(self, few: bool, swaps_odd_widths: bool) -> list[_Tile]:
        """Returns the tiles of `_TILES`, for `few` rows or columns also those that exchange the
        operands. `swaps_odd_widths`: so do those that begin inside of 64 columns.
        """
        key = few, swaps_odd_widths
        if key not in self._fixed:
            self._fixed[key] = [
                tile._replace(swap_ab=tile.swap_ab or (swaps_odd_widths and tile.tile_n % 64 > 0))
                for tile in _fixed_tiles()
                if few or not tile.swap_ab
            ]
        return self._fixed[key]

    def streaming(self, few_rows: bool, weights_along_k: bool) -> list[tuple[_Tile, int]]:
        """Returns the tiles of `_STREAMING_TILES`, each with the rows or columns that the few must
        be more than, because a cluster along them needs two tiles there. `few_rows`: the few are
        rows of C.
        """
        key = few_rows, weights_along_k
        if key not in self._streaming:
            self._streaming[key] = list(_streaming_tiles(few_rows, weights_along_k))
        return self._streaming[key]

    def config(self, tile: _Tile) -> HopperConfig:
        """Returns the filled config of a tile."""
        return self.model(tile).config

    def model(self, tile: _Tile) -> ConfigCycles:
        """Returns the filled config of a tile in the model."""
        found = self._made.get(tile)
        if found is None:
            base = self.base
            config = replace(
                shaped(base, *tile[:4]),
                swap_ab=tile.swap_ab,
                tile_n=tile.tile_n,
                variable_tile_n=tile.variable_tile_n,
                tile_k=tile.tile_k or base.tile_k,
                cluster_k=tile.cluster_k,
                mma_n=tile.mma_n or base.mma_n,
                split_k=tile.split_k,
                k_serpentine=base.k_serpentine and tile.split_k == 1,
            )
            found = self._made[tile] = ConfigCycles(filled(config))
        return found

    def deep(self, tile: _Tile) -> _Tile:
        """Returns the tile with k tiles of 128 terms."""
        found = self._deep.get(tile)
        if found is None:
            found = self._deep[tile] = tile._replace(tile_k=128)
        return found

    def partitions(self, tile: _Tile) -> list[tuple[int, ConfigCycles]]:
        """Returns the numbers of CTAs of a cluster that can divide K, each with its config."""
        found = self._partitions.get(tile)
        if found is None:
            of_tile = self.model(tile)
            found = self._partitions[tile] = [
                (cluster_k, self.model(tile._replace(cluster_k=cluster_k)))
                for cluster_k in _CLUSTER_K
                if of_tile.cluster * cluster_k <= 8 and tile.tile_n % (8 * cluster_k) == 0
            ]
        return found


_tiles_of = functools.lru_cache(maxsize=16)(_Tiles)


def _candidates(call: Call, tiles: _Tiles) -> Iterator[ConfigCycles]:
    problem, M, N = call.problem, call.M, call.N
    any_column = swaps_of_any_column(problem)[:1]
    # Two CTAs for every tile, the largest of which has 128 × 256 outputs, must have an SM each.
    divides = 2 * M * N * call.matrices <= 128 * 256 * call.gpu.sms
    for tile in tiles.fixed(min(M, N) <= FEW, any_column == [True]):
        deep = _with_deep_k_tiles(tile, tiles, call)
        yield tiles.model(deep)
        if divides and not problem.batch_invariant:
            yield from _partitioned(deep, tiles, call, _CLUSTER_K)
    if call.streams:
        yield from _streaming_candidates(call, tiles)
        return
    if call.dram_cycles:
        yield from _whole_width_candidates(call, tiles)
    if M * N * math.prod(problem.batch) > 128**2 * call.gpu.sms // 2:
        for swap in any_column:
            gated = problem.epilogue.gated
            variable = tiles.variable(swap, gated, gated and sums_halves(problem))
            # fp8 operands may need configs with fewer stages, whose order is another.
            yield from variable.models if problem.formats else variable.fastest(call)


def _streaming_candidates(call: Call, tiles: _Tiles) -> Iterator[ConfigCycles]:
    few_rows = call.M <= call.N
    problem = with_row_major_output(call.problem)[0]
    weights_along_k = problem.b[-2] == 1 if few_rows else problem.a[-1] == 1
    for tile, beyond in tiles.streaming(few_rows, weights_along_k):
        if beyond < min(call.M, call.N):
            deep = _with_deep_k_tiles(tile, tiles, call)
            yield tiles.model(deep)
            if not call.problem.batch_invariant and tile.cluster_m * tile.cluster_n == 1:
                yield from _partitioned(deep, tiles, call, _CLUSTER_K[:1])


def _promoted_candidates(call: Call, tiles: _Tiles) -> Iterator[ConfigCycles]:
    pairs = [_Tile(*shape, False, 2 * fp8.BLOCK, mma_n=fp8.BLOCK) for shape in _PROMOTED_PAIRS]
    if call.problem.epilogue.scale_out and call.problem.epilogue.gated:
        yield from map(tiles.model, pairs)
        return
    for tile_m, consumers, cluster_m, cluster_n, swap, widths in _PROMOTED_TILES:
        if swap and min(call.M, call.N) > FEW:
            continue
        for width in widths:
            tile = _Tile(tile_m, consumers, cluster_m, cluster_n, swap, width)
            yield tiles.model(tile)
            if not call.problem.batch_invariant and tile_m * width <= 128 * 128:
                yield from _partitioned(tile, tiles, call, _CLUSTER_K[:2])
    if sums_halves(call.problem):
        yield from map(tiles.model, pairs)


def _whole_width_candidates(call: Call, tiles: _Tiles) -> Iterator[ConfigCycles]:
    """Yields tiles that have all rows of the few as their columns, so that one CTA loads each
    weight.
    """
    width = -(-min(call.M, call.N) // 16) * 16
    for tile_m, consumers in ((64, 1), (128, 2)):
        tile = _Tile(tile_m, consumers, 1, 1, call.M <= call.N, width)
        deep = tile._replace(tile_k=128)
        if tiles.config(deep).stages >= _ENOUGH_STAGES:
            tile = deep
        yield tiles.model(tile)
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
    tile: _Tile, tiles: _Tiles, call: Call, cluster_ks: tuple[int, ...]
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
    if split_k > max(_CLUSTER_K):
        yield tiles.model(tile._replace(split_k=split_k))


def _with_deep_k_tiles(tile: _Tile, tiles: _Tiles, call: Call) -> _Tile:
    """Gives small tiles k tiles of 128 terms, which halves the number of loads and barriers. Tiles
    of weights from DRAM get them where enough stages fit, because longer parts of rows arrive
    faster.
    """
    if call.problem.K < 8 * 128 or "promoted" in call.problem.formats:
        return tile
    deep = tiles.deep(tile)
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
