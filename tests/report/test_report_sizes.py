"""One kernel over square products in reports: a row for each size at which it was timed."""

from pathlib import Path

import pytest
from support.hopper_reports import CLIMBED
from support.reports import invoke, loaded, shown, write

from outblas.report import sizes
from outblas.report.results import Measurements


@pytest.fixture(scope="module")
def measured() -> Measurements:
    """Timings of the Hopper ladder at two sizes, and of its last rung at all."""
    return loaded(*CLIMBED).measurements


@pytest.fixture(scope="module")
def cells(measured: Measurements) -> dict[int, dict[str, str]]:
    """The cells of hopper.hilbert by size and by the heading of their column."""
    found = sizes.rows(measured, "hopper.hilbert")
    return {row.n: dict(zip(sizes.COLUMNS, row.cells(), strict=True)) for row in found}


@pytest.mark.parametrize(
    ("heading", "cell"),
    {
        "N": "512",
        "µs": "3",
        "TFLOP/s": "936",
        "× cuBLAS": "1.200 (1.188–1.212)",
        "µs apart": "3.5",
        "× cuBLAS apart": "1.100",
        "seed × its cuBLAS": "1.02",
        "check": "exact",
    }.items(),
)
def test_a_cell_of_a_short_call(heading: str, cell: str, cells: dict[int, dict[str, str]]) -> None:
    assert cells[512][heading] == cell


@pytest.mark.parametrize(
    ("n", "seed"), [(1024, "1.17"), (2048, "1.07–1.08"), (8192, "1.015"), (16384, "–")]
)
def test_the_seeds_ratio_stands_beside_ours_at_its_size(
    n: int, seed: str, cells: dict[int, dict[str, str]]
) -> None:
    assert cells[n]["seed × its cuBLAS"] == seed


@pytest.mark.parametrize("heading", ["µs apart", "× cuBLAS apart"])
def test_a_long_call_is_not_timed_with_a_foreign_kernel_between(
    heading: str, cells: dict[int, dict[str, str]]
) -> None:
    assert cells[16384][heading] == "–"


def test_the_last_rung_that_was_timed_at_several_sizes_is_known(measured: Measurements) -> None:
    assert sizes.last(measured, "hopper") == "hopper.hilbert"


def test_no_rung_is_the_last_without_timings() -> None:
    assert sizes.last((), "hopper") is None


@pytest.fixture
def bench_json(tmp_path: Path) -> Path:
    """A file with the timings of the Hopper ladder."""
    return write(tmp_path / "bench.json", *CLIMBED)


def test_the_command_prints_a_kernel_by_size(bench_json: Path) -> None:
    printed = shown("sizes", "hopper.hilbert", "--results", bench_json)

    assert "hopper.hilbert by size" in printed


def test_a_kernel_that_was_not_timed_is_a_usage_error(bench_json: Path) -> None:
    done = invoke("sizes", "hopper.gemm", "--results", bench_json, code=2)

    assert "no square product of hopper.gemm" in done.output
