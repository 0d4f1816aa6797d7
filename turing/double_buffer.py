"""turing.double_buffer

Idea: two slabs in shared memory, so that the next can be filled while one is multiplied; outputs
leave in whole rows.
Parent: turing.shared
Changes: one barrier a slab in place of two; sums go through shared memory, and leave in rows as
alpha·AB + beta·C.
Why it pays: it does not, as in the document: 1.00 of its parent at 2048, 0.97 at 4096, 0.076 of
    cuBLAS. A thread waits for what it loads before it multiplies: nothing overlaps, and 16 more
    registers leave room for two thirds of the warps. Loads a slab ahead of their stores
    (`ahead=True`) give 0.079. The way out costs one FFMA an output.
Source: 003 v09 (3.105 TFLOP/s on a T4 at 2048).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.registry import Kernel
from ..device import rung, tiles
from ..device.gluon import barrier
from . import host, shared


@dataclass(frozen=True)
class Config(shared.Config):
    stages: int = 2
    stage_out: bool = True


@gluon.jit
def fill(
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
    A_THREADS: gl.constexpr,
    B_THREADS: gl.constexpr,
):
    """A slab of A by the first A_THREADS threads, one of B by the last B_THREADS, as many as have
    something to load: the rest would load and store once more what others do.
    """
    threads: gl.constexpr = 32 * gl.num_warps()
    if min(A_THREADS, B_THREADS) == threads:
        a_slab, b_slab = tiles.load(
            a_ptr,
            a_offsets,
            a_inside,
            a_k,
            b_ptr,
            b_offsets,
            b_inside,
            b_k,
            left,
            TERMS,
            A_LAYOUT,
            B_LAYOUT,
            1,
            False,
        )
        a_tile.store(a_slab)
        b_tile.store(b_slab)
    else:
        a_inside = a_inside & tiles.terms(a_k, left, TERMS, A_LAYOUT, 1, False)
        b_inside = b_inside & tiles.terms(b_k, left, TERMS, B_LAYOUT, 1, False)
        if tiles.thread() < A_THREADS:
            a_tile.store(gl.load(a_ptr + a_offsets, mask=a_inside, other=0.0))
        if tiles.thread() >= threads - B_THREADS:
            b_tile.store(gl.load(b_ptr + b_offsets, mask=b_inside, other=0.0))


@gluon.jit(repr=rung.readable_name)
def buffered(
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
):
    """Two slabs an iteration, so that buffers have fixed addresses and one barrier parts a slab
    from the next.

    A thread stores what it loads before its products, and waits for it: nothing overlaps. AHEAD:
    what is stored was loaded before the products of the slab before.
    """
    first_m, first_n, outer_index, inner_index = tiles.place(M, N, inner, BLOCK_M, BLOCK_N, GROUP_M)
    a_ptr = a + outer_index * a_outer + inner_index * a_inner
    a_offsets, a_inside, a_index = tiles.slab(
        first_m, M, a_m, a_k, BLOCK_M, BLOCK_K, A_COPY, 1, A_SINGLE, EVEN, WIDE
    )
    b_ptr = b + outer_index * b_outer + inner_index * b_inner
    b_offsets, b_inside, b_index = tiles.slab(
        first_n, N, b_n, b_k, BLOCK_N, BLOCK_K, B_COPY, 1, B_SINGLE, EVEN, WIDE
    )
    a_tiles = tiles.buffers(2, a.dtype.element_ty, BLOCK_M, BLOCK_K, A_SHARED)
    b_tiles = tiles.buffers(2, b.dtype.element_ty, BLOCK_N, BLOCK_K, B_SHARED)
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, MMA)
    fill(
        a_tiles[0],
        a_ptr,
        a_offsets,
        a_inside,
        a_index,
        b_tiles[0],
        b_ptr,
        b_offsets,
        b_inside,
        b_index,
        K,
        BLOCK_K,
        A_COPY,
        B_COPY,
        A_THREADS,
        B_THREADS,
    )
    a_offsets += BLOCK_K * a_k
    b_offsets += BLOCK_K * b_k
    if AHEAD:
        a_slab, b_slab = tiles.load(
            a_ptr,
            a_offsets,
            a_inside,
            a_index,
            b_ptr,
            b_offsets,
            b_inside,
            b_index,
            K - BLOCK_K,
            BLOCK_K,
            A_COPY,
            B_COPY,
            1,
            False,
        )
        a_offsets += BLOCK_K * a_k
        b_offsets += BLOCK_K * b_k
    barrier()
    for start in range(0, K, 2 * BLOCK_K):
        for odd in gl.static_range(2):
            left = K - start - (odd + (2 if AHEAD else 1)) * BLOCK_K
            if AHEAD:
                a_tiles[1 - odd].store(a_slab)
                b_tiles[1 - odd].store(b_slab)
                a_slab, b_slab = tiles.load(
                    a_ptr,
                    a_offsets,
                    a_inside,
                    a_index,
                    b_ptr,
                    b_offsets,
                    b_inside,
                    b_index,
                    left,
                    BLOCK_K,
                    A_COPY,
                    B_COPY,
                    1,
                    False,
                )
            else:
                fill(
                    a_tiles[1 - odd],
                    a_ptr,
                    a_offsets,
                    a_inside,
                    a_index,
                    b_tiles[1 - odd],
                    b_ptr,
                    b_offsets,
                    b_inside,
                    b_index,
                    left,
                    BLOCK_K,
                    A_COPY,
                    B_COPY,
                    A_THREADS,
                    B_THREADS,
                )
            a_offsets += BLOCK_K * a_k
            b_offsets += BLOCK_K * b_k
            acc = tiles.products(acc, a_tiles[odd], b_tiles[odd], BLOCK_K, MMA)
            barrier()  # the branches in `fill` have room for none
    tiles.finish(
        tiles.by_rows(acc, OUT_SHARED, ROWS),
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
        BLOCK_N,
        EVEN,
        WIDE,
        ROWS,
    )


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
)

unsupported, plan, artifact, precompile, space = host.entry(KERNEL, buffered, Config, steps=2)
