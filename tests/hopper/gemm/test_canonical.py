"""The form in which hopper.gemm computes a problem: which product, which batch dimension, which
strides.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.gemm_problems import BF16, FP32, OWN_CONFIG, problem_of, product, strided, variant_of

from outblas.core.problem import Problem, problem, transposed
from outblas.hopper.gemm import canonical


@pytest.mark.parametrize("swap_ab", [False, True], ids=["own order", "swapped"])
@pytest.mark.parametrize("c_by_columns", [False, True], ids=["C by rows", "C by columns"])
class TestTheTransposedProduct:
    """C^T = B^T A^T is computed where C lies by columns, and where the config swaps the operands;
    the two undo each other.
    """

    def given(self, c_by_columns: bool) -> Problem:
        out = torch.empty(128, 64, dtype=BF16, device="meta").t() if c_by_columns else None
        return problem_of(strided((64, 256), (256, 1)), strided((256, 128), (1, 256)), out)

    def test_is_computed_for_one_of_two_reasons(self, c_by_columns: bool, swap_ab: bool) -> None:
        given, config = self.given(c_by_columns), replace(OWN_CONFIG, swap_ab=swap_ab)

        product, is_transposed = canonical.orient(given, config)

        assert is_transposed == (swap_ab != c_by_columns)
        assert product == (transposed(given) if is_transposed else given)

    def test_is_written_by_columns_where_operands_are_swapped(
        self, c_by_columns: bool, swap_ab: bool
    ) -> None:
        config = replace(OWN_CONFIG, swap_ab=swap_ab)

        traits = variant_of(self.given(c_by_columns), config).traits

        assert (traits.by_columns, traits.staged, traits.width) == (swap_ab, True, 8)


THREE_BATCH_DIMENSIONS = replace(
    product(64, 64, 64),
    batch=(2, 7, 3),
    a=(9, 8, 0, 64, 1),
    b=(0, 24, 7, 1, 64),
    out=(1, 2, 3, 64, 1),
)


def test_a_launch_walks_the_longest_batch_dimension() -> None:
    launch, batch_dim = canonical.single_batch(THREE_BATCH_DIMENSIONS)

    assert batch_dim == 1
    assert launch.batch == (7,)
    assert (launch.a, launch.b, launch.out) == ((8, 64, 1), (24, 1, 64), (2, 64, 1))


@pytest.mark.parametrize(("name", "offset"), [("a", 9 + 2 * 0), ("b", 2 * 7), ("out", 1 + 2 * 3)])
def test_a_launch_starts_where_the_other_batch_dimensions_say(name: str, offset: int) -> None:
    strides = getattr(THREE_BATCH_DIMENSIONS, name)

    assert canonical.batch_offset(strides, (1, 2), batch_dim=1) == offset


def test_every_launch_of_a_batch_has_the_alignment_that_is_promised() -> None:
    """The stride that is walked launch by launch, 20481 elements, leaves C at odd addresses."""
    a = torch.empty(2, 1, 64, 64, dtype=BF16)
    b = torch.empty(1, 5, 64, 64, dtype=BF16)
    out = strided((2, 5, 64, 64), (20481, 4096, 64, 1))

    launch, batch_dim = canonical.single_batch(problem(a, b, out))

    assert (batch_dim, launch.batch) == (1, (5,))
    assert launch.alignment[2] == 2


class SingleRow(NamedTuple):
    """A problem whose C is a single row or column, or several of them, and how C is written."""

    problem: Problem
    swap_ab: bool
    strides: tuple[int, ...]
    width: int
    by_columns: bool


ROW, COLUMN = product(1, 4096, 64), product(4096, 1, 64)
ROWS = replace(product(1, 64, 64), batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=(64, 64, 1))
SINGLE_ROWS = {
    "a row": SingleRow(ROW, False, (8, 1), 8, by_columns=False),
    "a row, swapped": SingleRow(ROW, True, (1, 8), 8, by_columns=True),
    "a column": SingleRow(COLUMN, False, (1, 8), 8, by_columns=True),
    "a column, swapped": SingleRow(COLUMN, True, (8, 1), 8, by_columns=False),
    "a batch of rows": SingleRow(ROWS, False, (64, 8, 1), 8, by_columns=False),
    "a batch of rows, swapped": SingleRow(ROWS, True, (64, 1, 8), 8, by_columns=True),
    "a row without neighbouring elements": SingleRow(
        replace(ROW, out=(4096, 2)), True, (1, 2), 1, by_columns=True
    ),
    "a batch whose rows do not all start at 16 bytes": SingleRow(
        replace(ROWS, out=(60, 60, 1)), True, (60, 1, 8), 1, by_columns=True
    ),
    "a row of odd length": SingleRow(product(1, 4095, 64), True, (1, 8), 1, by_columns=True),
    "a column of a matrix stored by rows": SingleRow(
        replace(COLUMN, out=(4096, 1)), False, (4096, 1), 1, by_columns=False
    ),
    "an fp32 row, which stmatrix cannot transpose": SingleRow(
        replace(ROW, out_dtype=FP32), True, (1, 8), 1, by_columns=True
    ),
    "one element": SingleRow(product(1, 1, 64), True, (8, 1), 1, by_columns=False),
}


@pytest.mark.parametrize("case", SINGLE_ROWS.values(), ids=SINGLE_ROWS)
class TestASingleRowOrColumn:
    """C is written along its length, whichever of its two strides is free."""

    def test_has_the_strides_of_its_length(self, case: SingleRow) -> None:
        config = replace(OWN_CONFIG, swap_ab=case.swap_ab)

        product, _ = canonical.orient(case.problem, config)

        assert canonical.output_strides(product) == case.strides

    def test_is_written_in_the_widest_vectors_that_it_allows(self, case: SingleRow) -> None:
        config = replace(OWN_CONFIG, swap_ab=case.swap_ab)

        traits = variant_of(case.problem, config).traits

        assert (traits.width, traits.by_columns) == (case.width, case.by_columns)
        assert traits.staged == (case.width == 8)
