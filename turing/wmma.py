"""turing.wmma

Idea: a warp multiplies 16×16 outputs on its tensor cores, with fragments straight from global
    memory.
Parent: none; this is the first rung of the tensor-core ladder.
Changes: one mma.sync takes the place of the FMAs of 32 threads. Each lane loads the pairs of A and
    of B that the instruction wants from it.
Why it pays: it does not yet. The kernel reaches 0.040 of cuBLAS, and the tensor cores are busy 5%
    of the time.

    The lanes of one load touch eight rows, a line of 128 bytes each, for 16 bytes of every line.
    L1 is the limit: the kernel runs at 97% of the lines that L1 can look up.
Source: 003 v07 (1.870 TFLOP/s on a T4 at 2048).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base.compat.triton_private import mma
from outblas.base.registry import Kernel
from outblas.device import launch, tiles
from outblas.device.fused import current_tile
from outblas.turing import host
from outblas.turing.config import TuringConfig

Config = TuringConfig


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
    A_LOAD: gl.constexpr,
    B_LOAD: gl.constexpr,
):
    """Multiplies fragments of BLOCK_K terms that are loaded by the lanes which pass them to the
    tensor cores.

    MMA is the layout of mma.sync's accumulators; A_LOAD and B_LOAD define which lane loads which
    elements.
    """
    MMA: gl.constexpr = OUTPUTS.sums
    tile = current_tile(size, TILE.block_m, TILE.block_n, TILE.group_m)
    a_next = tiles.a_block(a, strides.a, size, tile, TILE, A_LOAD)
    b_next = tiles.b_block(b, strides.b, size, tile, TILE, B_LOAD)
    acc = gl.full([TILE.block_m, TILE.block_n], 0.0, gl.float32, MMA)
    left = size.K
    while left > 0:
        a_fragment, b_fragment = tiles.load_blocks(
            a_next, b_next, left, A_LOAD, B_LOAD, TILE.even_k
        )
        left -= TILE.block_k
        acc = mma(a_fragment, b_fragment, acc)
        a_next, b_next = tiles.advance(a_next, b_next, strides, TILE)

    tiles.store(acc, c, out, alpha, beta, size, strides, tile, TILE, OUTPUTS)


KERNEL = Kernel(
    name="turing.wmma",
    ladder="turing",
    idea="tensor-core fragments straight from global memory",
    parent=None,
    source="003 v07",
    dtypes=("float16", "bfloat16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = host.entry(KERNEL, direct, Config)
