"""Records that Triton and Gluon kernels take as arguments and pass on in device code.

A NamedTuple holds values of a launch: tensors, sizes, strides. A frozen dataclass holds values that
are known when a kernel is compiled, and is passed as one `constexpr`. Triton flattens tuples; a
field whose value is known at compile time (a stride of 1, a missing tensor) takes no kernel
parameter. A tuple must hold either tuples or values, because Triton 3.6 forgets the known values of
a mixed one.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Strides(NamedTuple):
    """The strides, in elements, of a matrix or a batch of matrices.

    `outer` and `inner` are the strides of the two batch dimensions that a launch covers; `row`
    leads from a row to the next, `col` from a column to the next. `row` is None where all rows are
    the same, as in a bias; `col` where all columns are.
    """

    outer: Any
    inner: Any
    row: Any
    col: Any


class ProblemSize(NamedTuple):
    """The sizes of C[M, N] = A[M, K] B[K, N], and the inner extent of the batch."""

    M: Any
    N: Any
    K: Any
    inner: Any


class ProblemStrides(NamedTuple):
    """The Strides of a product's tensors. Those of C are unused without an addend."""

    a: Any
    b: Any
    c: Any
    out: Any


class TensorRef(NamedTuple):
    """A pointer to the first element of a tensor, and its strides. The pointer is None where the
    tensor is missing.
    """

    ptr: Any
    outer: Any
    inner: Any
    row: Any
    col: Any


class EpilogueRefs(NamedTuple):
    """The tensors that an epilogue reads and writes besides C and the output, as TensorRefs."""

    bias: Any
    residual: Any
    aux: Any


class TileOrigin(NamedTuple):
    """The part of the output that a CTA computes: its first row and column, and two indices that
    select the product in the batch.
    """

    first_m: Any
    first_n: Any
    outer: Any
    inner: Any


class OutputCoord(NamedTuple):
    """The elements of the output that a thread stores: row indices as a column, column indices as a
    row, masks of the indices that exist, and two indices that select the product in the batch.
    """

    m: Any
    n: Any
    mask_m: Any
    mask_n: Any
    outer: Any
    inner: Any


@dataclass(frozen=True)
class TileTraits:
    """The tile of a CTA, in elements, and the assumptions that the compiler may make about it.

    `name` is the kernel's name in profilers. CTAs process `group_m` rows of tiles together, column
    by column. `even_m`, `even_n`, `even_k`: tiles divide M, N or K, so indices need no mask.
    `wide`: indices need 64 bits.
    """

    name: str
    block_m: int
    block_n: int
    block_k: int
    group_m: int
    even_m: bool
    even_n: bool
    even_k: bool
    wide: bool


@dataclass(frozen=True)
class OperandLayout:
    """How a CTA of a Gluon kernel loads k-blocks of A, or of B.

    `copy` is the layout of a k-block in registers, whose axis `k_axis` runs along K; `shared` is
    its layout in shared memory, None where fragments are loaded straight from global memory.
    `transposed`: in shared memory the terms of K run along the columns of the k-block. `single`:
    elements are loaded one by one. `threads`: the number of threads that have something to load;
    the others would repeat their work.
    """

    copy: Any
    shared: Any = None
    k_axis: int = 1
    transposed: bool = False
    single: bool = False
    threads: int = 0


@dataclass(frozen=True)
class OutputLayout:
    """How a CTA of a Gluon kernel holds its accumulators, and how it stores them.

    `sums` is the register layout in which they are computed, `rows` the register layout in which
    they are stored. `shared` is the layout of the tile in shared memory that converts one into the
    other; None where registers are converted directly. `halves`: the left half of the columns is
    stored before the right half, because an epilogue for all columns at once would take too many
    registers.
    """

    sums: Any
    rows: Any
    shared: Any = None
    halves: bool = False


@dataclass(frozen=True)
class EpilogueTraits:
    """The compile-time part of an epilogue: the function, a key of `epilogue.FUNCTIONS` or "", and
    whether the first half of the columns gates the second.
    """

    function: str
    gated: bool
