"""The subtiles of C in which the epilogue of `hopper.gemm` loads its source (`epilogue_load`) and
stores its outputs (`epilogue_store`): arithmetic, without a GPU or the DSL.

An epilogue subtile has 64 rows, and as many columns as a row of 128 bytes holds or the narrowest
tile has. `config` is that of the part of C that a CTA stores (`HopperConfig.epilogue_config`),
`size` the bytes of an element of C.
"""

from outblas.hopper.gemm.traits import KernelTraits
from outblas.hopper.parts.config import HopperConfig


def subtile_columns(config: HopperConfig, size: int) -> int:
    """Returns the columns of an epilogue subtile: a power of two of 16-byte units."""
    columns = 128 // size
    while columns > min(config.tile_widths):
        columns //= 2
    return columns


def subtile_starts(width: int, columns: int) -> list[int]:
    """Returns the first column of each subtile of a tile `width` columns wide. Where subtiles do
    not divide the width, the last one overlaps its neighbour.
    """
    starts = list(range(0, width - columns + 1, columns))
    return starts if width % columns == 0 else [*starts, width - columns]


def subtiles(config: HopperConfig, size: int, width: int) -> list[tuple[int, int]]:
    """Returns the row group and the first column of each subtile that a consumer stores of a tile
    `width` columns wide.
    """
    rows = config.tile_m // (64 * config.warpgroups_per_tile)
    columns = subtile_columns(config, size)
    return [(i, start) for i in range(rows) for start in subtile_starts(width, columns)]


def subtile_bytes(config: HopperConfig, size: int) -> int:
    """Returns the bytes of a subtile."""
    return 64 * subtile_columns(config, size) * size


def subtiles_of_tile(config: HopperConfig, size: int) -> int:
    """Returns the number of subtiles that a consumer stores of a tile of the width that has most of
    them.
    """
    return max(len(subtiles(config, size, width)) for width in config.tile_widths)


# ---- in the stages of the pipeline
def subtiles_per_stage(kernel: HopperConfig, config: HopperConfig, size: int) -> int:
    """Returns the subtiles per consumer in a stage of the config `kernel`; 0 where stages do not
    begin at whole swizzles.
    """
    if kernel.tile_k < 64:
        return 0
    rows, bytes_of_one = (kernel.tile_m, kernel.stage_n), subtile_bytes(config, size)
    in_stage = sum(extent * kernel.tile_k * 2 // bytes_of_one for extent in rows)
    return in_stage // kernel.warpgroups_per_tile


def stages_per_tile(kernel: HopperConfig, config: HopperConfig, size: int) -> int:
    """Returns the number of stages of the config `kernel` for the source of a tile, which is the
    same for tiles of every width.
    """
    return -(-subtiles_of_tile(config, size) // subtiles_per_stage(kernel, config, size))


# ---- in buffers
def buffer_count(config: HopperConfig, size: int, traits: KernelTraits) -> int:
    """Returns the number of subtiles of one consumer in shared memory.

    A CTA that has only one tile lays all its subtiles over the pipeline's stages, which it has read
    by then. They fit unless there are few k tiles and C's elements are wide. This is not done where
    the epilogue's source or x need buffers too. Staggered consumers lay their subtiles over rows
    that no other consumer reads.
    """
    count = subtiles_of_tile(config, size)
    room = count * config.consumers * subtile_bytes(config, size)
    fits = room <= config.stages * config.stage_bytes
    alone = not traits.source and traits.aux != "staged"
    return count if traits.single_wave and fits and alone else config.epilogue_stages


def overlays_stages(config: HopperConfig, size: int, traits: KernelTraits) -> bool:
    """Returns whether the buffers overlay the pipeline's stages."""
    return buffer_count(config, size, traits) > config.epilogue_stages


def overlays_own_rows(config: HopperConfig, size: int, traits: KernelTraits) -> bool:
    """Returns whether a consumer's buffers overlay the rows of A that only this consumer reads.

    It may then write them as soon as its own products are complete: when a warp has waited for its
    wgmma groups, those of its whole warpgroup are complete. `consumer_release` relies on that too.
    """
    return traits.staggered_tail and overlays_stages(config, size, traits)


def fits_own_rows(config: HopperConfig, size: int) -> bool:
    """Returns whether all subtiles of a consumer fit over its rows of A. A subtile overlays 64 rows
    of a stage, and must take as many bytes.
    """
    rows = config.tile_m // (64 * config.warpgroups_per_tile) * config.stages
    same_bytes = subtile_columns(config, size) * size == config.tile_k * 2 == 64 * 2
    return same_bytes and subtiles_of_tile(config, size) <= rows
