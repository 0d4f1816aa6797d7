"""turing.wmma

Idea: a warp multiplies 16×16 outputs on its tensor cores, with fragments straight from global
memory.
Parent: none; the first rung of the tensor-core ladder.
Changes: one mma.sync in place of FMAs of 32 threads. Each lane loads the pairs of A and of B that
    the instruction wants from it.
Why it pays: it does not yet: 0.040 of cuBLAS, and the tensor cores are busy 5% of the time. The
    lanes of one load touch eight rows, a line of 128 bytes each, for 16 bytes of every line: it
    runs at 97% of the lines that L1 can look up.
Source: 003 v07 (1.870 TFLOP/s on a T4 at 2048).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.registry import Kernel
from ..device import rung, tiles
from ..device.gluon import mma
from . import host
from .config import TuringConfig

Config = TuringConfig


@gluon.jit(repr=rung.readable_name)
def direct(
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
    """Fragments of BLOCK_K terms, loaded by the lanes that hand them to the tensor cores."""
    first_m, first_n, outer_index, inner_index = tiles.place(M, N, inner, BLOCK_M, BLOCK_N, GROUP_M)
    a_ptr = a + outer_index * a_outer + inner_index * a_inner
    a_offsets, a_inside, a_index = tiles.slab(
        first_m, M, a_m, a_k, BLOCK_M, BLOCK_K, A_COPY, 1, False, EVEN, WIDE
    )
    b_ptr = b + outer_index * b_outer + inner_index * b_inner
    b_offsets, b_inside, b_index = tiles.slab(
        first_n, N, b_n, b_k, BLOCK_N, BLOCK_K, B_COPY, 0, False, EVEN, WIDE
    )
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, MMA)
    left = K
    while left > 0:
        a_fragment, b_fragment = tiles.load(
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
            0,
            EVEN_K,
        )
        left -= BLOCK_K
        acc = mma(a_fragment, b_fragment, acc)
        a_offsets += BLOCK_K * a_k
        b_offsets += BLOCK_K * b_k
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
    name="turing.wmma",
    ladder="turing",
    idea="tensor-core fragments straight from global memory",
    parent=None,
    source="003 v07",
    dtypes=("float16", "bfloat16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = host.entry(KERNEL, direct, Config)
