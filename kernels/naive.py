"""simt.naive

Idea: one thread computes one output, straight from global memory.
Parent: none; the first rung of the CUDA-core ladder.
Changes: none to a parent. A warp walks down a column of C: each of its lanes reads another row of
    A, and all of them the same element of B.
Why it pays: it does not. A's 32 elements lie K apart, so one request of a warp takes 32
    transactions of 128 bytes and uses 4 bytes of each; so does the store of C. 0.0096 of cuBLAS.
Source: 002 baseline (0.5025 TFLOP/s of cuBLAS's 50.06), 003 v01's counter-example.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.registry import Kernel
from ..device import rung, tiles
from . import simt_host
from .simt_config import SimtConfig

Config = SimtConfig


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
    """Every product of an output is two loads and one FFMA of its thread; nothing is shared but by
    the caches.
    """
    first_m, first_n, outer_index, inner_index = tiles.place(M, N, inner, BLOCK_M, BLOCK_N, GROUP_M)
    m = tiles.indices(first_m, BLOCK_M, gl.SliceLayout(1, OUTPUTS), WIDE)
    n = tiles.indices(first_n, BLOCK_N, gl.SliceLayout(0, OUTPUTS), WIDE)
    inside_m = tiles.inside(m, M, BLOCK_M, gl.SliceLayout(1, OUTPUTS), EVEN)
    inside_n = tiles.inside(n, N, BLOCK_N, gl.SliceLayout(0, OUTPUTS), EVEN)
    a_ptr = a + outer_index * a_outer + inner_index * a_inner + m * a_m
    b_ptr = b + outer_index * b_outer + inner_index * b_inner + n * b_n
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, OUTPUTS)
    for _ in range(K):
        column = gl.load(a_ptr, mask=inside_m, other=0.0)
        row = gl.load(b_ptr, mask=inside_n, other=0.0)
        acc += column.to(gl.float32)[:, None] * row.to(gl.float32)[None, :]
        a_ptr += a_k
        b_ptr += b_k
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
    name="simt.naive",
    ladder="simt",
    idea="one output per thread; a warp walks down a column of C, so A and C are uncoalesced",
    parent=None,
    source="002 baseline, 003 v01",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, direct, Config)
