"""Where scales that vary along K must lie for TMA to load them into a stage. Without a GPU or the
DSL.
"""

from dataclasses import replace

from ...core.epilogue import View
from ...core.problem import Problem

GRANULE = 4  # scales in 16 bytes, which TMA loads together


def are_rows_wide(view: View | None, rows: int) -> bool:
    """Returns whether TMA can load the scales of so many rows of A, whose view is over (rows,
    blocks of K). It loads whole granules of 16 bytes, the last rows' too.
    """
    assert view, "a call of fp8 operands has scales"
    along_rows, along_k = view.strides
    whole = rows % GRANULE == along_k % GRANULE == 0
    return along_rows == 1 and whole and view.alignment >= 16


def are_columns_wide(view: View | None, columns: int) -> bool:
    """The same for the scales of columns of B, whose view is over (blocks of K, columns)."""
    assert view, "a call of fp8 operands has scales"
    return are_rows_wide(replace(view, strides=view.strides[::-1]), columns)


def are_all_wide(problem: Problem) -> bool:
    """Returns whether TMA can load the scales of rows of A and those of columns of B, where each
    row and column has its own.
    """
    scale_a, scale_b = problem.epilogue.scale_a, problem.epilogue.scale_b
    return are_rows_wide(scale_a, problem.M) and are_columns_wide(scale_b, problem.N)
