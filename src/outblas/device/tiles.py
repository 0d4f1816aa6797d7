"""Device code that the Gluon ladders share: where a CTA works, indices and masks, the way out.

Pointers are tensors; the source line of every access to global memory names its operand's pointer
(a_ptr, b_ptr, c_ptr, out_ptr): by that, `outblas profile --instructions` says which operand an
instruction reads.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import fused
from .gluon import mma


@gluon.jit
def place(M, N, inner, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """First row and column of this CTA's tile, and the two batch indices of its product.

    GROUP_M rows of tiles are walked together, column by column.
    """
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tile = gl.program_id(0) % (tiles_m * tiles_n)
    product = gl.program_id(0) // (tiles_m * tiles_n)
    in_group = tile % (GROUP_M * tiles_n)
    top = tile // (GROUP_M * tiles_n) * GROUP_M
    group = gl.minimum(tiles_m - top, GROUP_M)
    first_m = (top + in_group % group) * BLOCK_M
    first_n = in_group // group * BLOCK_N
    return first_m, first_n, (product // inner).to(gl.int64), (product % inner).to(gl.int64)


@gluon.jit
def indices(first, SIZE: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """first, first + 1, …; in 64 bits where offsets are. Those past an edge may wrap: masks keep
    them out.
    """
    index = first + gl.arange(0, SIZE, LAYOUT)
    if WIDE:
        index = index.to(gl.int64)
    return index


@gluon.jit
def inside(index, size, SIZE: gl.constexpr, LAYOUT: gl.constexpr, EVEN: gl.constexpr):
    """Which indices lie below size; where tiles divide it, a mask of ones, which compiles away."""
    if EVEN:
        return gl.full([SIZE], 1, gl.int1, LAYOUT)
    else:
        return index < size


@gluon.jit
def slab(
    first,
    size,
    row_step,
    k_step,
    ROWS: gl.constexpr,
    TERMS: gl.constexpr,
    LAYOUT: gl.constexpr,
    K_AXIS: gl.constexpr,
    SINGLE: gl.constexpr,
    EVEN: gl.constexpr,
    WIDE: gl.constexpr,
    GATED: gl.constexpr = False,
):
    """Offsets of an operand's first TERMS along K in the ROWS rows of A, or columns of B, from
    `first`; which of these lie inside; the terms' indices. The slab has K along K_AXIS; SINGLE: its
    elements are loaded one at a time; GATED: the second half of the columns of B lies `size`
    further. Offsets take half the registers of pointers.
    """
    row = indices(first, ROWS, gl.SliceLayout(K_AXIS, LAYOUT), WIDE)
    column = row
    if GATED:
        row = gl.arange(0, ROWS, gl.SliceLayout(K_AXIS, LAYOUT))
        column, row = fused.pair(
            indices(first, ROWS, gl.SliceLayout(K_AXIS, LAYOUT), WIDE), row, size, ROWS // 2
        )
    k = indices(0, TERMS, gl.SliceLayout(1 - K_AXIS, LAYOUT), WIDE)
    if SINGLE:
        # LLVM as in Triton 3.6 would pair these indices with those of an operand that is loaded by
        # vectors, as one vector of two shifts, and the bits that overflow from one into the other.
        k = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [k.to(gl.int32)], gl.int32, True, 1
        ).to(k.dtype)
    inside_rows = inside(column, size, ROWS, gl.SliceLayout(K_AXIS, LAYOUT), EVEN).expand_dims(
        K_AXIS
    )
    return row.expand_dims(K_AXIS) * row_step + k.expand_dims(1 - K_AXIS) * k_step, inside_rows, k


@gluon.jit
def terms(
    k, left, TERMS: gl.constexpr, LAYOUT: gl.constexpr, K_AXIS: gl.constexpr, EVEN: gl.constexpr
):
    """Which terms of a slab lie below `left`; where slabs divide K, a mask of ones."""
    return inside(k, left, TERMS, gl.SliceLayout(1 - K_AXIS, LAYOUT), EVEN).expand_dims(1 - K_AXIS)


@gluon.jit
def buffers(
    COUNT: gl.constexpr,
    DTYPE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """So many tiles in shared memory, each an allocation of its own: between accesses to different
    ones Triton puts no barrier.
    """
    found = ()
    for _ in gl.static_range(COUNT):
        found += (gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], LAYOUT),)
    return found


@gluon.jit
def load(
    a_ptr,
    a_offsets,
    a_inside,
    a_k,
    b_ptr,
    b_offsets,
    b_inside,
    b_k,
    left,
    TERMS: gl.constexpr,
    A_LAYOUT: gl.constexpr,
    B_LAYOUT: gl.constexpr,
    B_K_AXIS: gl.constexpr,
    EVEN: gl.constexpr,
):
    """A slab of A and one of B as `slab` placed them, zeros where terms do not lie below `left`."""
    a_inside = a_inside & terms(a_k, left, TERMS, A_LAYOUT, 1, EVEN)
    b_inside = b_inside & terms(b_k, left, TERMS, B_LAYOUT, B_K_AXIS, EVEN)
    a_slab = gl.load(a_ptr + a_offsets, mask=a_inside, other=0.0)
    b_slab = gl.load(b_ptr + b_offsets, mask=b_inside, other=0.0)
    return a_slab, b_slab


@gluon.jit
def thread():
    """The number of this thread in its CTA: a branch on it is one that threads take apart, with no
    barrier inside.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], gl.int32, True, 1)


