"""turing.shared

Idea: a CTA stages a slab of A and of B in shared memory, and its warps read their fragments there.
Parent: turing.wmma
Changes: per 16 terms, single elements from global to shared memory, a barrier, fragments from rows
    that are 8 elements longer (no bank conflicts), a barrier.
Why it pays: a slab is loaded once for the warps of the tile, 6.4 GB in place of 34.4 at 4096, and a
    row of it is one line: 1.98 times its parent, 0.078 of cuBLAS. But every element is a load and a
    store of its own, and the queue to memory is full.
Source: 003 v08 (3.230 TFLOP/s on a T4 at 2048).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.registry import Kernel
from ..device import rung, tiles
from . import host, wmma


@dataclass(frozen=True)
class Config(wmma.Config):
    vector: int = 1
    pad: int = 8


@gluon.jit(repr=rung.readable_name)
def staged(
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
    """Slab after slab of BLOCK_K terms: copy, multiply. Triton puts the two barriers of a slab
    where they must be.
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
    a_tile = gl.allocate_shared_memory(a.dtype.element_ty, [BLOCK_M, BLOCK_K], A_SHARED)
    b_tile = gl.allocate_shared_memory(b.dtype.element_ty, [BLOCK_N, BLOCK_K], B_SHARED)
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, MMA)
    left = K
    while left > 0:
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
            EVEN_K,
        )
        a_tile.store(a_slab)
        b_tile.store(b_slab)
        a_offsets += BLOCK_K * a_k
        b_offsets += BLOCK_K * b_k
        left -= BLOCK_K
        acc = tiles.products(acc, a_tile, b_tile, BLOCK_K, MMA)
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
    name="turing.shared",
    ladder="turing",
    idea="operands staged in shared memory",
    parent="turing.wmma",
    source="003 v08",
    dtypes=("float16", "bfloat16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = host.entry(KERNEL, staged, Config)
