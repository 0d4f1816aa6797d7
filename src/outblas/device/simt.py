"""Device code that the rungs on CUDA cores share: where a CTA works, outer products, the way out.

Pointers are tensors; the source line of every access to global memory names its operand's pointer (a_ptr, b_ptr, c_ptr,
out_ptr): by that, `outblas profile --instructions` says which operand an instruction reads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def snake(thread_m: int, thread_n: int) -> tuple[str, str, int]:
    """FMAs down one column of a thread's outputs and up the next, as assembly, its constraints and its outputs.

    Each then shares an operand with the one before it, which the register file need not deliver again. An FFMA that
    reads three registers takes two cycles: there are two banks, and one of them delivers twice.
    """
    columns = min(2, thread_n)
    outputs = columns * thread_m
    order = [*range(thread_m), *(range(outputs - 1, thread_m - 1, -1))]
    text = "\n".join(f"fma.rn.f32 ${i}, ${outputs + i}, ${2 * outputs + i}, ${3 * outputs + i};" for i in order)
    return text, ",".join(["=f"] * outputs + ["f"] * 3 * outputs), outputs


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
    """first, first + 1, …; in 64 bits where offsets are. Those past an edge may wrap: masks keep them out."""
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
def column_of(tile, k: gl.constexpr, TRANSPOSED: gl.constexpr, OUTPUTS: gl.constexpr):
    """Column k of A's slab, as a column of the outputs' layout; TRANSPOSED: the slab lies with k along its rows."""
    if TRANSPOSED:
        return tile.slice(k, 1, 0).permute([1, 0]).load(OUTPUTS)
    else:
        return tile.slice(k, 1, 1).load(OUTPUTS)


@gluon.jit
def row_of(tile, k: gl.constexpr, OUTPUTS: gl.constexpr):
    """Row k of B's slab, as a row of the outputs' layout."""
    return tile.slice(k, 1, 0).load(OUTPUTS)


@gluon.jit
def add_products(acc, column, row, SNAKE: gl.constexpr):
    """acc + column · row; SNAKE: by `snake`, in its order."""
    column, row = gl.broadcast(column, row)
    return gl.inline_asm_elementwise(SNAKE[0], SNAKE[1], [column, row, acc], gl.float32, True, SNAKE[2])


@gluon.jit
def put(tile, slab, TRANSPOSED: gl.constexpr):
    """Slab into shared memory, widened to fp32."""
    if TRANSPOSED:
        tile = tile.permute([1, 0])
    tile.store(slab.to(gl.float32))


@gluon.jit
def finish(
    acc, c, out, alpha, beta, M, N, first_m, first_n, outer_index, inner_index,
    c_outer, c_inner, c_m, c_n, out_outer, out_inner, out_m, out_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, EVEN: gl.constexpr, WIDE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """out = alpha · acc + beta · c, from registers along rows; c is None without an addend."""
    m = indices(first_m, BLOCK_M, gl.SliceLayout(1, ROWS), WIDE)
    n = indices(first_n, BLOCK_N, gl.SliceLayout(0, ROWS), WIDE)
    inside_m = inside(m, M, BLOCK_M, gl.SliceLayout(1, ROWS), EVEN)
    inside_n = inside(n, N, BLOCK_N, gl.SliceLayout(0, ROWS), EVEN)
    mask = inside_m[:, None] & inside_n[None, :]
    result = gl.convert_layout(acc, ROWS) * alpha
    if c is not None:
        c_ptr = c + outer_index * c_outer + inner_index * c_inner + (m[:, None] * c_m + n[None, :] * c_n)
        result += beta * gl.load(c_ptr, mask=mask, other=0.0).to(gl.float32)
    out_ptr = out + outer_index * out_outer + inner_index * out_inner + (m[:, None] * out_m + n[None, :] * out_n)
    gl.store(out_ptr, result.to(out.dtype.element_ty), mask=mask)
