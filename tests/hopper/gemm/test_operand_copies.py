"""Operands that TMA cannot load are copied first, which the caller is told; rows that lie across
cache lines cost requests, which the config takes into account.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gemm_problems import (
    BF16,
    OWN_CONFIG,
    problem_of,
    product,
    strided,
)

from outblas.call import default_kernel
from outblas.call.artifact import example
from outblas.call.problem import Problem, transposed
from outblas.call.tensor_memory import LINE
from outblas.hopper import gemm
from outblas.hopper.gemm import canonical, heuristic, operand_copies


class OperandCase(NamedTuple):
    """A problem, and which of its operands are copied: "", "a", "b" or "ab"."""

    problem: Problem
    copied: str


SQUARE = strided((64, 64), (64, 1))
CASES = {
    "K no multiple of 8": OperandCase(product(64, 64, 63), "ab"),
    "N no multiple of 8": OperandCase(problem_of(SQUARE, strided((64, 60), (60, 1))), "b"),
    "no unit stride": OperandCase(problem_of(strided((64, 64), (512, 2)), SQUARE), "a"),
    "odd address": OperandCase(product(64, 64, 64, alignment=(2, 16, 16)), "a"),
    "both odd": OperandCase(product(64, 64, 64, alignment=(8, 4, 2)), "ab"),
    "a row": OperandCase(product(1, 63, 64), ""),
    "a batch": OperandCase(
        problem_of(
            strided((3, 64, 64), (4096, 64, 1)),
            strided((3, 64, 64), (4096, 64, 1)),
            alignment=(16, 16, 16),
        ),
        "",
    ),
    "a batch that starts anywhere": OperandCase(
        problem_of(strided((3, 64, 64), (4100, 64, 1)), strided((3, 64, 64), (4104, 64, 1))), "a"
    ),
    "one odd B for a batch": OperandCase(
        problem_of(strided((3, 64, 63), (63, 200, 1)), strided((3, 63, 60), (0, 60, 1))), "ab"
    ),
    "two batch dimensions": OperandCase(
        problem_of(
            strided((2, 5, 64, 64), (7, 4096 * 3, 64, 1)), strided((2, 5, 64, 8), (0, 520, 1, 65))
        ),
        "ab",
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_operands_that_tma_cannot_load_are_copied_which_the_caller_is_told(
    case: OperandCase,
) -> None:
    """Copies are what TMA can load, and all else stays."""
    problem, aligned = case.problem, operand_copies.aligned(case.problem)
    remarks = [remark for remark in gemm.remarks(problem) if "twice" not in remark]

    assert gemm.unsupported(problem) is None
    assert operand_copies.needs_copy(problem) == ("a" in case.copied, "b" in case.copied)
    assert operand_copies.needs_copy(aligned) == (False, False)
    assert [remark[0] for remark in remarks] == list(case.copied)
    assert all("is copied first" in remark and "has strides" in remark for remark in remarks)
    for name in case.copied:
        before, after = getattr(problem, name), getattr(aligned, name)
        assert 1 in after[-2:], name
        assert all(stride % 8 == 0 for stride in after if stride != 1), name
        assert [stride == 0 for stride in before[:-2]] == [stride == 0 for stride in after[:-2]]
    assert replace(aligned, a=problem.a, b=problem.b, alignment=problem.alignment) == problem
    for name in {"a", "b"}.difference(case.copied):
        assert getattr(aligned, name) == getattr(problem, name), name
    for swap_ab in (False, True):
        made = canonical.canonicalize(problem, replace(OWN_CONFIG, swap_ab=swap_ab))
        assert made.transposed == swap_ab
        assert all(1 in strides[-2:] for strides in canonical.operand_strides(made.launch))


@st.composite
def operand_views(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of an operand with up to two batch dimensions, which may be broadcast; its
    rows and columns may overlap, and one may be longer than a cache line.
    """
    extent = st.integers(1, 9)
    extent_of_matrix = extent | st.just(70)
    batch = draw(st.lists(extent, max_size=2))
    shape = (*batch, draw(extent_of_matrix), draw(extent_of_matrix))
    batch_strides = tuple(draw(st.integers(0, 40)) for _ in batch)
    return shape, (*batch_strides, draw(st.integers(1, 40)), draw(st.integers(1, 40)))


