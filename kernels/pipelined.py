"""simt.pipelined

Idea: keep the FMA units fed: while one k-block is multiplied, the next one goes to shared memory,
    and the one after that is loaded.
Parent: simt.warptile
Changes: seven things.

    - Shared memory has two stages, so that a k-block takes one barrier in place of two.
    - The k-block after the next is loaded into registers, a whole k-block ahead.
    - Fragments of the next term are read while the products of this one run.
    - The loop has no masks of K: the remainder of K comes first.
    - Neighbouring lanes alternate between columns and rows, so that a 128-bit read of B's fragment
      takes two passes in place of four, as one of A's does.
    - FFMAs go down one column of a thread's outputs and up the next.
    - Tiles are walked in groups of eight rows.
Why it pays: 93% of the loop is FFMAs, where cuBLAS has 90%. The register file has two banks, so
    that an FFMA which reads three registers takes two cycles; nine in ten share an operand with the
    FFMA before them and need not read it again. The kernel reaches 1.000 of cuBLAS at 4096, 1.005
    at 2048 and 1.008 at 8192.
Source: none; it is beyond the documents.
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

Config = registry.config_type(SimtConfig, "simt.pipelined")


@gluon.jit(repr=launch.readable_name)
def pipelined(
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
    SHORT: gl.constexpr,
    STORE_AT: gl.constexpr,
    SNAKE: gl.constexpr,
):
    """Multiplies two k-blocks per iteration, so that stages have fixed addresses and one barrier
    separates k-blocks.

    While the terms of one stage are multiplied, at term STORE_AT the next k-block is stored from
    registers to the other stage, and the one after it is loaded into registers. SHORT: there is at
    most one pair of k-blocks. Each load stands before a barrier; after it, the compiler would move
    the load to the point where its value is stored.
    """
    BLOCK_K: gl.constexpr = TILE.block_k
    SUMS: gl.constexpr = OUTPUTS.sums
    tile = current_tile(size, TILE.block_m, TILE.block_n, TILE.group_m)
    a_next = tiles.a_block(a, strides.a, size, tile, TILE, A_LOAD)
    b_next = tiles.b_block(b, strides.b, size, tile, TILE, B_LOAD)
    a_ptr = a_next.ptr + a_next.offsets
    b_ptr = b_next.ptr + b_next.offsets
    a_even = simt.alloc_k_block(TILE.block_m, BLOCK_K, A_LOAD)
    a_odd = simt.alloc_k_block(TILE.block_m, BLOCK_K, A_LOAD)
    b_even = simt.alloc_k_block(BLOCK_K, TILE.block_n, B_LOAD)
    b_odd = simt.alloc_k_block(BLOCK_K, TILE.block_n, B_LOAD)

    # The first pair of k-blocks has the remainder of K, 1 to 2 BLOCK_K terms, and zeros.
    pairs = (size.K + 2 * BLOCK_K - 1) // (2 * BLOCK_K)
    left = size.K - (pairs - 1) * (2 * BLOCK_K)
    a_mask = tiles.block_mask(a_next, left, A_LOAD, TILE.even_k)
    b_mask = tiles.block_mask(b_next, left, B_LOAD, TILE.even_k)
    a_regs, b_regs = tiles.load(a_ptr, b_ptr, a_mask, b_mask)
    simt.store_k_blocks(a_even, b_even, a_regs, b_regs, A_LOAD, B_LOAD)
    a_ptr += BLOCK_K * strides.a.col
    b_ptr += BLOCK_K * strides.b.row
    a_mask = tiles.block_mask(a_next, left - BLOCK_K, A_LOAD, TILE.even_k)
    b_mask = tiles.block_mask(b_next, left - BLOCK_K, B_LOAD, TILE.even_k)
    a_regs, b_regs = tiles.load(a_ptr, b_ptr, a_mask, b_mask)
    # Move to the first whole pair.
    a_ptr += (left - BLOCK_K) * strides.a.col
    b_ptr += (left - BLOCK_K) * strides.b.row

    acc = gl.full([TILE.block_m, TILE.block_n], 0.0, gl.float32, SUMS)
    column, row = simt.load_fragments(a_even, b_even, 0, A_LOAD, SUMS)
    for pair in range(pairs):
        for odd in gl.static_range(2):
            # Terms are read from the stage `a_smem` and `b_smem`; the other stage is filled.
            a_smem, a_free = (a_odd, a_even) if odd else (a_even, a_odd)
            b_smem, b_free = (b_odd, b_even) if odd else (b_even, b_odd)
            for k in gl.static_range(BLOCK_K):
                if k == STORE_AT:
                    simt.store_k_blocks(a_free, b_free, a_regs, b_regs, A_LOAD, B_LOAD)
                    if not SHORT:
                        a_regs, b_regs = tiles.load(a_ptr, b_ptr, a_next.mask, b_next.mask)
                # The fragments of the next term: of this k-block, or the first ones of the next
                # k-block.
                if k < BLOCK_K - 1:
                    after = simt.load_fragments(a_smem, b_smem, k + 1, A_LOAD, SUMS)
                else:
                    after = simt.load_fragments(a_free, b_free, 0, A_LOAD, SUMS)
                acc = simt.add_products(acc, column, row, SNAKE)
                column, row = after
            # After the last k-block, step back: the last iteration loads the same k-block again,
            # and multiplies none of it.
            step = gl.where((odd == 0) | (pair + 2 < pairs), BLOCK_K, -BLOCK_K)
            a_ptr += step * strides.a.col
            b_ptr += step * strides.b.row
    tiles.store(acc, c, out, alpha, beta, size, strides, tile, TILE, OUTPUTS)


KERNEL = Kernel(
    name="simt.pipelined",
    ladder="simt",
    idea=(
        "k-blocks in flight from global memory to registers to two stages, fragments read a term "
        "ahead, grouped raster"
    ),
    parent="simt.warptile",
    source="beyond the seeds",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={"block_k": 8, "piece_m": 4, "interleave": True, "store_at": 5, "group_m": 8},
)

_RUNG = simt_host.SimtRung(KERNEL, pipelined, Config, buffers=2, steps=2)
unsupported, plan, artifact, precompile, space = _RUNG.entry()
# Tuned for products of float32, so that packs hold it.
pack_variant, PACKED = _RUNG.pack_variant, True
