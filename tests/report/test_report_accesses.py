"""Bank conflicts of the CUDA-core kernels in reports: predictions beside profiles that agree, and
that do not.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from support.access_profiles import in_shared, profile
from support.paths import ROOT
from support.reports import Entry, loaded
from support.simt_reports import BOTH_CONFLICT, LOADS_CONFLICT, STORES_CONFLICT

from outblas.core import configs, registry
from outblas.report import access_cases, accesses, profiles
from outblas.report.accesses import Conflicts

pytestmark = pytest.mark.compile
OWN = ""  # a kernel's own config


@cache
def predictions() -> dict[tuple[str, str, str], Conflicts]:
    """The rows without any profile, by kernel, config in brief form and operation."""
    return {
        (row.case.kernel, configs.brief(row.case.config), row.operation): row
        for row in accesses.conflicts(())
    }


def prediction(kernel: str, config: str, operation: str) -> Conflicts:
    """The row of a kernel's loads or stores of shared memory without a profile."""
    brief = configs.brief(configs.from_text(registry.load(kernel).Config, config))
    return predictions()[kernel, brief, operation]


def with_profile(
    kernel: str, config: str, memory: list[Entry] | None, **changes: Any
) -> list[Conflicts]:
    """The rows of a kernel of which one config was profiled."""
    given = loaded(profile(kernel, config, memory, **changes)).profiles
    return [row for row in accesses.conflicts(given) if row.case.kernel == kernel]


def profiled(rows: Sequence[Conflicts], operation: str) -> Conflicts:
    """The row with a profile."""
    (found,) = [row for row in rows if row.case.profile and row.operation == operation]
    return found


def wavefronts(row: Conflicts) -> dict[str, tuple[float, float]]:
    """The wavefronts of one instruction by operand, each beside those without conflicts."""
    return {
        operand: (each.wavefronts / each.instructions, each.ideal / each.instructions)
        for operand, each in row.of_warp.items()
    }


# ---- one warp and k tile
@pytest.mark.parametrize(
    ("config", "a"),
    [
        pytest.param(BOTH_CONFLICT, (2, 1), id="unpadded, pieces apart"),
        pytest.param(STORES_CONFLICT, (2, 1), id="unpadded, pieces side by side"),
        pytest.param(LOADS_CONFLICT, (1, 1), id="padded, pieces apart"),
        pytest.param(OWN, (1, 1), id="padded, pieces side by side"),
    ],
)
def test_padding_mends_the_stores_of_a(config: str, a: tuple[int, int]) -> None:
    stores = prediction("simt.vectorized", config, "store")

    assert wavefronts(stores) == {"A": a, "B": (4, 4)}


@pytest.mark.parametrize(
    ("config", "b"),
    [
        pytest.param(BOTH_CONFLICT, (8, 4), id="unpadded, eight columns"),
        pytest.param(LOADS_CONFLICT, (8, 4), id="padded, eight columns"),
        pytest.param(STORES_CONFLICT, (4, 4), id="unpadded, four columns"),
        pytest.param(OWN, (4, 4), id="padded, four columns"),
    ],
)
def test_columns_side_by_side_mend_the_loads_of_b(config: str, b: tuple[int, int]) -> None:
    loads = prediction("simt.vectorized", config, "load")

    assert wavefronts(loads) == {"A": (2, 2), "B": b}


def test_warp_tiles_load_without_conflicts() -> None:
    loads = prediction("simt.warptile", OWN, "load")

    assert wavefronts(loads) == {"A": (2, 2), "B": (4, 4)}


def test_the_square_has_the_excess_of_loads_and_stores_of_each_form() -> None:
    rows = accesses.square(predictions().values())

    assert [(loads, stores) for *_, loads, stores in rows] == [
        ("40.0% / –", "33.3% / –"),  # both conflict
        ("40.0% / –", "0.0% / –"),  # the loads
        ("0.0% / –", "33.3% / –"),  # the stores
        ("0.0% / –", "0.0% / –"),  # neither
    ]


# ---- a launch
def test_a_launch_has_the_accesses_of_all_warps_and_k_tiles() -> None:
    """A k tile has 16 reads of A in 2 wavefronts, and 16 of B in 8 where 4 are ideal."""
    launch = prediction("simt.vectorized", BOTH_CONFLICT, "load").predicted

    ctas, warps, k_tiles = 1024, 8, 512
    times = ctas * warps * k_tiles
    assert launch.instructions == times * (16 + 16)
    assert launch.wavefronts == times * 16 * (2 + 8)
    assert launch.excess == times * 16 * 4


def test_the_pipelined_kernel_stores_one_k_tile_ahead_of_its_loop() -> None:
    stores = prediction("simt.pipelined", OWN, "store")

    ctas, warps, k_tiles = 1024, 4, 512
    of_k_tile = sum(each.instructions for each in stores.of_warp.values())
    assert stores.predicted.instructions == ctas * warps * (1 + k_tiles) * of_k_tile


def test_the_pipelined_kernel_reads_one_term_of_k_ahead_of_its_loop() -> None:
    loads = prediction("simt.pipelined", OWN, "load")

    ctas, warps, terms = 1024, 4, 512 * 8
    of_term = sum(each.instructions for each in loads.of_warp.values()) // 8
    assert loads.predicted.instructions == ctas * warps * (1 + terms) * of_term


