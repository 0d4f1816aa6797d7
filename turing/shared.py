"""turing.shared

Idea: a CTA copies k-blocks of A and B to shared memory, and its warps read their fragments there.
Parent: turing.wmma
Changes: for every 16 terms of K, single elements go from global to shared memory, and fragments are
    read there, with a barrier before and a barrier after. Rows in shared memory are 8 elements
    longer, so that reads meet no bank conflicts.
Why it pays: a k-block is loaded once for all warps of the tile, 6.4 GB at 4096 in place of 34.4,
    and a row of it lies in one line. The kernel reaches 0.078 of cuBLAS, 1.98 times its parent.

    Every element is still a load and a store by itself, and the queue to memory is full.
Source: 003 v08 (3.230 TFLOP/s on a T4 at 2048).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.device import launch, tiles
from outblas.device.fused import current_tile
from outblas.turing import host
from outblas.turing.config import TuringConfig

Config = registry.config_type(TuringConfig, "turing.shared")


@gluon.jit(repr=launch.readable_name)
def staged(
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
    """Copies and multiplies one k-block of BLOCK_K terms after another. Triton inserts the two
    barriers per k-block.
    """
    BLOCK_K: gl.constexpr = TILE.block_k
    MMA: gl.constexpr = OUTPUTS.sums
    tile = current_tile(size, TILE.block_m, TILE.block_n, TILE.group_m)
    a_next = tiles.a_block(a, strides.a, size, tile, TILE, A_LOAD)
    b_next = tiles.b_block(b, strides.b, size, tile, TILE, B_LOAD)
    a_smem = gl.allocate_shared_memory(a.dtype.element_ty, [TILE.block_m, BLOCK_K], A_LOAD.shared)
    b_smem = gl.allocate_shared_memory(b.dtype.element_ty, [TILE.block_n, BLOCK_K], B_LOAD.shared)
    acc = gl.full([TILE.block_m, TILE.block_n], 0.0, gl.float32, MMA)
    left = size.K
    while left > 0:
        a_regs, b_regs = tiles.load_blocks(a_next, b_next, left, A_LOAD, B_LOAD, TILE.even_k)
        a_smem.store(a_regs)
        b_smem.store(b_regs)
        a_next, b_next = tiles.advance(a_next, b_next, strides, TILE)
        left -= BLOCK_K
        acc = tiles.mma_k_block(acc, a_smem, b_smem, BLOCK_K, MMA)

    tiles.store(acc, c, out, alpha, beta, size, strides, tile, TILE, OUTPUTS)


KERNEL = Kernel(
    name="turing.shared",
    ladder="turing",
    idea="operands staged in shared memory",
    parent="turing.wmma",
    source="003 v08",
    dtypes=("float16", "bfloat16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={"vector": 1, "pad": 8},
)

unsupported, plan, artifact, precompile, space = host.entry(KERNEL, staged, Config)
