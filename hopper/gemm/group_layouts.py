"""The layouts with which TMA moves the tensors of a grouped product."""

from dataclasses import replace

import torch

from outblas.call.epilogue import View
from outblas.call.grouped import GroupedProblem
from outblas.call.problem import Strides


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


def words_reason(problem: GroupedProblem) -> str | None:
    """Returns why fp8 operands cannot be read as 16-bit words of two values; None if they can."""
    outer_a, outer_b = problem.a[:-1], (*problem.b[:-2], problem.b[-1])
    given = (outer_a, problem.a[-1]), (outer_b, problem.b[-2])
    extents = (rows_of_a(problem),), (*(problem.groups for _ in problem.b[:-2]), problem.N)
    for i, ((outer, along_k), sizes) in enumerate(zip(given, extents, strict=True)):
        whole = all(
            step % 2 == 0 and (size == 1 or (step > 0 and step % 16 == 0))
            for step, size in zip(outer, sizes, strict=True)
        )
        if along_k != 1 or not whole or problem.K % 2 or problem.alignment[i] < 16:
            name, strides = problem.names[i], (problem.a, problem.b)[i]
            return (
                "it needs fp8 operands at multiples of 16 bytes, contiguous along an even K, with "
                f"other strides that are positive multiples of 16, but {name} has strides "
                f"{strides} and {problem.K} terms at an address that is a multiple of "
                f"{problem.alignment[i]}"
            )
    return None


def in_words(problem: GroupedProblem) -> GroupedProblem:
    """Returns a product with the operands as TMA moves them: of two fp8 values that follow one
    another a word of 16 bits. Its scales and the groups of its terms are those of the values.
    """
    if problem.scales is None:
        return problem
    *lead, _, along_n = problem.b
    return replace(
        problem,
        K=problem.K // 2,
        a=(problem.a[0] // 2, 1),
        b=(*(step // 2 for step in lead), 1, along_n // 2),
        dtype=torch.bfloat16,
    )


def matrix_strides(problem: GroupedProblem) -> list[tuple[int, int] | None]:
    """Returns the strides with which TMA reads A and each matrix of B; None where it cannot.

    TMA begins a tile at any coordinate of a dimension that is not the contiguous one; between
    multiples of 16 bytes of that one it would end the launch with an illegal instruction. So the
    ragged dimension must not be contiguous, unless groups end at blocks of 128 terms of fp8, whose
    tensor cores read contiguous terms only.
    """
    shape_a, shape_b = (rows_of_a(problem), problem.K), (problem.K, problem.N)
    if problem.scales is not None:
        return [row_major(*shape_a, problem.a), column_major(*shape_b, problem.b)]
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