@pytest.mark.parametrize(
    ("operation", "of_warp"),
    [
        pytest.param("store", (1 + 2 * 2) * (8 + 2), id="a k tile and 2 pairs of them"),
        pytest.param("load", (1 + 2 * 2 * 8) * (2 + 4), id="a term of K and 2 pairs of tiles of 8"),
    ],
)
def test_edges_and_pairs_of_k_tiles_are_rounded_up(operation: str, of_warp: int) -> None:
    rows = with_profile("simt.pipelined", OWN, [], shape=[129, 100, 17])

    ctas, warps = 2, 4
    assert profiled(rows, operation).predicted.instructions == ctas * warps * of_warp


# ---- what gl.bank_conflicts counts
def test_gluon_counts_the_same_where_rows_are_not_padded() -> None:
    unpadded = [row for row in predictions().values() if row.case.config.pad == 0]

    assert len(unpadded) == 6
    assert [row.cells() for row in unpadded if not row.triton_agrees] == []


def test_gluon_counts_further_passes() -> None:
    """The stores of A take four wavefronts where one is ideal."""
    assert prediction("simt.warptile", STORES_CONFLICT, "store").triton == {"A": 3, "B": 0}


def test_gluon_cannot_count_where_rows_are_padded() -> None:
    padded = [row for row in predictions().values() if row.case.config.pad]

    assert {row.triton for row in padded} == {None}
    assert all("cannot count" in row.cells() for row in padded)


@pytest.mark.parametrize("name", ["simt.shared", "simt.strip", "simt.register"])
def test_gluon_counts_the_same_of_other_rungs(name: str) -> None:
    rows = with_profile(name, "pad=0", [])

    assert [row.triton_agrees for row in rows] == [True, True]


# ---- beside a profile
def counted_off(config: str, operation: str, off: float) -> list[Conflicts]:
    """The rows of simt.vectorized where ncu counted an excess that is off by this share of our
    wavefronts, in two totals of half the launch each.
    """
    ours = prediction("simt.vectorized", config, operation).predicted
    counted = ours.wavefronts + round(off * ours.wavefronts)
    half = in_shared(operation, ours.instructions // 2, counted // 2, ours.ideal // 2)
    return with_profile("simt.vectorized", config, [half, half | {"operand": "A"}])


@pytest.mark.parametrize(
    ("config", "operation", "off", "within"),
    [
        (BOTH_CONFLICT, "load", 0.0, True),
        (BOTH_CONFLICT, "load", 0.019, True),
        (BOTH_CONFLICT, "load", 0.021, False),
        (BOTH_CONFLICT, "store", -0.021, False),
        (OWN, "load", 0.01, True),
        (OWN, "load", 0.03, False),
    ],
)
def test_a_profile_agrees_within_two_per_cent_of_our_wavefronts(
    config: str, operation: str, off: float, within: bool
) -> None:
    row = profiled(counted_off(config, operation, off), operation)

    assert row.within is within
    assert row.cells()[-1] == ("yes" if within else "no")


def test_the_totals_of_a_profile_are_added_up() -> None:
    ours = prediction("simt.vectorized", BOTH_CONFLICT, "load").predicted

    row = profiled(counted_off(BOTH_CONFLICT, "load", 0.019), "load")

    assert row.measured.excess == pytest.approx(ours.excess + 0.019 * ours.wavefronts, abs=2)


def test_a_profiled_config_has_no_row_of_a_prediction_alone() -> None:
    rows = counted_off(BOTH_CONFLICT, "load", 0.0)

    of_config = [row for row in rows if configs.brief(row.case.config) == "piece_n=8,pad=0"]
    assert [row.operation for row in of_config] == ["load", "store"]


def test_when_a_k_tile_is_loaded_and_stored_does_not_matter() -> None:
    """000's warp tile prefetches nothing: its profile stands for the unpadded form."""
    rows = with_profile("simt.warptile", "pad=0,prefetch=False", [])

    found = [(configs.brief(r.case.config), r.operation, r.measured is not None) for r in rows]
    assert found == [
        ("pad=0,prefetch=False", "load", True),
        ("pad=0,prefetch=False", "store", True),
        ("", "load", False),
        ("", "store", False),
    ]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(profile("simt.vectorized", OWN, None), id="without instructions"),
        pytest.param(
            profile("simt.naive", OWN, []) | {"provider": "cublas"}, id="of another kernel"
        ),
    ],
)
def test_only_profiles_of_the_ladder_with_instructions_count(made: Entry) -> None:
    given = loaded(made).profiles

    assert access_cases.profiled(given) == ()
    assert {(row.measured, row.within) for row in accesses.conflicts(given)} == {(None, None)}


def test_a_profile_that_lacks_a_count_is_no_measurement() -> None:
    without_wavefronts = {"space": "shared", "operation": "load", "requests": 1}

    rows = with_profile("simt.vectorized", OWN, [without_wavefronts])

    assert profiled(rows, "load").measured is None


def test_a_profile_without_an_operation_has_measured_that_none_was_executed() -> None:
    rows = with_profile("simt.vectorized", OWN, [])

    stores = profiled(rows, "store")
    assert stores.measured.instructions == 0
    assert stores.within is True


# ---- the profiles in results/
@pytest.fixture(scope="module")
def recorded() -> list[Conflicts]:
    """The rows of every profile in results/ that was made with --instructions."""
    made = profiles.load([ROOT / "results" / "h100_simt_counters.json"])
    return [row for row in accesses.conflicts(made) if row.measured]


def test_the_recorded_conflicts_are_those_that_were_predicted(recorded: list[Conflicts]) -> None:
    assert [row.cells() for row in recorded if not row.within] == []


@pytest.mark.parametrize("config", ["piece_n=8,pad=0", "piece_n=8", "pad=0", ""])
def test_every_form_of_the_square_was_recorded(config: str, recorded: list[Conflicts]) -> None:
    assert config in {configs.brief(row.case.config) for row in recorded}
