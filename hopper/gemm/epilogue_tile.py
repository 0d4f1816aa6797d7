"""Which parts of a tile of C leave through shared memory, and where they lie."""

import cutlass.cute as cute


def slab_columns(config, dtype) -> int:
    """Columns of a slab: a power of two of 16-byte pieces."""
    columns: int = 1024 // dtype.width
    while columns > min(config.widths):
        columns //= 2
    return columns


def starts(width: int, columns: int) -> list[int]:
    """The first column of each slab of a tile so many columns wide."""
    found = list(range(0, width - columns + 1, columns))
    return found if width % columns == 0 else [*found, width - columns]


def places(config, dtype, width: int) -> list[tuple[int, int]]:
    """Row group and first column of each slab that a consumer stores of a tile so many columns
    wide.
    """
    tall = config.tile_m // (64 * config.sharing)
    return [(i, start) for i in range(tall) for start in starts(width, slab_columns(config, dtype))]


def tile_of(k, tensor, row, column, matrix, shape, half: int = 0):
    """The part of C, or of a tensor of its shape, from (row, column) of one matrix on; of x's, in a
    half of columns.
    """
    rest = (half,) * (cute.rank(tensor) - 2 - k.batched) + (matrix,) * k.batched
    return cute.local_tile(
        cute.domain_offset((row, column, *(0 for _ in rest)), tensor), shape, (0, 0, *rest)
    )
