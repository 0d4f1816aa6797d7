"""The parts of a tile of C that are stored through shared memory, and their positions."""

import cutlass.cute as cute


def subtile_columns(config, dtype) -> int:
    """Returns the columns of an epilogue subtile: a power of two of 16-byte units."""
    columns: int = 1024 // dtype.width
    while columns > min(config.tile_widths):
        columns //= 2
    return columns


def subtile_starts(width: int, columns: int) -> list[int]:
    """Returns the first column of each subtile of a tile `width` columns wide. Where subtiles do
    not divide the width, the last one overlaps its neighbour.
    """
    starts = list(range(0, width - columns + 1, columns))
    return starts if width % columns == 0 else [*starts, width - columns]


def subtiles(config, dtype, width: int) -> list[tuple[int, int]]:
    """Returns the row group and the first column of each subtile that a consumer stores of a tile
    `width` columns wide.
    """
    rows, columns = (
        config.tile_m // (64 * config.warpgroups_per_tile),
        subtile_columns(config, dtype),
    )
    return [(i, start) for i in range(rows) for start in subtile_starts(width, columns)]


def tile_of(tensor, batched: bool, row, column, matrix, shape, half: int = 0):
    """Returns the part of C, or of a tensor of its shape, that begins at (row, column) of one
    matrix. A tensor of gated pairs has one more mode, which selects the `half` of the columns.
    """
    rest = (half,) * (cute.rank(tensor) - 2 - batched) + (matrix,) * batched
    return cute.local_tile(
        cute.domain_offset((row, column, *(0 for _ in rest)), tensor), shape, (0, 0, *rest)
    )
