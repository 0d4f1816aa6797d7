"""Which compile of hopper.gemm a problem takes: how it writes C, and what else the kernel is told
when it is compiled.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
from support.gemm_problems import FP32, OWN_CONFIG, problem_of, product, strided, variant_of

from outblas.core.problem import Problem


class OutputCase(NamedTuple):
    """A problem, the elements of C that a thread writes at once, and whether C leaves through
    shared memory by TMA.
    """

    problem: Problem
    width: int
    staged: bool


def batch_with_output_strides(out: tuple[int, ...]) -> Problem:
    return product(64, 64, 64, batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=out)


OUTPUTS = {
    "bf16": OutputCase(product(64, 64, 64), 8, staged=True),
    "fp32": OutputCase(product(64, 64, 64, FP32), 4, staged=True),
    "fp32, rows of 68": OutputCase(product(64, 68, 64, FP32), 4, staged=True),
    "fp32, rows of 66": OutputCase(product(64, 66, 64, FP32), 2, staged=False),
    "rows of 66": OutputCase(product(64, 66, 64), 2, staged=False),
    "rows of 65": OutputCase(product(64, 65, 64), 1, staged=False),
    "an address of 2 bytes": OutputCase(
        product(64, 64, 64, alignment=(16, 16, 2)), 1, staged=False
    ),
    "an address of 8 bytes": OutputCase(
        product(64, 64, 64, alignment=(16, 16, 8)), 2, staged=False
    ),
    "60 columns in rows of 72, where TMA would write up to column 64": OutputCase(
        product(64, 60, 64, out=(72, 1)), 2, staged=False
    ),
    "no unit stride": OutputCase(product(64, 64, 64, out=(512, 2)), 1, staged=False),
    "a single row": OutputCase(product(1, 64, 64, out=(1, 1)), 8, staged=True),
    "a batch of odd stride": OutputCase(batch_with_output_strides((4097, 64, 1)), 1, staged=False),
    "a batch": OutputCase(batch_with_output_strides((4104, 64, 1)), 8, staged=True),
}
each_output = pytest.mark.parametrize("case", OUTPUTS.values(), ids=OUTPUTS)


@each_output
def test_c_is_written_in_the_widest_vectors_that_it_allows(case: OutputCase) -> None:
    traits = variant_of(case.problem).traits

    assert (traits.width, traits.staged) == (case.width, case.staged)
    assert not traits.by_columns


@each_output
def test_without_epilogue_stages_c_is_written_from_registers(case: OutputCase) -> None:
    traits = variant_of(case.problem, replace(OWN_CONFIG, epilogue_stages=0)).traits

    assert not traits.staged
    assert traits.width == case.width


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(OutputCase(product(16, 64, 64), 8, staged=True), id="bf16"),
        pytest.param(OutputCase(product(16, 66, 64), 1, staged=False), id="rows of 66"),
        pytest.param(
            OutputCase(product(16, 64, 64, FP32), 1, staged=False),
            id="fp32, which stmatrix cannot transpose",
        ),
    ],
)
def test_a_product_of_swapped_operands_is_written_by_columns(case: OutputCase) -> None:
    made = variant_of(case.problem, replace(OWN_CONFIG, swap_ab=True))

    assert made.traits.by_columns
    assert (made.traits.width, made.traits.staged) == (case.width, case.staged)
    assert made.layout == "nt"


def test_a_plain_product_has_no_traits() -> None:
    traits = variant_of(product(64, 64, 64)).traits

    assert traits.plain
    assert (traits.batched, traits.ordered, traits.scaled) == (False, False, False)
    assert traits.addend == ""


def test_a_product_of_many_tiles_has_a_table_of_their_order() -> None:
    assert variant_of(product(8192, 8192, 64)).traits.ordered


def test_a_product_with_alpha_is_scaled() -> None:
    assert variant_of(replace(product(64, 64, 64), scaled=True)).traits.scaled


def test_a_batch_is_batched() -> None:
    matrices = strided((3, 64, 64), (4096, 64, 1))

    assert variant_of(problem_of(matrices, matrices, alignment=(16, 16, 16))).traits.batched


@pytest.mark.parametrize(
    ("strides", "access"),
    [
        pytest.param((0, 1), "pairs", id="a row for all rows"),
        pytest.param((1, 0), "rows", id="a column for all columns"),
        pytest.param((64, 1), "staged", id="a matrix that TMA loads"),
        pytest.param((65, 1), "matrix", id="a matrix that TMA cannot load"),
    ],
)
def test_an_addend_is_read_as_it_lies(strides: tuple[int, int], access: str) -> None:
    given = replace(product(64, 64, 64), scaled=True, c=strides, alignment=(16, 16, 16, 16))

    assert variant_of(given).traits.addend == access


LARGE = product(8192, 8192, 8192)
SPLIT_IN_TWO = replace(OWN_CONFIG, split_k=2, k_serpentine=False)


def test_one_compile_serves_all_orders_of_tiles() -> None:
    other_order = replace(OWN_CONFIG, order="hilbert", group_m=4, sms=120)

    assert variant_of(LARGE, other_order) == variant_of(LARGE)


def test_one_compile_serves_all_numbers_of_split_k_partitions() -> None:
    split_in_five = replace(SPLIT_IN_TWO, split_k=5)

    assert variant_of(LARGE, split_in_five) == variant_of(LARGE, SPLIT_IN_TWO)
    assert variant_of(LARGE, SPLIT_IN_TWO) != variant_of(LARGE)
