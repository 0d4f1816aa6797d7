"""Device code that the rungs on CUDA cores share: fragments from shared memory, outer products."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def snake(thread_m: int, thread_n: int) -> tuple[str, str, int]:
    """FMAs down one column of a thread's outputs and up the next, as assembly, its constraints and
    its outputs.

    Each then shares an operand with the one before it, which the register file need not deliver
    again. An FFMA that reads three registers takes two cycles: there are two banks, and one of them
    delivers twice.
    """
    columns = min(2, thread_n)
    outputs = columns * thread_m
    order = [*range(thread_m), *(range(outputs - 1, thread_m - 1, -1))]
    text = "\n".join(
        f"fma.rn.f32 ${i}, ${outputs + i}, ${2 * outputs + i}, ${3 * outputs + i};" for i in order
    )
    return text, ",".join(["=f"] * outputs + ["f"] * 3 * outputs), outputs


@gluon.jit
def column_of(tile, k: gl.constexpr, TRANSPOSED: gl.constexpr, OUTPUTS: gl.constexpr):
    """Column k of A's slab, as a column of the outputs' layout; TRANSPOSED: the slab lies with k
    along its rows.
    """
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
    return gl.inline_asm_elementwise(
        SNAKE[0], SNAKE[1], [column, row, acc], gl.float32, True, SNAKE[2]
    )


@gluon.jit
def put(tile, slab, TRANSPOSED: gl.constexpr):
    """Slab into shared memory, widened to fp32."""
    if TRANSPOSED:
        tile = tile.permute([1, 0])
    tile.store(slab.to(gl.float32))
