"""The tiles among which the rule of `hopper.gemm` chooses, and their filled configs."""

import functools
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from outblas.hopper.gemm.rule_cycles import ConfigCycles
from outblas.hopper.parts.config import SHARED_MEMORY, SUBTILE_BYTES, HopperConfig
from outblas.hopper.parts.config_limits import gated_reason

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
# Registers for setmaxnreg, for numbers of consumers that need other values than the base config.
_REGISTERS = {1: (0, 0), 3: (32, 160)}
CLUSTER_K = (2, 4, 8)  # CTAs of a cluster that divide K
_MOST_STAGES = 16


class RuleTile(NamedTuple):
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


class Tiles:
    """The filled configs of tiles beside one base config. A planned call looks at a hundred of
    them, and making one takes longer than judging it, so they are kept.
    """

    def __init__(self, base: HopperConfig) -> None:
        self.base = base
        self.model = functools.cache(self._model)
        self.partitions = functools.cache(self._partitions)
        self.variable = functools.cache(self._variable)

    def _variable(self, swap: bool, gated: bool, in_halves: bool) -> list[ConfigCycles]:
        """Returns the configs of tiles of variable width, with this `swap_ab`. `gated`: those that
        can take gated pairs, also `in_halves`.
        """
        models = [
            self.model(RuleTile(tile_m, consumers, cluster_m, cluster_n, swap, width, True))
            for tile_m, consumers, cluster_m, cluster_n, widths in _VARIABLE_N_TILES
            for width in widths
        ]
        return [c for c in models if not gated or gated_reason(c.config, in_halves) is None]

    def config(self, tile: RuleTile) -> HopperConfig:
        """Returns the filled config of a tile."""
        return self.model(tile).config

    def _model(self, tile: RuleTile) -> ConfigCycles:
        """Returns the filled config of a tile in the model."""
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
        return ConfigCycles(filled(config))

    def _partitions(self, tile: RuleTile) -> list[tuple[int, ConfigCycles]]:
        """Returns the numbers of CTAs of a cluster that can divide K, each with its config."""
        of_tile = self.model(tile)
        return [
            (cluster_k, self.model(tile._replace(cluster_k=cluster_k)))
            for cluster_k in CLUSTER_K
            if of_tile.cluster * cluster_k <= 8 and tile.tile_n % (8 * cluster_k) == 0
        ]


tiles_of = functools.lru_cache(maxsize=16)(Tiles)


@functools.cache
def fixed_tiles(few: bool, swaps_odd_widths: bool) -> tuple[RuleTile, ...]:
    """Returns the tiles of `_TILES`, for `few` rows or columns also those that exchange the
    operands. `swaps_odd_widths`: so do those that begin inside of 64 columns.
    """
    return tuple(
        RuleTile(
            tile_m,
            consumers,
            cluster_m,
            cluster_n,
            swap or (swaps_odd_widths and width % 64 > 0),
            width,
        )
        for tile_m, consumers, cluster_m, cluster_n, swap, widths in _TILES
        if few or not swap
        for width in widths
    )


@functools.cache
def streaming_tiles(few_rows: bool, weights_along_k: bool) -> tuple[tuple[RuleTile, int], ...]:
    """Returns the tiles of `_STREAMING_TILES`, each with the rows or columns that the few must be
    more than, because a cluster along them needs two tiles there. `few_rows`: the few are rows of
    C.
    """
    tiles = []
    for kind, (cluster_m, cluster_n) in product(_STREAMING_TILES, _STREAMING_CLUSTERS):
        tile_m, consumers, few_are_columns, widths = kind
        for width in widths:
            whole_lines = few_are_columns or weights_along_k or width % 64 == 0
            if whole_lines and width % (16 * cluster_m) == 0:
                swap = few_are_columns == few_rows
                along_few, side = (cluster_n, width) if few_are_columns else (cluster_m, tile_m)
                tile = RuleTile(tile_m, consumers, cluster_m, cluster_n, swap, width)
                tiles.append((tile, (along_few - 1) * side))
    return tuple(tiles)


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
