"""The layouts with which TMA moves the tensors of a grouped product."""

from ...core.epilogue import View
from ...core.grouped import GroupedProblem
from ...core.problem import Strides


def has_tail(problem: GroupedProblem) -> bool:
    """Returns whether the rows behind the last group are one group more."""
    return problem.zero_tail and problem.form == "ragged_m"


def rows_of_a(problem: GroupedProblem) -> int:
    """Returns how many rows A has."""
    return problem.rows_of_a if problem.gathers else problem.M


def row_major(rows: int, columns: int, strides: Strides) -> tuple[int, int] | None:
    """Returns the strides with which TMA reads contiguous rows; None where it cannot. The stride of
    an extent of 1 can be chosen freely.
    """
    row, column = strides[-2:]
    if column != 1 and columns > 1:
        return None
    row = row if rows > 1 else 8
    return (row, 1) if row > 0 and row % 8 == 0 else None


def column_major(rows: int, columns: int, strides: Strides) -> tuple[int, int] | None:
    """Returns the strides with which TMA reads contiguous columns; None where it cannot."""
    found = row_major(columns, rows, strides[:-3:-1])
    return found and found[::-1]


def matrix_strides(problem: GroupedProblem) -> list[tuple[int, int] | None]:
    """Returns the strides with which TMA reads A and each matrix of B; None where it cannot.

    TMA begins a tile at any coordinate of a dimension that is not the contiguous one; between
    multiples of 16 bytes of that one it would end the launch with an illegal instruction. So the
    ragged dimension must not be contiguous.
    """
    shape_a, shape_b = (rows_of_a(problem), problem.K), (problem.K, problem.N)
    if problem.form == "ragged_k":
        return [column_major(*shape_a, problem.a), row_major(*shape_b, problem.b)]
    along_n = row_major(*shape_b, problem.b)
    return [row_major(*shape_a, problem.a), along_n or column_major(*shape_b, problem.b)]


def granule(problem: GroupedProblem) -> int:
    """Returns the elements of the result in 16 bytes."""
    return 16 // problem.out_dtype.itemsize


def in_granules(problem: GroupedProblem, view: View) -> bool:
    """Returns whether the rows of a tensor of the result's dtype are contiguous, do not repeat, and
    begin at multiples of 16 bytes.
    """
    *steps, column = view.strides
    whole = all(step > 0 and step % granule(problem) == 0 for step in steps)
    return column == 1 and whole and view.alignment >= 16
