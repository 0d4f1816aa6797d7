"""simt.shared

Idea: a CTA copies blocks of A and B to shared memory, and every thread reads its operands there.
Parent: simt.coalesced
Changes: K is walked in k-blocks of 32 terms. For each of them every thread makes one coalesced load
    of A and one of B, then comes a barrier, 32 products from shared memory, and another barrier.
Why it pays: a value that was loaded from global memory serves 32 outputs, where each of them asked
    for it before. The kernel reaches 0.176 of cuBLAS.

    Every FFMA still takes two loads, now from shared memory, which is the next limit: it allows
    10.7 TFLOP/s, and 9.1 were measured.
Source: 002 shared-memory tile (9.174 TFLOP/s), 003 v02 (0.9 to 1.2 on a T4).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.device import launch, simt, tiles
from outblas.device.fused import current_tile
from outblas.kernels import simt_host
from outblas.kernels.simt_config import SimtConfig

Config = registry.config_type(SimtConfig, "simt.shared")


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
    PREFETCH: gl.constexpr,
):
    """Copies and multiplies one k-block of BLOCK_K terms after another. Triton inserts the two
    barriers per k-block.

    The rungs from here to simt.warptile differ only in layouts: which thread copies which elements,
    how these lie in shared memory, and which thread multiplies them. PREFETCH, which simt.warptile
    adds, loads a k-block while the previous one is multiplied.
    """
    BLOCK_K: gl.constexpr = TILE.block_k
    SUMS: gl.constexpr = OUTPUTS.sums
    tile = current_tile(size, TILE.block_m, TILE.block_n, TILE.group_m)
    a_next = tiles.a_block(a, strides.a, size, tile, TILE, A_LOAD)
    b_next = tiles.b_block(b, strides.b, size, tile, TILE, B_LOAD)
    a_smem = simt.alloc_k_block(TILE.block_m, BLOCK_K, A_LOAD)
    b_smem = simt.alloc_k_block(BLOCK_K, TILE.block_n, B_LOAD)
    acc = gl.full([TILE.block_m, TILE.block_n], 0.0, gl.float32, SUMS)

    if PREFETCH:
        a_regs, b_regs = tiles.load_blocks(a_next, b_next, size.K, A_LOAD, B_LOAD, TILE.even_k)
    for start in range(0, size.K, BLOCK_K):
        left = size.K - start
        if not PREFETCH:
            a_regs, b_regs = tiles.load_blocks(a_next, b_next, left, A_LOAD, B_LOAD, TILE.even_k)
        simt.store_k_blocks(a_smem, b_smem, a_regs, b_regs, A_LOAD, B_LOAD)
        a_next, b_next = tiles.advance_ptrs(a_next, b_next, strides, TILE)
        if PREFETCH:
            # Beyond the last k-block the masks load nothing.
            a_regs, b_regs = tiles.load_blocks(
                a_next, b_next, left - BLOCK_K, A_LOAD, B_LOAD, False
            )
        for k in gl.static_range(BLOCK_K):
            column, row = simt.load_fragments(a_smem, b_smem, k, A_LOAD, SUMS)
            acc += column * row

    tiles.store(acc, c, out, alpha, beta, size, strides, tile, TILE, OUTPUTS)


KERNEL = Kernel(
    name="simt.shared",
    ladder="simt",
    idea="32x32 block tiles staged in shared memory",
    parent="simt.coalesced",
    source="002 shared-memory tile, 003 v02",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={"block_k": 32, "ctas": 2},
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, staged, Config)
