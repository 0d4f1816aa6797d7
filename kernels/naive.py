"""simt.naive

Idea: one thread computes one output, straight from global memory.
Parent: none; this is the first rung of the CUDA-core ladder.
Changes: nothing, for there is no parent. The 32 lanes of a warp compute 32 rows of one column of C:
    each lane reads another row of A, and all of them read the same element of B.
Why it pays: it does not; it shows what the next rung repairs. The 32 elements of A that a warp asks
    for lie K elements apart, so that one request takes 32 transactions of 128 bytes and uses 4
    bytes of each. The store of C does the same. The kernel reaches 0.0096 of cuBLAS.

    L1 is the limit: a step along K takes a warp 33 transactions, which allows 0.507 TFLOP/s at
    1980 MHz, and 0.499 were measured.
Source: 002 baseline (0.5025 TFLOP/s of cuBLAS's 50.06), 003 v01's counter-example.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base.registry import Kernel
from outblas.device import launch, tiles
from outblas.device.fused import current_tile, matrix_ptr
from outblas.kernels import simt_host
from outblas.kernels.simt_config import SimtConfig

Config = SimtConfig


@gluon.jit(repr=launch.readable_name)
def direct(
    a,
    b,
    c,
    out,
    alpha,
    beta,
    size,
    strides,
    TILE: gl.constexpr,
    OUTPUTS: gl.constexpr,
):
    """Computes out = alpha · A B + beta · C. Every product of an output takes two loads and one
    FFMA of its thread; threads share only the caches.

    OUTPUTS.sums is the layout that assigns outputs to threads.
    """
    tile = current_tile(size, TILE.block_m, TILE.block_n, TILE.group_m)
    ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUTS.sums)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, OUTPUTS.sums)
    m = tiles.indices(tile.first_m, TILE.block_m, ROWS, TILE.wide)
    n = tiles.indices(tile.first_n, TILE.block_n, COLUMNS, TILE.wide)
    mask_m = tiles.mask_below(m, size.M, TILE.block_m, ROWS, TILE.even_m)
    mask_n = tiles.mask_below(n, size.N, TILE.block_n, COLUMNS, TILE.even_n)

    a_ptr = matrix_ptr(a, strides.a, tile) + m * strides.a.row
    b_ptr = matrix_ptr(b, strides.b, tile) + n * strides.b.col
    acc = gl.full([TILE.block_m, TILE.block_n], 0.0, gl.float32, OUTPUTS.sums)
    for _ in range(size.K):
        column = gl.load(a_ptr, mask=mask_m, other=0.0)
        row = gl.load(b_ptr, mask=mask_n, other=0.0)
        acc += column.to(gl.float32)[:, None] * row.to(gl.float32)[None, :]
        a_ptr += strides.a.col
        b_ptr += strides.b.row

    tiles.store(acc, c, out, alpha, beta, size, strides, tile, TILE, OUTPUTS)


KERNEL = Kernel(
    name="simt.naive",
    ladder="simt",
    idea="one output per thread; a warp walks down a column of C, so A and C are uncoalesced",
    parent=None,
    source="002 baseline, 003 v01",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, direct, Config)
