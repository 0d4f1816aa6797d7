"""Device code that the Gluon ladders share: indices and masks, k-blocks of operands, the way out.

Pointers are tensors; the source line of every access to global memory names its operand's pointer
(a_ptr, b_ptr, c_ptr, out_ptr): by that, `outblas profile --instructions` says which operand an
instruction reads. The records are those of `records.py`.
"""

# mypy: disable-error-code="assignment,no-untyped-def,untyped-decorator"

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.compat.triton_private import mma
from .fused import gated_columns, store_outputs
from .records import OutputCoord, TensorRef
from .work_tile import matrix_ptr


class KBlock(NamedTuple):
    """The k-block of A, or of B, that a CTA loads next: rows of A or columns of B, by terms of K.

    Its elements lie at `ptr + offsets`; `mask` says which rows of A, or columns of B, exist, and
    `k` counts the terms from the block's first. Offsets take half the registers of pointers.
    """

    ptr: Any
    offsets: Any
    mask: Any
    k: Any


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
def mask_below(index, end, SIZE: gl.constexpr, LAYOUT: gl.constexpr, EVEN: gl.constexpr):
    """Which indices lie below `end`; where tiles divide it, a mask of ones, which compiles away."""
    if EVEN:
        return gl.full([SIZE], 1, gl.int1, LAYOUT)
    else:
        return index < end


@gluon.jit
def a_block(a, strides, size, tile, TILE: gl.constexpr, LOAD: gl.constexpr):
    """The first k-block of A for a tile; LOAD is an OperandLayout."""
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
    """The first k-block of B for a tile. GATED: the second half of its columns lies N columns
    further.
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
    """The first k-block of ROWS rows of A, or columns of B, from `first`, of which those below
    `end` exist; `strides` lead to the next of them, and along K.
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
        # LLVM as in Triton 3.6 would pair these indices with those of an operand that is loaded by
        # vectors, as one vector of two shifts, and the bits that overflow from one into the other.
        k = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [k.to(gl.int32)], gl.int32, True, 1
        ).to(k.dtype)
    mask = mask_below(output_column, end, ROWS, ROW_LAYOUT, EVEN).expand_dims(LOAD.k_axis)
    row_offsets = row.expand_dims(LOAD.k_axis) * strides[0]
    k_offsets = k.expand_dims(1 - LOAD.k_axis) * strides[1]
    # In the order of the axes: in another one the compiler finds other code.
    offsets = row_offsets + k_offsets if LOAD.k_axis == 1 else k_offsets + row_offsets
    return KBlock(ptr, offsets, mask, k)


@gluon.jit
def advance(a_next, b_next, strides, TILE: gl.constexpr):
    """The next k-blocks of A and of B, by their offsets."""
    a_offsets = a_next.offsets + TILE.block_k * strides.a.col
    b_offsets = b_next.offsets + TILE.block_k * strides.b.row
    return (
        KBlock(a_next.ptr, a_offsets, a_next.mask, a_next.k),
        KBlock(b_next.ptr, b_offsets, b_next.mask, b_next.k),
    )


@gluon.jit
def advance_ptrs(a_next, b_next, strides, TILE: gl.constexpr):
    """The next k-blocks of A and of B, by their pointers: offsets stay as they are."""
    a_ptr = a_next.ptr + TILE.block_k * strides.a.col
    b_ptr = b_next.ptr + TILE.block_k * strides.b.row
    return (
        KBlock(a_ptr, a_next.offsets, a_next.mask, a_next.k),
        KBlock(b_ptr, b_next.offsets, b_next.mask, b_next.k),
    )


@gluon.jit
def block_mask(block, left, LOAD: gl.constexpr, EVEN: gl.constexpr):
    """Which elements of a k-block exist where `left` terms of K are left; EVEN: all terms do."""
    K_LAYOUT: gl.constexpr = gl.SliceLayout(1 - LOAD.k_axis, LOAD.copy)
    k_mask = mask_below(block.k, left, block.k.shape[0], K_LAYOUT, EVEN)
    k_mask = k_mask.expand_dims(1 - LOAD.k_axis)
    return block.mask & k_mask if LOAD.k_axis == 1 else k_mask & block.mask


@gluon.jit
def load(a_ptr, b_ptr, a_mask, b_mask):
    """What lies at pointers to A and to B, zeros where masks are off."""
    a_regs = gl.load(a_ptr, mask=a_mask, other=0.0)
    b_regs = gl.load(b_ptr, mask=b_mask, other=0.0)
    return a_regs, b_regs


@gluon.jit
def load_blocks(
    a_next, b_next, left, A_LOAD: gl.constexpr, B_LOAD: gl.constexpr, EVEN: gl.constexpr
):
    """A k-block of A and one of B in registers, with zeros where fewer than all of its terms are
    left.
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
    """So many stages in shared memory for k-blocks of ROWS rows of A, or columns of B. Each is an
    allocation of its own: between accesses to different ones Triton puts no barrier.
    """
    BLOCK_K: gl.constexpr = TILE.block_k
    stages = ()
    for _ in gl.static_range(COUNT):
        stages += (gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_K], LOAD.shared),)
    return stages


@gluon.jit
def thread_index():
    """The number of this thread in its CTA: a branch on it is one that threads take apart, with no
    barrier inside.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], gl.int32, True, 1)


@gluon.jit
def load_fragments(a_smem, b_smem, k: gl.constexpr, TERMS: gl.constexpr, MMA: gl.constexpr):
    """The operands of mma.sync for TERMS terms from `k` of the k-blocks [rows of A, K] and [columns
    of B, K] in shared memory.
    """
    a_fragment = a_smem.slice(k, TERMS, 1).load(gl.DotOperandLayout(0, MMA, 2))
    b_fragment = b_smem.slice(k, TERMS, 1).permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2))
    return a_fragment, b_fragment


@gluon.jit
def keep_order():
    """No read of shared memory that stands behind this comes before one that stands in front: the
    assembler would hold more fragments than there are registers. It costs nothing, for the lanes of
    a warp go together.
    """
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def mma_k_block(acc, a_smem, b_smem, TERMS: gl.constexpr, MMA: gl.constexpr):
    """acc + A B of k-blocks of TERMS terms, by 16, as many as mma.sync takes: no more fragments are
    held at once.
    """
    for k in gl.static_range(0, TERMS, 16):
        if k:
            keep_order()
        a_fragment, b_fragment = load_fragments(a_smem, b_smem, k, 16, MMA)
        acc = mma(a_fragment, b_fragment, acc)
    return acc


@gluon.jit
def sums_in_rows(acc, OUTPUTS: gl.constexpr):
    """The sums in the layout in which they are stored, through shared memory where OUTPUTS, an
    OutputLayout, has room there: a tuple of all columns, or of the left half and the right half.
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
    """out = alpha · acc + beta · C for a tile of sums, or what an epilogue makes of that; C is None
    without an addend.
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