@settings(max_examples=100, deadline=None)
@given(view=operand_views())
def test_a_copy_has_the_elements_of_its_operand(
    view: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """It starts its rows at 16 bytes, and long ones at cache lines."""
    shape, strides = view
    elements = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    memory = torch.arange(elements)
    batched = replace(product(shape[-2], shape[-1], 8), batch=shape[:-2])
    planned = operand_copies.copy_strides(batched, strides, *shape[-2:])

    copy = operand_copies.copy(memory, shape, strides, planned)

    assert copy.stride() == planned
    assert torch.equal(copy, memory.as_strided(shape, strides))
    is_long = 70 in shape[-2:] and max(planned[-2:]) > 64
    assert all(stride % (64 if is_long else 8) == 0 for stride in planned if stride > 1)


class LineCase(NamedTuple):
    """A problem, and how many cache lines a row of A and of B lies in where one could do."""

    problem: Problem
    lines: tuple[int, int]


LINES = {
    "rows are whole lines": LineCase(product(64, 64, 64), (1, 1)),
    "rows of 1000 elements": LineCase(product(64, 64, 1000), (2, 2)),
    "B of 1000 columns": LineCase(example(BF16, None, "nn", (512, 1000, 512)), (1, 2)),
    "A by columns, of 1000 rows": LineCase(example(BF16, None, "tn", (1000, 512, 512)), (2, 1)),
    "A starts inside of a line": LineCase(product(64, 64, 64, alignment=(16, LINE, 16)), (2, 1)),
    "B starts inside of a line": LineCase(product(64, 64, 64, alignment=(LINE, 16, 2)), (1, 2)),
    "rows of copies are whole lines": LineCase(product(64, 64, 1001), (1, 1)),
    "A is copied, B starts inside of a line": LineCase(
        product(64, 64, 64, alignment=(2, 16, 16)), (1, 2)
    ),
    "a single row has no next": LineCase(product(1, 64, 1000), (1, 2)),
    "matrices of a batch start inside of lines": LineCase(
        replace(product(64, 64, 64), batch=(3,), a=(0, 64, 1), b=(4104, 1, 64), out=(4096, 64, 1)),
        (1, 2),
    ),
}
each_line_case = pytest.mark.parametrize("case", LINES.values(), ids=LINES)


@each_line_case
def test_the_cache_lines_of_a_row_are_counted_and_told(case: LineCase) -> None:
    remarks = [remark for remark in operand_copies.remarks(case.problem) if "twice" in remark]

    assert operand_copies.cache_lines_per_row(case.problem) == case.lines
    assert operand_copies.cache_lines_per_row(transposed(case.problem)) == case.lines[::-1]
    told = [name for name, lines in zip("ab", case.lines, strict=True) if lines == 2]
    assert [remark[0] for remark in remarks] == told
    assert all("twice the requests" in remark for remark in remarks)


@pytest.mark.parametrize("size", [1000, 1024, 2048])
def test_rows_across_cache_lines_are_multicast_where_whole_lines_are_not(size: int) -> None:
    """One wave of tiles without clusters takes 1.3 times as long there: requests for parts of lines
    do not merge. An address inside of a line counts as rows across lines.
    """
    whole_lines, across_lines = (product(size, size, K) for K in (1024, 1032))
    odd_address = replace(whole_lines, alignment=(16, 16, 16))
    whole, across, odd = (
        heuristic.config(call, heuristic.Rates())
        for call in (whole_lines, across_lines, odd_address)
    )

    assert (whole.multicast_size, across.multicast_size) == (1, 2)
    assert odd == across


# Times of hopper.gemm, copies included, over the portable kernel's, measured on an H100.
TIME_OVER_PORTABLE = {
    ((4096, 4096, 4095), "nt"): 0.26,
    ((4096, 4095, 4096), "nn"): 0.29,
    ((1024, 1024, 1023), "nt"): 0.61,
    ((512, 512, 511), "nt"): 1.08,
    ((128, 128, 127), "nt"): 2.96,
    ((16, 4096, 4095), "nt"): 2.41,
    ((128, 4096, 4095), "nt"): 0.56,
    ((1, 4096, 4095), "nt"): 2.45,
    ((8192, 8192, 63), "nt"): 0.70,
    ((16, 1024, 1023), "nt"): 1.47,
    ((64, 64, 4095), "nt"): 0.48,
    ((16, 4096, 4096), "nt"): 0.70,
}
SM90, SMS = 90, 132


@pytest.mark.parametrize(
    ("shape", "layout"),
    TIME_OVER_PORTABLE,
    ids=["x".join(map(str, shape)) + f"-{layout}" for shape, layout in TIME_OVER_PORTABLE],
)
def test_another_kernel_is_taken_where_copies_cost_more_than_hopper_gemm_saves(
    shape: tuple[int, int, int], layout: str
) -> None:
    """But not where a row's bits must not depend on others."""
    problem = example(BF16, None, layout, shape)
    is_slower = TIME_OVER_PORTABLE[shape, layout] > 1

    reason = default_kernel.pruned_reason("hopper.gemm", problem)

    assert (reason is not None) == is_slower
    wanted = "portable" if is_slower else "hopper.gemm"
    assert default_kernel.by_rule(problem, SM90, SMS) == wanted
    invariant = replace(problem, batch_invariant=True)
    assert default_kernel.by_rule(invariant, SM90, SMS) == "hopper.gemm"
