"""A problem in the form that the kernel computes: operands swapped, batches folded, strides of
three dimensions."""

import math
from dataclasses import replace

from ...core.epilogue import View
from ...core.problem import Problem, transposed, with_row_major_output
from ..core import host
from ..core.config import (
    HopperConfig,
)


def _turned(problem: Problem, config: HopperConfig) -> tuple[Problem, bool]:
    """The product as the kernel computes it, and whether that is the transposed one."""
    problem, crossed = with_row_major_output(problem)
    return (transposed(problem), not crossed) if config.swap else (problem, crossed)


def _one_batch(problem: Problem) -> tuple[Problem, int]:
    """The problem with its longest batch dimension alone, and which that is; the others are walked
    call by call.
    """
    inner = max(range(len(problem.batch)), key=lambda i: problem.batch[i])

    def keep(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (strides[inner], *strides[-2:])

    def aligned(strides: tuple[int, ...], alignment: int) -> int:
        """Of every call's tensor."""
        others = (stride for i, stride in enumerate(strides[:-2]) if i != inner)
        return math.gcd(alignment, *(stride * problem.out_dtype.itemsize for stride in others))

    def kept(view: View) -> View:
        return View(keep(view.strides), aligned(view.strides, view.alignment))

    a, b, out, *others = problem.alignment
    alone = replace(
        problem,
        batch=(problem.batch[inner],),
        a=keep(problem.a),
        b=keep(problem.b),
        out=keep(problem.out),
        epilogue=problem.epilogue.mapped(kept),
        alignment=(a, b, aligned(problem.out, out), *others),
    )
    return alone, inner


def _offset(strides: tuple[int, ...], at: tuple[int, ...], inner: int) -> int:
    others = [stride for i, stride in enumerate(strides[:-2]) if i != inner]
    return sum(i * stride for i, stride in zip(at, others, strict=True))


def _shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Of A, B and C."""
    pairs = (problem.M, problem.K), (problem.K, problem.columns), (problem.M, problem.N)
    return tuple((*problem.batch, *pair) for pair in pairs)


def _given(extents: tuple[int, ...], crossed: bool) -> tuple[int, ...]:
    """Of a shape or strides, those of the tensor that a call gives: rows and columns the other way
    if crossed.
    """
    return (*extents[:-2], extents[-1], extents[-2]) if crossed else extents


def _operand_strides(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    a = host.tma_strides(problem.M, problem.K, problem.a[-2:])
    b = host.tma_strides(problem.K, problem.columns, problem.b[-2:])
    assert a, "aligned() leaves operands that TMA can stride over"
    assert b, "aligned() leaves operands that TMA can stride over"
    return (*problem.a[:-2], *a), (*problem.b[:-2], *b)


def _out_strides(problem: Problem) -> tuple[int, ...]:
    """C's rows or columns contiguous, as they are: those of a single row or column along its
    length. The stride of an extent of 1 is free, and TMA takes 8.
    """
    row, column = problem.out[-2:]
    by_rows, by_columns = column == 1 or problem.N == 1, row == 1 or problem.M == 1
    pair = (row, column)
    if by_columns and (problem.M > problem.N or not by_rows):
        pair = (1, column if problem.N > 1 else 8)
    elif by_rows:
        pair = (row if problem.M > 1 else 8, 1)
    return (*problem.out[:-2], *pair)


def _pieces(problem: Problem, config: HopperConfig) -> int:
    return min(config.split_k, -(-problem.K // config.tile_k))
