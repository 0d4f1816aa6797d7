"""Device code that the Gluon ladders share: indices and masks, k-blocks of operands, and the store
of outputs.

Pointers are tensors. The source line of every access to global memory contains the name of its
operand's pointer (a_ptr, b_ptr, c_ptr, out_ptr): ncu shows that line beside what its instructions
did. The records are defined in `records.py`.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base.compat.triton_private import mma
from outblas.device.fused import gated_columns, matrix_ptr, store_outputs
from outblas.device.records import OutputCoord, TensorRef


class KBlock(NamedTuple):
    """The k-block of A, or of B, that a CTA loads next: rows of A or columns of B, by terms of K.

    Its elements lie at `ptr + offsets`; `mask` marks the rows of A or columns of B that exist, and
    `k` counts the terms from the start of the block. Offsets are used because they take half the
    registers of pointers.
    """

    ptr: Any
    offsets: Any
    mask: Any
    k: Any


@gluon.jit
def indices(first, SIZE: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """Returns first, first + 1, …, in 64 bits where offsets need them. Indices beyond an edge may
    overflow; masks exclude them.
    """
    index = first + gl.arange(0, SIZE, LAYOUT)
    if WIDE:
        index = index.to(gl.int64)
    return index


@gluon.jit
def mask_below(index, end, SIZE: gl.constexpr, LAYOUT: gl.constexpr, EVEN: gl.constexpr):
    """Returns a mask of the indices below `end`. Where tiles divide it, all elements are True and
    the mask compiles away.
    """
    if EVEN:
        return gl.full([SIZE], 1, gl.int1, LAYOUT)
    else:
        return index < end


@gluon.jit
def a_block(a, strides, size, tile, TILE: gl.constexpr, LOAD: gl.constexpr):
    """Returns the first k-block of A for a tile; LOAD is an OperandLayout."""
    return _first_block(
        matrix_ptr(a, strides, tile),
        tile.first_m,
        size.M,
        (strides.row, strides.col),
        TILE.block_m,
        TILE.even_m,
        TILE,
        LOAD,
        False,
    )


@gluon.jit
def b_block(
    b, strides, size, tile, TILE: gl.constexpr, LOAD: gl.constexpr, GATED: gl.constexpr = False
):
    """Returns the first k-block of B for a tile. GATED: the second half of its columns lies N
    columns further in B.
    """
    return _first_block(
        matrix_ptr(b, strides, tile),
        tile.first_n,
        size.N,
        (strides.col, strides.row),
        TILE.block_n,
        TILE.even_n,
        TILE,
        LOAD,
        GATED,
    )


@gluon.jit
def _first_block(
    ptr,
    first,
    end,
    strides,
    ROWS: gl.constexpr,
    EVEN: gl.constexpr,
    TILE: gl.constexpr,
    LOAD: gl.constexpr,
    GATED: gl.constexpr,
):
    """Returns the first k-block of ROWS rows of A, or columns of B, starting at `first`; those
    below `end` exist. `strides` are the stride of these rows or columns and the stride along K.
    """
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(LOAD.k_axis, LOAD.copy)
    K_LAYOUT: gl.constexpr = gl.SliceLayout(1 - LOAD.k_axis, LOAD.copy)
    row = indices(first, ROWS, ROW_LAYOUT, TILE.wide)
    output_column = row
    if GATED:
        column = gl.arange(0, ROWS, ROW_LAYOUT)
        output_column, row = gated_columns(row, column, end, ROWS // 2)
    k = indices(0, TILE.block_k, K_LAYOUT, TILE.wide)
    if LOAD.single:
        # Without this move, LLVM as of Triton 3.6 would pair these indices with those of an operand
        # that is loaded by vectors, into one vector of two shifts, whose bits overflow from one
        # into the other.
        k = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [k.to(gl.int32)], gl.int32, True, 1
        ).to(k.dtype)
    mask = mask_below(output_column, end, ROWS, ROW_LAYOUT, EVEN).expand_dims(LOAD.k_axis)
    row_offsets = row.expand_dims(LOAD.k_axis) * strides[0]
    k_offsets = k.expand_dims(1 - LOAD.k_axis) * strides[1]
    # The order of the sum must follow the axes; with the other order the compiler generates
    # different code.
    offsets = row_offsets + k_offsets if LOAD.k_axis == 1 else k_offsets + row_offsets
    return KBlock(ptr, offsets, mask, k)


@gluon.jit
def advance(a_next, b_next, strides, TILE: gl.constexpr):
    """Returns the next k-blocks of A and B by increasing their offsets."""
    a_offsets = a_next.offsets + TILE.block_k * strides.a.col
    b_offsets = b_next.offsets + TILE.block_k * strides.b.row
    return (
        KBlock(a_next.ptr, a_offsets, a_next.mask, a_next.k),
        KBlock(b_next.ptr, b_offsets, b_next.mask, b_next.k),
    )


@gluon.jit
def advance_ptrs(a_next, b_next, strides, TILE: gl.constexpr):
    """Returns the next k-blocks of A and B by moving their pointers; the offsets do not change."""
    a_ptr = a_next.ptr + TILE.block_k * strides.a.col
    b_ptr = b_next.ptr + TILE.block_k * strides.b.row
    return (
        KBlock(a_ptr, a_next.offsets, a_next.mask, a_next.k),
        KBlock(b_ptr, b_next.offsets, b_next.mask, b_next.k),
    )


@gluon.jit
def block_mask(block, left, LOAD: gl.constexpr, EVEN: gl.constexpr):
    """Returns a mask of the elements that exist in a k-block when `left` terms of K remain. EVEN:
    all terms exist.
    """
    K_LAYOUT: gl.constexpr = gl.SliceLayout(1 - LOAD.k_axis, LOAD.copy)
    k_mask = mask_below(block.k, left, block.k.shape[0], K_LAYOUT, EVEN)
    k_mask = k_mask.expand_dims(1 - LOAD.k_axis)
    return block.mask & k_mask if LOAD.k_axis == 1 else k_mask & block.mask


@gluon.jit
def load(a_ptr, b_ptr, a_mask, b_mask):
    """Loads the elements at pointers to A and to B, with zeros where the masks are False."""
    a_regs = gl.load(a_ptr, mask=a_mask, other=0.0)
    b_regs = gl.load(b_ptr, mask=b_mask, other=0.0)
    return a_regs, b_regs


@gluon.jit
def load_blocks(
    a_next, b_next, left, A_LOAD: gl.constexpr, B_LOAD: gl.constexpr, EVEN: gl.constexpr
):
    """Loads a k-block of A and one of B into registers, with zeros beyond the `left` remaining
    terms.
    """
    a_mask = block_mask(a_next, left, A_LOAD, EVEN)
    b_mask = block_mask(b_next, left, B_LOAD, EVEN)
    a_ptr, b_ptr = a_next.ptr, b_next.ptr
    a_regs = gl.load(a_ptr + a_next.offsets, mask=a_mask, other=0.0)
    b_regs = gl.load(b_ptr + b_next.offsets, mask=b_mask, other=0.0)
    return a_regs, b_regs


@gluon.jit
def alloc_stages(
    COUNT: gl.constexpr,
    DTYPE: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    LOAD: gl.constexpr,
):
    """Allocates COUNT stages in shared memory for k-blocks of ROWS rows of A, or columns of B. Each
    stage is a separate allocation, because Triton puts no barrier between accesses to different
    allocations.
    """
    BLOCK_K: gl.constexpr = TILE.block_k
    stages = ()
    for _ in gl.static_range(COUNT):
        stages += (gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_K], LOAD.shared),)
    return stages


@gluon.jit
def thread_index():
    """Returns the index of this thread in its CTA. Threads can diverge at a branch on this value,
    so the branch must not contain a barrier.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], gl.int32, True, 1)


