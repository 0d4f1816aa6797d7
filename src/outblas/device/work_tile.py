"""Device code that computes which tile a CTA works on, for Triton kernels, Gluon kernels and the
interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from outblas.device.records import TileOrigin


@triton.jit
def current_tile(size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the TileOrigin of this CTA. CTAs process GROUP_M rows of tiles together, column by
    column, so that CTAs that run at the same time share rows of A and columns of B in L2.
    """
    tiles_m = (size.M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (size.N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    product = tl.program_id(0) // (tiles_m * tiles_n)
    in_group = tile % (GROUP_M * tiles_n)
    top = tile // (GROUP_M * tiles_n) * GROUP_M
    rows = tl.minimum(tiles_m - top, GROUP_M)
    return TileOrigin(
        (top + in_group % rows) * BLOCK_M,
        in_group // rows * BLOCK_N,
        (product // size.inner).to(tl.int64),
        (product % size.inner).to(tl.int64),
    )


@triton.jit
def matrix_ptr(ptr, strides, tile):
    """Returns a pointer to the first element of the batch's matrix that a tile belongs to."""
    return ptr + tile.outer * strides.outer + tile.inner * strides.inner
