"""A problem in the form that `hopper.gemm` computes: operands that TMA can load, C in the kernel's
orientation, and one batch dimension per launch.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from outblas.call.epilogue import View
from outblas.call.problem import Problem, transposed, transposed_strides, with_row_major_output
from outblas.hopper.gemm import operand_copies
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.tma_views import tma_strides

ROWS = (1 << 31) - 1  # a number of rows that no problem has, and that stands for any


class TensorView(NamedTuple):
    """The shape and strides, in elements, with which a launch views a tensor of the caller."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class CanonicalProblem:
    """The form in which `hopper.gemm` computes a problem, reached in three steps:

    1. An operand that TMA cannot load is copied first (`operand_copies`).
    2. A C stored by columns is computed as C^T = B^T A^T. So is a product whose config has
       `swap_ab`; the two cancel each other.
    3. Where there are several batch dimensions, a launch covers the longest of them, and the host
       loops over the others.

    given: the problem as the caller states it.
    aligned: the problem after step 1; A, B and C are still the caller's.
    product: the problem after step 2, with all its batch dimensions.
    launch: the problem after step 3: what one launch computes.
    copies: whether the caller's A and B are copied first.
    transposed: whether `product` is the transposed one, so that its A is the caller's B.
    batch_dim: the batch dimension of `product` that `launch` covers, where there are several.
    """

    given: Problem
    aligned: Problem
    product: Problem
    launch: Problem
    copies: tuple[bool, bool]
    transposed: bool
    batch_dim: int = 0

    @property
    def loops(self) -> bool:
        """Whether the host loops over batch dimensions."""
        return len(self.product.batch) > 1

    def with_rows(self, rows: int) -> "CanonicalProblem":
        """Returns the form with another number of rows, if both are more than one, of a problem
        without a batch and copies.
        """
        given, launch = self.given.resized(M=rows), self.launch_of(rows)
        return CanonicalProblem(given, given, launch, launch, self.copies, self.transposed)

    def launch_of(self, rows: int) -> Problem:
        """Returns `launch` of `with_rows`."""
        sizes = {"N": rows} if self.transposed else {"M": rows}
        return self.launch.resized(**sizes)

    def matrix_views(self) -> tuple[TensorView, TensorView, TensorView]:
        """Returns the views of the caller's tensors that a launch takes as A, B and C."""
        problem = self.launch
        a, b = operand_strides(problem)
        return (
            self.view((problem.M, problem.K), a),
            self.view((problem.K, problem.columns), b),
            self.view((problem.M, problem.N), output_strides(problem)),
        )

    def view(self, shape: tuple[int, int], strides: tuple[int, ...]) -> TensorView:
        """Returns the view of a caller's tensor that is a matrix of this shape in a launch, or a
        batch of them. Rows and columns are exchanged where the product is transposed.
        """
        return view_of_caller((*self.launch.batch, *shape), strides, self.transposed)

    def batch_indices(self) -> Iterator[tuple[int, ...]]:
        """Yields, for each launch of a call, its indices in the batch dimensions that the host
        loops over.
        """
        batch = self.product.batch
        return itertools.product(
            *(range(extent) for dim, extent in enumerate(batch) if dim != self.batch_dim)
        )


def canonicalize(problem: Problem, config: HopperConfig) -> CanonicalProblem:
    """Returns the problem in the form that the kernel computes with this config."""
    copies = operand_copies.needs_copy(problem)
    aligned = operand_copies.with_copies(problem, copies)
    product, swapped = orient(aligned, config)
    launch, batch_dim = single_batch(product) if len(product.batch) > 1 else (product, 0)
    return CanonicalProblem(problem, aligned, product, launch, copies, swapped, batch_dim)


def orient(problem: Problem, config: HopperConfig) -> tuple[Problem, bool]:
    """Returns the product or its transpose, depending on which the kernel computes, and whether it
    is the transpose.
    """
    problem, swapped = with_row_major_output(problem)
    return (transposed(problem), not swapped) if config.swap_ab else (problem, swapped)


def single_batch(problem: Problem) -> tuple[Problem, int]:
    """Returns the problem with only its longest batch dimension, and the index of that dimension.
    The alignments hold for the tensors of every launch.
    """
    batch_dim = max(range(len(problem.batch)), key=lambda i: problem.batch[i])

    def kept(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (strides[batch_dim], *strides[-2:])

    def alignment_of_all(strides: tuple[int, ...], alignment: int) -> int:
        looped = (stride for i, stride in enumerate(strides[:-2]) if i != batch_dim)
        return math.gcd(alignment, *(stride * problem.out_dtype.itemsize for stride in looped))

    def kept_view(view: View) -> View:
        return View(kept(view.strides), alignment_of_all(view.strides, view.alignment))

    a, b, out, *others = problem.alignment
    launch = replace(
        problem,
        batch=(problem.batch[batch_dim],),
        a=kept(problem.a),
        b=kept(problem.b),
        out=kept(problem.out),
        epilogue=problem.epilogue.mapped(kept_view),
        alignment=(a, b, alignment_of_all(problem.out, out), *others),
    )
    return launch, batch_dim


def batch_offset(strides: tuple[int, ...], indices: tuple[int, ...], batch_dim: int) -> int:
    """Returns the elements from the start of a tensor to the start of a launch's part. `indices`
    are the indices in all batch dimensions except `batch_dim`.
    """
    looped = [stride for i, stride in enumerate(strides[:-2]) if i != batch_dim]
    return sum(i * stride for i, stride in zip(indices, looped, strict=True))


def view_of_caller(
    shape: tuple[int, ...], strides: tuple[int, ...], transposed: bool
) -> TensorView:
    """Returns the caller's view of a launch's tensor."""
    if not transposed:
        return TensorView(shape, strides)
    return TensorView(transposed_strides(shape), transposed_strides(strides))


def operand_strides(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the strides of A and B with which TMA loads them."""
    a = tma_strides(problem.M, problem.K, problem.a[-2:])
    b = tma_strides(problem.K, problem.columns, problem.b[-2:])
    assert a, "operand_copies makes operands that TMA can load"
    assert b, "operand_copies makes operands that TMA can load"
    return (*problem.a[:-2], *a), (*problem.b[:-2], *b)


def output_strides(problem: Problem) -> tuple[int, ...]:
    """Returns the strides of C. Its rows or columns keep their contiguity; a single row or column
    is contiguous along its length. The stride of an extent of 1 is free, and 8 suits TMA, or 16 of
    single bytes.
    """
    row, column = problem.out[-2:]
    free = max(8, 16 // problem.out_dtype.itemsize)
    by_rows = column == 1 or problem.N == 1
    by_columns = row == 1 or problem.M == 1
    pair = (row, column)
    if by_columns and (problem.M > problem.N or not by_rows):
        pair = (1, column if problem.N > 1 else free)
    elif by_rows:
        pair = (row if problem.M > 1 else free, 1)
    return (*problem.out[:-2], *pair)