@gluon.jit
def load_fragments(a_smem, b_smem, k: gl.constexpr, TERMS: gl.constexpr, MMA: gl.constexpr):
    """Loads the operands of mma.sync for TERMS terms, starting at `k`, from the k-blocks [rows of
    A, K] and [columns of B, K] in shared memory.
    """
    a_fragment = a_smem.slice(k, TERMS, 1).load(gl.DotOperandLayout(0, MMA, 2))
    b_fragment = b_smem.slice(k, TERMS, 1).permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2))
    return a_fragment, b_fragment


@gluon.jit
def keep_order():
    """Prevents the assembler from moving later reads of shared memory above earlier ones. Otherwise
    it would hold more fragments than there are registers. The barrier costs nothing, because the
    lanes of a warp run in lockstep here.
    """
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def mma_k_block(acc, a_smem, b_smem, TERMS: gl.constexpr, MMA: gl.constexpr):
    """Returns acc + A B for k-blocks of TERMS terms. Each mma.sync takes 16 terms, and only the
    fragments of one are held at a time.
    """
    for k in gl.static_range(0, TERMS, 16):
        if k:
            keep_order()
        a_fragment, b_fragment = load_fragments(a_smem, b_smem, k, 16, MMA)
        acc = mma(a_fragment, b_fragment, acc)
    return acc


