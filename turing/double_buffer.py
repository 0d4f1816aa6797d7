"""turing.double_buffer

Idea: two stages in shared memory, so that one can be filled while the other is multiplied. Outputs
    leave in whole rows.
Parent: turing.shared
Changes: one barrier a k-block in place of two. Sums go through shared memory, and leave in rows as
    alpha·AB + beta·C.
Why it pays: it does not, here as in the document: 1.00 of its parent at 2048, 0.97 at 4096, where
    it reaches 0.076 of cuBLAS. A thread waits for what it loads before it multiplies, so that
    nothing overlaps, and 16 more registers leave room for two thirds of the warps.

    Loads that run a k-block ahead of their stores (`ahead=True`) give 0.079. The way out through
    shared memory costs one FFMA an output.
Source: 003 v09 (3.105 TFLOP/s on a T4 at 2048).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.device import launch, tiles
from outblas.device.fused import current_tile
from outblas.device.gluon import barrier
from outblas.turing import host
from outblas.turing.config import TuringConfig

Config = registry.config_type(TuringConfig, "turing.double_buffer")


@gluon.jit
def fill_stage(
    a_smem,
    b_smem,
    a_next,
    b_next,
    left,
    A_LOAD: gl.constexpr,
    B_LOAD: gl.constexpr,
):
    """Fills a stage: the first threads load a k-block of A, the last ones a k-block of B. Threads
    without elements of their own do not take part; they would repeat the work of others.
    """
    THREADS: gl.constexpr = 32 * gl.num_warps()
    if min(A_LOAD.threads, B_LOAD.threads) == THREADS:
        a_regs, b_regs = tiles.load_blocks(a_next, b_next, left, A_LOAD, B_LOAD, False)
        a_smem.store(a_regs)
        b_smem.store(b_regs)
    else:
        a_ptr, b_ptr = a_next.ptr, b_next.ptr
        a_mask = tiles.block_mask(a_next, left, A_LOAD, False)
        b_mask = tiles.block_mask(b_next, left, B_LOAD, False)
        if tiles.thread_index() < A_LOAD.threads:
            a_smem.store(gl.load(a_ptr + a_next.offsets, mask=a_mask, other=0.0))
        if tiles.thread_index() >= THREADS - B_LOAD.threads:
            b_smem.store(gl.load(b_ptr + b_next.offsets, mask=b_mask, other=0.0))


@gluon.jit(repr=launch.readable_name)
def buffered(
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
    AHEAD: gl.constexpr,
):
    """Multiplies two k-blocks per iteration, so that stages have fixed addresses and one barrier
    separates k-blocks.

    A thread loads, waits for the elements and stores them before its products, so nothing overlaps.
    AHEAD: the stored elements were loaded before the products of the previous k-block.
    """
    BLOCK_K: gl.constexpr = TILE.block_k
    MMA: gl.constexpr = OUTPUTS.sums
    tile = current_tile(size, TILE.block_m, TILE.block_n, TILE.group_m)
    a_next = tiles.a_block(a, strides.a, size, tile, TILE, A_LOAD)
    b_next = tiles.b_block(b, strides.b, size, tile, TILE, B_LOAD)
    a_smem = tiles.alloc_stages(2, a.dtype.element_ty, TILE.block_m, TILE, A_LOAD)
    b_smem = tiles.alloc_stages(2, b.dtype.element_ty, TILE.block_n, TILE, B_LOAD)
    acc = gl.full([TILE.block_m, TILE.block_n], 0.0, gl.float32, MMA)

    fill_stage(a_smem[0], b_smem[0], a_next, b_next, size.K, A_LOAD, B_LOAD)
    a_next, b_next = tiles.advance(a_next, b_next, strides, TILE)
    if AHEAD:
        left = size.K - BLOCK_K
        a_regs, b_regs = tiles.load_blocks(a_next, b_next, left, A_LOAD, B_LOAD, False)
        a_next, b_next = tiles.advance(a_next, b_next, strides, TILE)
    barrier()
    for start in range(0, size.K, 2 * BLOCK_K):
        for odd in gl.static_range(2):
            left = size.K - start - (odd + (2 if AHEAD else 1)) * BLOCK_K
            if AHEAD:
                a_smem[1 - odd].store(a_regs)
                b_smem[1 - odd].store(b_regs)
                a_regs, b_regs = tiles.load_blocks(a_next, b_next, left, A_LOAD, B_LOAD, False)
            else:
                fill_stage(a_smem[1 - odd], b_smem[1 - odd], a_next, b_next, left, A_LOAD, B_LOAD)
            a_next, b_next = tiles.advance(a_next, b_next, strides, TILE)
            acc = tiles.mma_k_block(acc, a_smem[odd], b_smem[odd], BLOCK_K, MMA)
            barrier()  # `fill_stage` branches on the thread, so it can contain no barrier

    tiles.store(acc, c, out, alpha, beta, size, strides, tile, TILE, OUTPUTS)


KERNEL = Kernel(
    name="turing.double_buffer",
    ladder="turing",
    idea="two buffers; the epilogue goes through shared memory",
    parent="turing.shared",
    source="003 v09",
    dtypes=("float16", "bfloat16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={"stages": 2, "stage_out": True},
)

unsupported, plan, artifact, precompile, space = host.entry(KERNEL, buffered, Config, steps=2)