@gluon.jit
def fragments(a_tile, b_tile, k: gl.constexpr, TERMS: gl.constexpr, MMA: gl.constexpr):
    """What mma.sync wants of TERMS terms from `k` of slabs [rows of A, K] and [columns of B, K] in
    shared memory.
    """
    a_fragment = a_tile.slice(k, TERMS, 1).load(gl.DotOperandLayout(0, MMA, 2))
    b_fragment = b_tile.slice(k, TERMS, 1).permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2))
    return a_fragment, b_fragment


@gluon.jit
def in_order():
    """What stands behind is not read from shared memory before what stands before: the assembler
    would hold more fragments than there are registers. Costs nothing: a warp's lanes go together.
    """
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def products(acc, a_tile, b_tile, TERMS: gl.constexpr, MMA: gl.constexpr):
    """acc + A B of slabs of TERMS terms, by 16, as many as mma.sync takes: no more fragments are
    held at once.
    """
    for k in gl.static_range(0, TERMS, 16):
        if k:
            in_order()
        a_fragment, b_fragment = fragments(a_tile, b_tile, k, 16, MMA)
        acc = mma(a_fragment, b_fragment, acc)
    return acc


@gluon.jit
def by_rows(acc, SHARED: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr = False):
    """The sums in a layout that writes whole rows, by way of shared memory; as they are where
    SHARED is None. HALVES: those of the left half of the columns, and those of the right.
    """
    if SHARED is None:
        return acc
    else:
        tile = gl.allocate_shared_memory(gl.float32, acc.shape, SHARED)
        tile.store(acc)
        if HALVES:
            PART: gl.constexpr = acc.shape[1] // 2
            return tile.slice(0, PART, 1).load(ROWS), tile.slice(PART, PART, 1).load(ROWS)
        else:
            return tile.load(ROWS)


@gluon.jit
def finish(
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EVEN: gl.constexpr,
    WIDE: gl.constexpr,
    ROWS: gl.constexpr,
    HALVES: gl.constexpr = False,
    FUNCTION: gl.constexpr = None,
    GATED: gl.constexpr = False,
    extra=None,
):
    """out = alpha · acc + beta · c, from registers along rows, or what `fused.finish` makes of
    that; c is None without an addend. HALVES: of BLOCK_N columns each, and along rows already.
    """
    m = indices(first_m, BLOCK_M, gl.SliceLayout(1, ROWS), WIDE)
    inside_m = inside(m, M, BLOCK_M, gl.SliceLayout(1, ROWS), EVEN)
    parts = acc if HALVES else (gl.convert_layout(acc, ROWS),)
    c_view, out_view = (c, c_outer, c_inner, c_m, c_n), (out, out_outer, out_inner, out_m, out_n)
    for part in gl.static_range(2 if HALVES and not GATED else 1):
        n = indices(first_n + part * BLOCK_N, BLOCK_N, gl.SliceLayout(0, ROWS), WIDE)
        inside_n = inside(n, N, BLOCK_N, gl.SliceLayout(0, ROWS), EVEN)
        here = (
            m[:, None],
            n[None, :],
            inside_m[:, None],
            inside_n[None, :],
            outer_index,
            inner_index,
        )
        sums = parts if GATED else (parts[part],)
        fused.finish(sums, c_view, out_view, extra, alpha, beta, N, here, FUNCTION, GATED, False)
