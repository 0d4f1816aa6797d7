"""Where scales that vary along K must lie for TMA to load them into a stage. Without a GPU or the
DSL.
"""

from outblas.call.epilogue import View
from outblas.call.problem import Problem

GRANULE = 4  # scales in 16 bytes, which TMA loads together


def is_wide(along: int, along_k: int, extents: tuple[int, ...], alignment: int) -> bool:
    """Returns whether TMA can load scales of which those of neighbouring rows or columns are
    `along` apart, and those of neighbouring blocks of K `along_k`.

    It loads whole granules of 16 bytes, the last ones' too. `extents`: how many rows or columns
    there are, and how far the scales of groups are apart where groups have scales of their own.
    """
    whole = all(step % GRANULE == 0 for step in (*extents, along_k))
    return along == 1 and whole and alignment >= 16


def are_rows_wide(view: View | None, rows: int) -> bool:
    """Returns `is_wide` for the scales of rows of A, whose view is over (rows, blocks of K)."""
    assert view, "a call of fp8 operands has scales"
    along, along_k = view.strides
    return is_wide(along, along_k, (rows,), view.alignment)


def are_columns_wide(view: View | None, columns: int) -> bool:
    """Returns `is_wide` for the scales of columns of B, whose view is over (blocks of K,
    columns).
    """
    assert view, "a call of fp8 operands has scales"
    along_k, along = view.strides
    return is_wide(along, along_k, (columns,), view.alignment)


def are_all_wide(problem: Problem) -> bool:
    """Returns whether TMA can load the scales of rows of A and those of columns of B, where each
    row and column has its own.
    """
    scale_a, scale_b = problem.epilogue.scale_a, problem.epilogue.scale_b
    return are_rows_wide(scale_a, problem.M) and are_columns_wide(scale_b, problem.N)
