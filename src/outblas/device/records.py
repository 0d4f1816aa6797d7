"""Records that Triton and Gluon kernels take as arguments, and that their device code hands on.

A NamedTuple holds values of a launch: tensors, sizes, strides. A frozen dataclass holds what is
known when a kernel is compiled, and is one `constexpr`. Triton flattens the tuples; a field whose
value is known when the kernel is compiled (a stride of 1, a missing tensor) takes no parameter.
A tuple holds either tuples or values: of a mixed one Triton 3.6 forgets what is known.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Strides(NamedTuple):
    """How a matrix, or a batch of them, lies in memory, in elements.

    `outer` and `inner` step along the two dimensions of the batch that a launch walks; `row` leads
    from a row to the next, `col` from a column to the next. `row` is None where all rows are the
    same, as in a bias, `col` where all columns are.
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
    """The Strides of a product's tensors; those of C are of no use without an addend."""

    a: Any
    b: Any
    c: Any
    out: Any


class TensorRef(NamedTuple):
    """A pointer to the first element of a tensor, and its strides. Without the tensor, the pointer
    is None.
    """

    ptr: Any
    outer: Any
    inner: Any
    row: Any
    col: Any


class EpilogueTensors(NamedTuple):
    """What an epilogue reads and writes beside C and the output: TensorRefs."""

    bias: Any
    residual: Any
    aux: Any


class WorkTile(NamedTuple):
    """The part of the output that a CTA computes: its first row and column, and the two indices of
    its product in the batch.
    """

    first_m: Any
    first_n: Any
    outer: Any
    inner: Any


class OutputCoord(NamedTuple):
    """Elements of the output that a thread stores: rows as a column of indices, columns as a row of
    them, masks that say which of these exist, and the two indices of the product in the batch.
    """

    m: Any
    n: Any
    mask_m: Any
    mask_n: Any
    outer: Any
    inner: Any


@dataclass(frozen=True)
class TileTraits:
    """The tile of a CTA, in elements, and what the compiler may take for granted about it.

    `name` is the kernel's, for profilers. `group_m` rows of tiles are walked together, column by
    column. `even_m`, `even_n`, `even_k`: tiles divide M, N, K, so that no index needs a mask.
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

    `copy` is the layout of a k-block in registers, in which axis `k_axis` runs along K; `shared`
    its layout in shared memory, None where fragments come straight from global memory.
    `transposed`: the k-block lies in shared memory with the terms of K along its columns.
    `single`: its elements are loaded one by one. `threads`: how many threads have something to
    load; the rest would repeat the work of others.
    """

    copy: Any
    shared: Any = None
    k_axis: int = 1
    transposed: bool = False
    single: bool = False
    threads: int = 0


@dataclass(frozen=True)
class OutputLayout:
    """How a CTA of a Gluon kernel holds its sums, and how it stores them.

    `sums` is the layout of registers in which they are computed, `rows` that in which they leave;
    `shared` that of the tile in shared memory through which they get from one to the other, None
    where they go from register to register. `halves`: the left half of the columns leaves before
    the right one, for an epilogue of all of them takes too many registers.
    """

    sums: Any
    rows: Any
    shared: Any = None
    halves: bool = False


@dataclass(frozen=True)
class EpilogueTraits:
    """What follows alpha · A B + beta · C: a key of `epilogue.FUNCTIONS`, or "", and whether it is
    gated by the first half of the columns.
    """

    function: str
    gated: bool
