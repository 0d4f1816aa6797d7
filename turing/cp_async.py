"""turing.cp_async

Idea: copies from global to shared memory that no thread waits for, several k-blocks ahead.
Parent: turing.ldmatrix
Changes: six things.

    - Four k-blocks are in flight in four stages, by cp.async, which takes no registers.
    - Tiles have 128×256 outputs in 8 warps of 64×64, with fewer reads of shared memory for a
      product.
    - A k-block takes one wait and one barrier.
    - Fragments of the next 16 terms are read while those before multiply.
    - Sums leave in whole rows.
    - Tiles are walked in groups of eight rows.
Why it pays: the kernel reaches 0.636 of cuBLAS on an H100, where cuBLAS uses wgmma, and 1.83 times
    its parent. The tensor cores are busy 81% of the time, by what mma.sync can do on them: 2580
    FLOP a clock and SM, of wgmma's 4096.

    With two stages it reaches 0.418, with tiles of 128×128 0.589, and 0.619 with sums that are
    stored from registers.
Source: 003 v12, planned there.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base import registry
from outblas.base.compat.triton_private import mma
from outblas.base.registry import Kernel
from outblas.device import launch, tiles
from outblas.device.fused import current_tile
from outblas.device.gluon import commit_copies, copy_async, wait_copies
from outblas.turing import host
from outblas.turing.config import TuringConfig

EPILOGUES = True


Config = registry.config_type(TuringConfig, "turing.cp_async")


# Tiles, and their speed where there are many: fractions of cuBLAS in one run (H100, sm_80 code,
# 4096; WORKLOG.md).
SIZES = (
    (Config(), 0.583),
    (Config(block_n=128, warps_n=2, ctas=2), 0.555),
    (Config(block_m=64, block_n=128, warps_n=2, ctas=2), 0.442),
    (Config(block_m=64, block_n=64, block_k=64, warps_n=2, ctas=3), 0.375),
)


@gluon.jit
def copy_stage(
    a_smem,
    b_smem,
    a_next,
    b_next,
    left,
    A_LOAD: gl.constexpr,
    B_LOAD: gl.constexpr,
):
    """Starts the copies of a k-block of A and one of B to shared memory, as one group. Where rows
    are not aligned to 4 bytes, the copies go through registers and complete before this returns.
    """
    a_ptr, b_ptr = a_next.ptr, b_next.ptr
    a_mask = tiles.block_mask(a_next, left, A_LOAD, False)
    b_mask = tiles.block_mask(b_next, left, B_LOAD, False)
    if A_LOAD.single:
        a_smem.store(gl.load(a_ptr + a_next.offsets, mask=a_mask, other=0.0))
    else:
        copy_async(a_smem, a_ptr + a_next.offsets, mask=a_mask)
    if B_LOAD.single:
        b_smem.store(gl.load(b_ptr + b_next.offsets, mask=b_mask, other=0.0))
    else:
        copy_async(b_smem, b_ptr + b_next.offsets, mask=b_mask)
    commit_copies()


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
    STAGES: gl.constexpr,
    EPILOGUE: gl.constexpr,
    epilogue_tensors,
):
    """Multiplies STAGES k-blocks per iteration, so that stages have fixed addresses.

    There is one wait and one barrier per k-block, before its last products: after them the next
    k-block has arrived, and no warp reads this one any more. Fragments of 16 terms are read while
    the previous products run. Where the epilogue is gated, half of a tile's columns belong to the
    gate.
    """
    BLOCK_K: gl.constexpr = TILE.block_k
    GATED: gl.constexpr = EPILOGUE is not None and EPILOGUE.gated
    OUT_COLUMNS: gl.constexpr = TILE.block_n // 2 if GATED else TILE.block_n
    MMA: gl.constexpr = OUTPUTS.sums
    tile = current_tile(size, TILE.block_m, OUT_COLUMNS, TILE.group_m)
    a_next = tiles.a_block(a, strides.a, size, tile, TILE, A_LOAD)
    b_next = tiles.b_block(b, strides.b, size, tile, TILE, B_LOAD, GATED)
    a_smem = tiles.alloc_stages(STAGES, a.dtype.element_ty, TILE.block_m, TILE, A_LOAD)
    b_smem = tiles.alloc_stages(STAGES, b.dtype.element_ty, TILE.block_n, TILE, B_LOAD)

    for stage in gl.static_range(STAGES - 1):
        left = size.K - stage * BLOCK_K
        copy_stage(a_smem[stage], b_smem[stage], a_next, b_next, left, A_LOAD, B_LOAD)
        a_next, b_next = tiles.advance(a_next, b_next, strides, TILE)
    acc = gl.full([TILE.block_m, TILE.block_n], 0.0, gl.float32, MMA)
    wait_copies(STAGES - 2)
    a_fragment, b_fragment = tiles.load_fragments(a_smem[0], b_smem[0], 0, 16, MMA)
    for start in range(0, size.K, STAGES * BLOCK_K):
        for stage in gl.static_range(STAGES):
            left = size.K - start - (stage + STAGES - 1) * BLOCK_K
            copy_stage(
                a_smem[(stage + STAGES - 1) % STAGES],
                b_smem[(stage + STAGES - 1) % STAGES],
                a_next,
                b_next,
                left,
                A_LOAD,
                B_LOAD,
            )
            a_next, b_next = tiles.advance(a_next, b_next, strides, TILE)
            for k in gl.static_range(16, BLOCK_K + 16, 16):
                if k == BLOCK_K:
                    wait_copies(STAGES - 2)
                # The next fragments: of this k-block, or the first ones of the next k-block.
                a_after, b_after = tiles.load_fragments(
                    a_smem[(stage + k // BLOCK_K) % STAGES],
                    b_smem[(stage + k // BLOCK_K) % STAGES],
                    k % BLOCK_K,
                    16,
                    MMA,
                )
                acc = mma(a_fragment, b_fragment, acc)
                a_fragment = a_after
                b_fragment = b_after
    wait_copies(0)  # copies beyond the end of K would write zeros into the outputs
    tiles.store(
        acc, c, out, alpha, beta, size, strides, tile, TILE, OUTPUTS, EPILOGUE, epilogue_tensors
    )


KERNEL = Kernel(
    name="turing.cp_async",
    ladder="turing",
    idea="asynchronous copies in several stages (sm_80 and newer)",
    parent="turing.ldmatrix",
    source="003 v12, planned there",
    dtypes=("float16", "bfloat16"),
    min_arch=80,
    max_arch=None,
    dsl="gluon",
    config={"block_n": 256, "stages": 4, "stage_out": True, "group_m": 8, "ctas": 1},
)

_rung = host.TuringRung(KERNEL, pipelined, Config, steps=0, sizes=SIZES)
unsupported, plan, artifact, precompile, space = _rung.entry()
choose = _rung.default
