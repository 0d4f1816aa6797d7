"""Accesses of the CUDA-core kernels to global memory in reports: the transactions of a request, as
predicted and as counted.
"""

import pytest
from support.access_profiles import in_global, profile
from support.paths import ROOT
from support.reports import Entry, loaded

from outblas.report import accesses, profiles
from outblas.report.accesses import Coalescing

pytestmark = pytest.mark.compile


def rows(*entries: Entry) -> dict[tuple[str, str], Coalescing]:
    """The rows where these profiles were made, by kernel and access."""
    found = accesses.coalescing(loaded(*entries).profiles)
    return {(row.case.kernel, row.access): row for row in found}


@pytest.mark.parametrize(
    ("kernel", "access", "transactions", "efficiency"),
    [
        ("simt.naive", "A load", 32, 1 / 32),
        ("simt.naive", "B load", 1, 1),
        ("simt.naive", "out store", 32, 1 / 32),
        ("simt.coalesced", "A load", 1, 1),
        ("simt.coalesced", "B load", 1, 1),
        ("simt.coalesced", "out store", 1, 1),
    ],
)
def test_a_request_is_predicted(
    kernel: str, access: str, transactions: float, efficiency: float
) -> None:
    predicted = rows()[kernel, access].predicted

    assert (predicted.transactions, predicted.efficiency) == (transactions, efficiency)


def test_the_kernels_that_do_not_stage_their_operands_are_predicted_without_a_profile() -> None:
    kernels = [kernel for kernel, _ in rows()]

    assert kernels == ["simt.naive"] * 3 + ["simt.coalesced"] * 3


NAIVE = [
    in_global("A", "load", 32, 1 / 32),
    in_global("B", "load", 1.1, 1 / 1.1),
    in_global("C", "load", 1, 1),
]


@pytest.mark.parametrize(
    ("access", "within"),
    [
        pytest.param("A load", True, id="as predicted"),
        pytest.param("B load", False, id="a tenth more transactions"),
        pytest.param("out store", None, id="not counted"),
    ],
)
def test_a_measurement_agrees_where_a_request_takes_the_predicted_transactions(
    access: str, within: bool | None
) -> None:
    found = rows(profile("simt.naive", "", NAIVE))

    assert found["simt.naive", access].within is within


def test_a_row_shows_the_measurement_beside_the_prediction() -> None:
    row = rows(profile("simt.naive", "", NAIVE))["simt.naive", "B load"]

    assert row.cells()[-3:] == ("1 / 1.1", "100.0% / 90.9%", "no")


@pytest.mark.parametrize(
    ("access", "within"), [("A load", True), ("B load", None), ("out store", True)]
)
def test_a_kernel_that_stages_its_operands_has_rows_where_it_was_profiled(
    access: str, within: bool | None
) -> None:
    memory = [in_global("A", "load", 16, 0.25), in_global("out", "store", 4, 1)]

    row = rows(profile("simt.vectorized", "", memory))["simt.vectorized", access]

    assert row.predicted.bytes == 16
    assert row.within is within


def test_two_totals_of_an_operand_are_added_up() -> None:
    twice = [*NAIVE, in_global("A", "load", 16, 1 / 16)]

    measured = rows(profile("simt.naive", "", twice))["simt.naive", "A load"].measured

    assert measured.transactions == (32 + 16) / 2
    assert measured.efficiency == pytest.approx(2 / 48)


def test_a_profile_of_another_version_is_named() -> None:
    with pytest.raises(ValueError, match=r"a profile of simt.naive .*tile=3"):
        rows(profile("simt.naive", "", [], resolved="tile=3"))


# ---- the profiles in results/
@pytest.fixture(scope="module")
def recorded() -> list[Coalescing]:
    """The rows of every profile in results/ that was made with --instructions."""
    made = profiles.load([ROOT / "results" / "h100_simt_counters.json"])
    return [row for row in accesses.coalescing(made) if row.measured]


def test_the_recorded_transactions_are_those_that_were_predicted(
    recorded: list[Coalescing],
) -> None:
    assert [row.cells() for row in recorded if not row.within] == []


@pytest.mark.parametrize("kernel", ["simt.naive", "simt.coalesced"])
def test_every_kernel_without_shared_memory_was_recorded(
    kernel: str, recorded: list[Coalescing]
) -> None:
    assert kernel in {row.case.kernel for row in recorded}
