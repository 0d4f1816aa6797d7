"""simt.pipelined

Idea: keep the FMA units fed: while one slab is multiplied, the next goes to shared memory and the
one after is loaded.
Parent: simt.warptile
Changes: two buffers in shared memory and one barrier a slab in place of two; the slab after next is
    loaded into registers a whole slab ahead; fragments of the next term are read while the products
    of this one run. No masks of K in the loop: its remainder comes first. Neighbouring lanes
    alternate between columns and rows, so that 128-bit reads of B's fragment take two passes in
    place of four, as those of A's do. FMAs go down one column of a thread's outputs and up the
    next. Tiles are walked in groups of eight rows.
Why it pays: 93% of the loop is FFMAs (cuBLAS: 90%), and nine in ten share an operand with the one
    before, so that the two banks of the register file keep up. 1.000 of cuBLAS at 4096, 1.005 at
    2048, 1.008 at 8192.
Source: beyond the seeds.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.registry import Kernel
from ..device import rung, simt, tiles
from . import simt_host, warptile


@dataclass(frozen=True)
class Config(warptile.Config):
    block_k: int = 8
    piece_m: int = 4
    interleave: bool = True
    store_at: int = 5
    group_m: int = 8


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
    SHORT: gl.constexpr,
    WIDE: gl.constexpr,
    TRANSPOSE_A: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    A_COPY: gl.constexpr,
    B_COPY: gl.constexpr,
    A_SHARED: gl.constexpr,
    B_SHARED: gl.constexpr,
    PREFETCH: gl.constexpr,
    STORE_AT: gl.constexpr,
    SNAKE: gl.constexpr,
    RUNG: gl.constexpr,
):
    """Two slabs an iteration, so that buffers have fixed addresses and one barrier parts a slab
    from the next.

    A load stands before a barrier: behind it, the compiler would move the load to where its value
        is stored.
    """
    first_m, first_n, outer_index, inner_index = tiles.place(M, N, inner, BLOCK_M, BLOCK_N, GROUP_M)
    a_m_index = tiles.indices(first_m, BLOCK_M, gl.SliceLayout(1, A_COPY), WIDE)
    a_k_index = tiles.indices(0, BLOCK_K, gl.SliceLayout(0, A_COPY), WIDE)
    b_k_index = tiles.indices(0, BLOCK_K, gl.SliceLayout(1, B_COPY), WIDE)
    b_n_index = tiles.indices(first_n, BLOCK_N, gl.SliceLayout(0, B_COPY), WIDE)
    inside_m = tiles.inside(a_m_index, M, BLOCK_M, gl.SliceLayout(1, A_COPY), EVEN)[:, None]
    inside_n = tiles.inside(b_n_index, N, BLOCK_N, gl.SliceLayout(0, B_COPY), EVEN)[None, :]
    a_ptr = (
        a
        + outer_index * a_outer
        + inner_index * a_inner
        + (a_m_index[:, None] * a_m + a_k_index[None, :] * a_k)
    )
    b_ptr = (
        b
        + outer_index * b_outer
        + inner_index * b_inner
        + (b_k_index[:, None] * b_k + b_n_index[None, :] * b_n)
    )
    a_even = gl.allocate_shared_memory(
        gl.float32, [BLOCK_K, BLOCK_M] if TRANSPOSE_A else [BLOCK_M, BLOCK_K], A_SHARED
    )
    a_odd = gl.allocate_shared_memory(
        gl.float32, [BLOCK_K, BLOCK_M] if TRANSPOSE_A else [BLOCK_M, BLOCK_K], A_SHARED
    )
    b_even = gl.allocate_shared_memory(gl.float32, [BLOCK_K, BLOCK_N], B_SHARED)
    b_odd = gl.allocate_shared_memory(gl.float32, [BLOCK_K, BLOCK_N], B_SHARED)

    # The first pair of slabs has the terms that whole pairs leave over, 1 to 2 BLOCK_K of them, and
    # zeros.
    pairs = (K + 2 * BLOCK_K - 1) // (2 * BLOCK_K)
    left = K - (pairs - 1) * (2 * BLOCK_K)
    a_inside_k = tiles.inside(a_k_index, left, BLOCK_K, gl.SliceLayout(0, A_COPY), EVEN_K)[None, :]
    b_inside_k = tiles.inside(b_k_index, left, BLOCK_K, gl.SliceLayout(1, B_COPY), EVEN_K)[:, None]
    a_slab = gl.load(a_ptr, mask=inside_m & a_inside_k, other=0.0)
    b_slab = gl.load(b_ptr, mask=b_inside_k & inside_n, other=0.0)
    simt.put(a_even, a_slab, TRANSPOSE_A)
    simt.put(b_even, b_slab, False)
    a_ptr += BLOCK_K * a_k
    b_ptr += BLOCK_K * b_k
    a_inside_k = tiles.inside(
        a_k_index, left - BLOCK_K, BLOCK_K, gl.SliceLayout(0, A_COPY), EVEN_K
    )[None, :]
    b_inside_k = tiles.inside(
        b_k_index, left - BLOCK_K, BLOCK_K, gl.SliceLayout(1, B_COPY), EVEN_K
    )[:, None]
    a_slab = gl.load(a_ptr, mask=inside_m & a_inside_k, other=0.0)
    b_slab = gl.load(b_ptr, mask=b_inside_k & inside_n, other=0.0)
    # On to the first whole pair.
    a_ptr += (left - BLOCK_K) * a_k
    b_ptr += (left - BLOCK_K) * b_k

    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, OUTPUTS)
    column = simt.column_of(a_even, 0, TRANSPOSE_A, OUTPUTS)
    row = simt.row_of(b_even, 0, OUTPUTS)
    for pair in range(pairs):
        for odd in gl.static_range(2):
            for k in gl.static_range(BLOCK_K):
                if k == STORE_AT:
                    simt.put(a_even if odd else a_odd, a_slab, TRANSPOSE_A)
                    simt.put(b_even if odd else b_odd, b_slab, False)
                    if not SHORT:
                        a_slab = gl.load(a_ptr, mask=inside_m, other=0.0)
                        b_slab = gl.load(b_ptr, mask=inside_n, other=0.0)
                # The fragments of the next term: of this slab, or the first of the next.
                if (k < BLOCK_K - 1) != (odd == 1):
                    column_after = simt.column_of(a_even, (k + 1) % BLOCK_K, TRANSPOSE_A, OUTPUTS)
                    row_after = simt.row_of(b_even, (k + 1) % BLOCK_K, OUTPUTS)
                else:
                    column_after = simt.column_of(a_odd, (k + 1) % BLOCK_K, TRANSPOSE_A, OUTPUTS)
                    row_after = simt.row_of(b_odd, (k + 1) % BLOCK_K, OUTPUTS)
                acc = simt.add_products(acc, column, row, SNAKE)
                column = column_after
                row = row_after
            # After the last slab, back: the last iteration loads what the one before it did, and
            # multiplies none of it.
            step = gl.where((odd == 0) | (pair + 2 < pairs), BLOCK_K, -BLOCK_K)
            a_ptr += step * a_k
            b_ptr += step * b_k
    tiles.finish(
        acc,
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
    name="simt.pipelined",
    ladder="simt",
    idea=(
        "slabs in flight from global memory to registers to two buffers, fragments read a term "
        "ahead, grouped raster"
    ),
    parent="simt.warptile",
    source="beyond the seeds",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = simt_host.entry(
    KERNEL, pipelined, Config, buffers=2, steps=2
)
