"""Device code that the rungs on CUDA cores share: fragments from shared memory, and outer
products.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def snake(thread_m: int, thread_n: int) -> tuple[str, str, int]:
    """Returns assembly that computes FMAs down one column of a thread's outputs and up the next,
    with its constraints and number of outputs.

    In this order each FMA shares an operand with the previous one, so the register file does not
    deliver that operand again. An FFMA that reads three different registers takes two cycles,
    because the register file has two banks, and one of them must deliver two operands.
    """
    columns = min(2, thread_n)
    outputs = columns * thread_m
    order = [*range(thread_m), *(range(outputs - 1, thread_m - 1, -1))]
    text = "\n".join(
        f"fma.rn.f32 ${i}, ${outputs + i}, ${2 * outputs + i}, ${3 * outputs + i};" for i in order
    )
    return text, ",".join(["=f"] * outputs + ["f"] * 3 * outputs), outputs


@gluon.jit
def alloc_k_block(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LOAD: gl.constexpr):
    """Allocates shared memory for a k-block of ROWS by COLUMNS elements, widened to fp32."""
    SHAPE: gl.constexpr = [COLUMNS, ROWS] if LOAD.transposed else [ROWS, COLUMNS]
    return gl.allocate_shared_memory(gl.float32, SHAPE, LOAD.shared)


@gluon.jit
def store_k_blocks(a_smem, b_smem, a_regs, b_regs, A_LOAD: gl.constexpr, B_LOAD: gl.constexpr):
    """Stores k-blocks of A and B to shared memory, widened to fp32."""
    if A_LOAD.transposed:
        a_smem = a_smem.permute([1, 0])
    if B_LOAD.transposed:
        b_smem = b_smem.permute([1, 0])
    a_smem.store(a_regs.to(gl.float32))
    b_smem.store(b_regs.to(gl.float32))


@gluon.jit
def load_fragments(a_smem, b_smem, k: gl.constexpr, A_LOAD: gl.constexpr, SUMS: gl.constexpr):
    """Loads column k of A's k-block as a column of the accumulators' layout, and row k of B's as a
    row of it.
    """
    if A_LOAD.transposed:
        column = a_smem.slice(k, 1, 0).permute([1, 0]).load(SUMS)
    else:
        column = a_smem.slice(k, 1, 1).load(SUMS)
    return column, b_smem.slice(k, 1, 0).load(SUMS)


@gluon.jit
def add_products(acc, column, row, SNAKE: gl.constexpr):
    """Returns acc + column · row, computed by the assembly of `snake`, in its order."""
    column, row = gl.broadcast(column, row)
    return gl.inline_asm_elementwise(
        SNAKE[0], SNAKE[1], [column, row, acc], gl.float32, True, SNAKE[2]
    )
