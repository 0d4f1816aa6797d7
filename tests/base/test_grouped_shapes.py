"""Workloads of grouped products: the sizes of their groups, and their text."""

from itertools import accumulate, pairwise
from typing import Any

import pytest

from outblas.base.grouped_shapes import (
    DISTRIBUTIONS,
    FORMS,
    ROWS,
    Distribution,
    Form,
    GroupedWorkload,
    parse,
)

SMALL = GroupedWorkload(8, 100, 64, 32)


# ---- groups
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rows", [1, 7, 4096])
@pytest.mark.parametrize("experts", [1, 256])
def test_all_rows_belong_to_groups(experts: int, rows: int, distribution: Distribution) -> None:
    workload = GroupedWorkload(experts, rows, 64, 32, distribution)

    assert sum(workload.sizes) == rows
    assert len(workload.sizes) == experts
    assert workload.ends[-1] == rows
    assert all(begin <= end for begin, end in pairwise(workload.ends))


def test_zipf_gives_the_ith_most_popular_group_a_share_in_proportion_to_1_over_i() -> None:
    """2520 is a multiple of 1 to 8, and the shares' sum is 6849/2520."""
    sizes = GroupedWorkload(8, 6849, 64, 32, "zipf").sizes

    assert sorted(sizes, reverse=True) == [2520 // i for i in range(1, 9)]


def test_groups_are_the_same_every_time() -> None:
    """Results of two runs, and of two programs, are compared."""
    assert GroupedWorkload(8, 100, 64, 32, "zipf").sizes == (7, 19, 6, 12, 37, 9, 5, 5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rows", [1, 128, 1000])
def test_groups_of_blocks_end_at_multiples_or_with_the_last_row(
    rows: int, distribution: Distribution
) -> None:
    sizes = GroupedWorkload(8, rows, 64, 32, distribution).sizes_in(128)

    assert sum(sizes) == rows
    assert len(sizes) == 8
    assert {end % 128 for end in accumulate(sizes) if end != rows} <= {0}


# ---- products


@pytest.mark.parametrize("form", FORMS)
def test_a_workload_is_known_by_the_sizes_of_its_products(form: Form) -> None:
    workload = GroupedWorkload(8, 100, 64, 32, "zipf", form)

    assert GroupedWorkload.of(8, workload.shape, "zipf", form) == workload


def test_a_backward_pass_has_the_gradients_of_rows_and_weights() -> None:
    assert SMALL.backward() == (
        ("dA", GroupedWorkload(8, 100, 32, 64)),
        ("dB", GroupedWorkload(8, 100, 64, 32, form="terms")),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "experts is 0, expected an integer of at least 1"),
        ({"rows": 1.5}, "rows is 1.5, expected an integer of at least 1"),
        ({"distribution": "skewed"}, "distribution is 'skewed', expected one of balanced, zipf"),
        ({"form": "columns"}, "form is 'columns', expected one of rows, terms"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_workload_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedWorkload(**({"experts": 8, "rows": 100, "N": 64, "K": 32} | changes))


# ---- text
@pytest.mark.parametrize(
    "text",
    ["8x100x64x32", "8x100x64x32:zipf", "8x100x64x32:terms", "8x100x64x32:zipf:terms"],
)
def test_a_workload_is_written_as_it_is_read(text: str) -> None:
    (workload,) = parse(text)

    assert str(workload) == text


def test_a_model_has_two_products_with_three_numbers_of_rows_and_two_distributions() -> None:
    found = parse("moe:mixtral-8x7b")

    assert len(found) == 2 * 3 * 2
    assert {(w.experts, w.N, w.K) for w in found} == {(8, 28672, 4096), (8, 4096, 14336)}
    assert {w.rows for w in found} == set(ROWS)
    assert {w.form for w in found} == {"rows"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4096",
        "8x100x64",
        "8x100x64xK",
        "moe:gpt",
        "8x100x64x32:skewed",
        "8x100x64x32:4096",
        "deepgemm:4096",
    ],
)
def test_text_that_names_no_workload_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"--shapes is .* expected EXPERTSxROWSxNxK, deepgemm or moe"
    ):
        parse(text)
