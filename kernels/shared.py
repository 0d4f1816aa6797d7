"""simt.shared

Idea: a CTA stages a slab of A and of B in shared memory, and every thread reads its operands there.
Parent: simt.coalesced
Changes: per 32 terms, one coalesced load a thread of A and one of B, a barrier, 32 products from
    shared memory, a barrier.
Why it pays: a value from global memory serves 32 outputs in place of one request each. But every
    FFMA still takes two loads, now from shared memory. 0.176 of cuBLAS.
Source: 002 shared-memory tile (9.174 TFLOP/s), 003 v02 (0.9 to 1.2 on a T4).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.registry import Kernel
from ..device import rung, simt, tiles
from . import coalesced, simt_host


@dataclass(frozen=True)
class Config(coalesced.Config):
    block_k: int = 32
    ctas: int = 2


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
    """Slab after slab of BLOCK_K terms: copy, multiply. Triton puts the two barriers of a slab
    where they must be.

    The rungs from here to simt.warptile differ in layouts: who copies what, how it lies in shared
    memory, who multiplies what. PREFETCH, which simt.warptile adds: a slab is loaded while the one
    before it is multiplied.
    """
    first_m, first_n, outer_index, inner_index = tiles.place(M, N, inner, BLOCK_M, BLOCK_N, GROUP_M)
    a_m_index = tiles.indices(first_m, BLOCK_M, gl.SliceLayout(1, A_COPY), WIDE)
    a_k_index = tiles.indices(0, BLOCK_K, gl.SliceLayout(0, A_COPY), WIDE)
    b_k_index = tiles.indices(0, BLOCK_K, gl.SliceLayout(1, B_COPY), WIDE)
    b_n_index = tiles.indices(first_n, BLOCK_N, gl.SliceLayout(0, B_COPY), WIDE)
    inside_m = tiles.inside(a_m_index, M, BLOCK_M, gl.SliceLayout(1, A_COPY), EVEN)[:, None]
    inside_n = tiles.inside(b_n_index, N, BLOCK_N, gl.SliceLayout(0, B_COPY), EVEN)[None, :]
    a_ptr = a + outer_index * a_outer + inner_index * a_inner
    b_ptr = b + outer_index * b_outer + inner_index * b_inner
    a_offset = a_m_index[:, None] * a_m + a_k_index[None, :] * a_k
    b_offset = b_k_index[:, None] * b_k + b_n_index[None, :] * b_n
    a_tile = gl.allocate_shared_memory(
        gl.float32, [BLOCK_K, BLOCK_M] if TRANSPOSE_A else [BLOCK_M, BLOCK_K], A_SHARED
    )
    b_tile = gl.allocate_shared_memory(gl.float32, [BLOCK_K, BLOCK_N], B_SHARED)
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, OUTPUTS)
    if PREFETCH:
        a_inside_k = tiles.inside(a_k_index, K, BLOCK_K, gl.SliceLayout(0, A_COPY), EVEN_K)[None, :]
        b_inside_k = tiles.inside(b_k_index, K, BLOCK_K, gl.SliceLayout(1, B_COPY), EVEN_K)[:, None]
        a_slab = gl.load(a_ptr + a_offset, mask=inside_m & a_inside_k, other=0.0)
        b_slab = gl.load(b_ptr + b_offset, mask=b_inside_k & inside_n, other=0.0)
    for start in range(0, K, BLOCK_K):
        if not PREFETCH:
            a_inside_k = tiles.inside(
                a_k_index, K - start, BLOCK_K, gl.SliceLayout(0, A_COPY), EVEN_K
            )[None, :]
            b_inside_k = tiles.inside(
                b_k_index, K - start, BLOCK_K, gl.SliceLayout(1, B_COPY), EVEN_K
            )[:, None]
            a_slab = gl.load(a_ptr + a_offset, mask=inside_m & a_inside_k, other=0.0)
            b_slab = gl.load(b_ptr + b_offset, mask=b_inside_k & inside_n, other=0.0)
        simt.put(a_tile, a_slab, TRANSPOSE_A)
        simt.put(b_tile, b_slab, False)
        a_ptr += BLOCK_K * a_k
        b_ptr += BLOCK_K * b_k
        if PREFETCH:
            left = K - start - BLOCK_K
            a_slab = gl.load(
                a_ptr + a_offset, mask=inside_m & (a_k_index < left)[None, :], other=0.0
            )
            b_slab = gl.load(
                b_ptr + b_offset, mask=(b_k_index < left)[:, None] & inside_n, other=0.0
            )
        for k in gl.static_range(BLOCK_K):
            acc += simt.column_of(a_tile, k, TRANSPOSE_A, OUTPUTS) * simt.row_of(b_tile, k, OUTPUTS)
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
    name="simt.shared",
    ladder="simt",
    idea="32x32 block tiles staged in shared memory",
    parent="simt.coalesced",
    source="002 shared-memory tile, 003 v02",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, staged, Config)
