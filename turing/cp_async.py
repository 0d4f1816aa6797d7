"""turing.cp_async

Idea: copies from global to shared memory that no thread waits for, several slabs ahead.
Parent: turing.ldmatrix
Changes: four slabs in flight in four buffers, by cp.async, which takes no registers. Tiles of
    128×256 in 8 warps of 64×64 (fewer reads of shared memory for a product); one wait and one
    barrier a slab; fragments of the next 16 terms are read while those before multiply; sums leave
    in whole rows; tiles are walked in groups of eight rows.
Why it pays: 1.83 times its parent, 0.636 of cuBLAS's wgmma on an H100. The tensor cores are busy
    81% of the time there, by what mma.sync can do on them: 2580 FLOP a clock and SM, of wgmma's
    4096. With two slabs 0.418; with tiles of 128×128 0.589; with sums stored from registers 0.619.
Source: 003 v12, planned there.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.registry import Kernel
from ..device import rung, tiles
from ..device.gluon import commit_copies, copy_async, mma, wait_copies
from . import host, ldmatrix

EPILOGUES = True


@dataclass(frozen=True)
class Config(ldmatrix.Config):
    block_n: int = 256
    stages: int = 4
    stage_out: bool = True
    group_m: int = 8
    ctas: int = 1


# Tiles, and how fast each is where there are many: shares of cuBLAS in one run (H100, sm_80 code,
# 4096; WORKLOG.md).
SIZES = (
    (Config(), 0.583),
    (Config(block_n=128, warps_n=2, ctas=2), 0.555),
    (Config(block_m=64, block_n=128, warps_n=2, ctas=2), 0.442),
    (Config(block_m=64, block_n=64, block_k=64, warps_n=2, ctas=3), 0.375),
)


@gluon.jit
def copy(
    a_tile,
    a_ptr,
    a_offsets,
    a_inside,
    a_k,
    b_tile,
    b_ptr,
    b_offsets,
    b_inside,
    b_k,
    left,
    TERMS: gl.constexpr,
    A_LAYOUT: gl.constexpr,
    B_LAYOUT: gl.constexpr,
    A_SINGLE: gl.constexpr,
    B_SINGLE: gl.constexpr,
):
    """A slab of A and one of B on their way to shared memory, as one group; through registers, and
    waited for, where rows are not aligned to 4 bytes.
    """
    a_inside = a_inside & tiles.terms(a_k, left, TERMS, A_LAYOUT, 1, False)
    b_inside = b_inside & tiles.terms(b_k, left, TERMS, B_LAYOUT, 1, False)
    if A_SINGLE:
        a_tile.store(gl.load(a_ptr + a_offsets, mask=a_inside, other=0.0))
    else:
        copy_async(a_tile, a_ptr + a_offsets, mask=a_inside)
    if B_SINGLE:
        b_tile.store(gl.load(b_ptr + b_offsets, mask=b_inside, other=0.0))
    else:
        copy_async(b_tile, b_ptr + b_offsets, mask=b_inside)
    commit_copies()


@gluon.jit(repr=rung.readable_name)
def pipelined(
    a,
    b,
    c,
    out,
    alpha,
    beta,
    M,
    N,
    K,
    inner,
    a_outer,
    a_inner,
    a_m,
    a_k,
    b_outer,
    b_inner,
    b_k,
    b_n,
    c_outer,
    c_inner,
    c_m,
    c_n,
    out_outer,
    out_inner,
    out_m,
    out_n,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    EVEN: gl.constexpr,
    EVEN_K: gl.constexpr,
    WIDE: gl.constexpr,
    MMA: gl.constexpr,
    A_COPY: gl.constexpr,
    B_COPY: gl.constexpr,
    A_SHARED: gl.constexpr,
    B_SHARED: gl.constexpr,
    ROWS: gl.constexpr,
    OUT_SHARED: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    A_SINGLE: gl.constexpr,
    B_SINGLE: gl.constexpr,
    A_THREADS: gl.constexpr,
    B_THREADS: gl.constexpr,
    RUNG: gl.constexpr,
    FUNCTION: gl.constexpr,
    GATED: gl.constexpr,
    extra,
):
    """STAGES slabs an iteration, so that buffers have fixed addresses.

    One wait and one barrier a slab, before its last products: they say that the next slab is there,
    and that nobody reads this one any more. Fragments of 16 terms are read while the products of
    those before run. Of a gated pair half of a tile's columns are the gate's. Outputs of an
    epilogue come half after half, for all take too many registers.
    """
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_m, first_n, outer_index, inner_index = tiles.place(M, N, inner, BLOCK_M, WIDTH, GROUP_M)
    a_ptr = a + outer_index * a_outer + inner_index * a_inner
    a_offsets, a_inside, a_index = tiles.slab(
        first_m, M, a_m, a_k, BLOCK_M, BLOCK_K, A_COPY, 1, A_SINGLE, EVEN, WIDE
    )
    b_ptr = b + outer_index * b_outer + inner_index * b_inner
    b_offsets, b_inside, b_index = tiles.slab(
        first_n, N, b_n, b_k, BLOCK_N, BLOCK_K, B_COPY, 1, B_SINGLE, EVEN, WIDE, GATED
    )
    a_tiles = tiles.buffers(STAGES, a.dtype.element_ty, BLOCK_M, BLOCK_K, A_SHARED)
    b_tiles = tiles.buffers(STAGES, b.dtype.element_ty, BLOCK_N, BLOCK_K, B_SHARED)
    for slab in gl.static_range(STAGES - 1):
        copy(
            a_tiles[slab],
            a_ptr,
            a_offsets,
            a_inside,
            a_index,
            b_tiles[slab],
            b_ptr,
            b_offsets,
            b_inside,
            b_index,
            K - slab * BLOCK_K,
            BLOCK_K,
            A_COPY,
            B_COPY,
            A_SINGLE,
            B_SINGLE,
        )
        a_offsets += BLOCK_K * a_k
        b_offsets += BLOCK_K * b_k
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, MMA)
    wait_copies(STAGES - 2)
    a_fragment, b_fragment = tiles.fragments(a_tiles[0], b_tiles[0], 0, 16, MMA)
    for start in range(0, K, STAGES * BLOCK_K):
        for slab in gl.static_range(STAGES):
            copy(
                a_tiles[(slab + STAGES - 1) % STAGES],
                a_ptr,
                a_offsets,
                a_inside,
                a_index,
                b_tiles[(slab + STAGES - 1) % STAGES],
                b_ptr,
                b_offsets,
                b_inside,
                b_index,
                K - start - (slab + STAGES - 1) * BLOCK_K,
                BLOCK_K,
                A_COPY,
                B_COPY,
                A_SINGLE,
                B_SINGLE,
            )
            a_offsets += BLOCK_K * a_k
            b_offsets += BLOCK_K * b_k
            for k in gl.static_range(16, BLOCK_K + 16, 16):
                if k == BLOCK_K:
                    wait_copies(STAGES - 2)
                a_next, b_next = tiles.fragments(
                    a_tiles[(slab + k // BLOCK_K) % STAGES],
                    b_tiles[(slab + k // BLOCK_K) % STAGES],
                    k % BLOCK_K,
                    16,
                    MMA,
                )
                acc = mma(a_fragment, b_fragment, acc)
                a_fragment = a_next
                b_fragment = b_next
    wait_copies(0)  # those past the end of K would write zeros into outputs
    HALVES: gl.constexpr = FUNCTION is not None
    PART: gl.constexpr = BLOCK_N // 2 if HALVES else BLOCK_N
    tiles.finish(
        tiles.by_rows(acc, OUT_SHARED, ROWS, HALVES),
        c,
        out,
        alpha,
        beta,
        M,
        N,
        first_m,
        first_n,
        outer_index,
        inner_index,
        c_outer,
        c_inner,
        c_m,
        c_n,
        out_outer,
        out_inner,
        out_m,
        out_n,
        BLOCK_M,
        PART,
        EVEN,
        WIDE,
        ROWS,
        HALVES,
        FUNCTION,
        GATED,
        extra,
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
)

_rung = host.TuringRung(KERNEL, pipelined, Config, steps=0, sizes=SIZES)
unsupported, plan, artifact, precompile, space = _rung.entry()
choose = _rung.default