@gluon.jit
def sums_in_rows(acc, OUTPUTS: gl.constexpr):
    """Converts the accumulators to the layout in which they are stored, through shared memory if
    OUTPUTS (an OutputLayout) has a layout for it. Returns a tuple of all columns, or of the left
    half and the right half.
    """
    if OUTPUTS.shared is None:
        return (gl.convert_layout(acc, OUTPUTS.rows),)
    else:
        smem = gl.allocate_shared_memory(gl.float32, acc.shape, OUTPUTS.shared)
        smem.store(acc)
        if OUTPUTS.halves:
            HALF: gl.constexpr = acc.shape[1] // 2
            left = smem.slice(0, HALF, 1).load(OUTPUTS.rows)
            right = smem.slice(HALF, HALF, 1).load(OUTPUTS.rows)
            return left, right
        else:
            return (smem.load(OUTPUTS.rows),)


@gluon.jit
def store(
    acc,
    c,
    out,
    alpha,
    beta,
    size,
    strides,
    tile,
    TILE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    EPILOGUE: gl.constexpr = None,
    epilogue_tensors=None,
):
    """Stores out = alpha · acc + beta · C for a tile, with the epilogue applied if there is one. C
    is None without an addend.
    """
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, OUTPUTS.rows)
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, OUTPUTS.rows)
    GATED: gl.constexpr = EPILOGUE is not None and EPILOGUE.gated
    c_ref, out_ref = TensorRef(c, *strides.c), TensorRef(out, *strides.out)
    parts = sums_in_rows(acc, OUTPUTS)
    COLUMNS: gl.constexpr = parts[0].shape[1]
    m = indices(tile.first_m, TILE.block_m, ROW_LAYOUT, TILE.wide)
    mask_m = mask_below(m, size.M, TILE.block_m, ROW_LAYOUT, TILE.even_m)
    for part in gl.static_range(2 if OUTPUTS.halves and not GATED else 1):
        n = indices(tile.first_n + part * COLUMNS, COLUMNS, COLUMN_LAYOUT, TILE.wide)
        mask_n = mask_below(n, size.N, COLUMNS, COLUMN_LAYOUT, TILE.even_n)
        coord = OutputCoord(
            m[:, None], n[None, :], mask_m[:, None], mask_n[None, :], tile.outer, tile.inner
        )
        sums = parts if GATED else (parts[part],)
        store_outputs(
            sums, c_ref, out_ref, epilogue_tensors, alpha, beta, size.N, coord, EPILOGUE, False
        )
