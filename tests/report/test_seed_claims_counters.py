"""The documents' claims about the CUDA cores that ncu's counters settle: bank conflicts, issue,
traffic.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import seed_claims
from support.reports import Entry, counted, finding, verdict
from support.simt_reports import BOTH_CONFLICT, LOADS_CONFLICT, STORES_CONFLICT, V06

OPEN = (seed_claims.OPEN, None)
UNPADDED, PADDED = "pad=0,prefetch=False", "prefetch=False"  # 000's forms of simt.warptile


# ---- bank conflicts
@dataclass(frozen=True)
class Wavefronts:
    """Wavefronts of a launch, and the share of them that bank conflicts add."""

    number: float
    added: float


def conflicting(
    config: str, loads: Wavefronts, stores: Wavefronts, requests: float | None = 100.0
) -> Entry:
    """A profile of simt.vectorized's accesses to shared memory; without --instructions where
    `requests` is None.

    As on a GPU, L1's counters show a tenth more wavefronts of stores than the instructions take,
    and call these conflicts.
    """
    by_l1 = {
        "ld": {"wavefronts": loads.number, "excess": loads.added},
        "st": {"wavefronts": stores.number * 1.1, "excess": 1 - (1 - stores.added) / 1.1},
    }
    return counted(
        "simt.vectorized",
        config,
        shared=by_l1,
        memory=None if requests is None else _by_instructions(loads, stores, requests),
    )


def _by_instructions(loads: Wavefronts, stores: Wavefronts, requests: float) -> list[Entry]:
    """The totals that the instructions give. Those of global memory are no part of any claim."""
    in_shared = [
        {
            "space": "shared",
            "operation": operation,
            "operand": "A",
            "requests": requests,
            "wavefronts": kind.number,
            "ideal": kind.number * (1 - kind.added),
        }
        for operation, kind in (("load", loads), ("store", stores))
    ]
    in_global = {"space": "global", "operation": "load", "operand": "A", "requests": 1e9}
    return [*in_shared, in_global]


# Kernel 6 of 000, whose loads and stores conflict, and the form in which stores are padded.
CONFLICTING_STORES = Wavefronts(260 / 1.1, 0.4)
KERNEL_6 = conflicting(BOTH_CONFLICT, Wavefronts(500, 0.45), CONFLICTING_STORES)
PADDED_STORES = conflicting(LOADS_CONFLICT, Wavefronts(500, 0.44), Wavefronts(160, 0.01))
# The outcome that 000 does not have: padding mends the loads instead of the stores.
PADDED_LOADS = conflicting(LOADS_CONFLICT, Wavefronts(500, 0.0), Wavefronts(160, 0.2))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("loads from shared memory conflict 5-way", 5.0),
        ("stores to shared memory conflict 2.6-way", 2.6),
        pytest.param("over 40%", pytest.approx(0.4516, abs=1e-4), id="the share that is wasted"),
    ],
)
def test_the_conflicts_of_kernel_6(part: str, value: float) -> None:
    assert verdict(part, KERNEL_6) == ("confirmed", value)


def test_conflicts_are_open_in_a_profile_without_instructions() -> None:
    profile = conflicting(BOTH_CONFLICT, Wavefronts(500, 0.45), Wavefronts(260, 0.4), None)

    assert verdict("loads from shared memory conflict 5-way", profile) == OPEN


def test_the_wasted_share_is_that_of_kernel_6s_own_form() -> None:
    profile = conflicting(STORES_CONFLICT, Wavefronts(5, 0.4), Wavefronts(2, 0.4), None)

    assert verdict("over 40%", profile) == OPEN


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        pytest.param(PADDED_STORES, ("confirmed", pytest.approx(0.01)), id="gone"),
        pytest.param(PADDED_LOADS, ("differs", pytest.approx(0.2)), id="still there"),
        pytest.param(
            conflicting(LOADS_CONFLICT, Wavefronts(500, 0.44), Wavefronts(160, 0.01), None),
            OPEN,
            id="without instructions",
        ),
    ],
)
def test_padding_eliminates_the_conflicts_of_stores(
    profile: Entry, expected: tuple[str, float | None]
) -> None:
    assert verdict("padding eliminates", profile) == expected


@pytest.mark.parametrize(
    ("padded", "expected"),
    [
        pytest.param(PADDED_STORES, "confirmed", id="as many"),
        pytest.param(PADDED_LOADS, "differs", id="none"),
    ],
)
def test_padding_does_not_mend_the_conflicts_of_loads(padded: Entry, expected: str) -> None:
    assert verdict("padding does not mend", KERNEL_6, padded)[0] == expected


def test_columns_side_by_side_mend_the_conflicts_of_loads() -> None:
    split = conflicting(STORES_CONFLICT, Wavefronts(500, 0.01), Wavefronts(160, 0.4))

    assert verdict("four columns side by side", split) == ("confirmed", pytest.approx(0.01))


# ---- issue
@pytest.mark.parametrize(
    ("part", "counter", "value"),
    [
        ("takes 165 registers", "registers", 165),
        ("unpadded, achieved occupancy", "occupancy", 0.181),
        ("2.97 instructions", "ipc", 2.97),
        ("64% active", "fma_active", 0.64),
        ("33% of the time", "not_selected_share", 0.33),
    ],
)
def test_a_counter_of_kernel_7_that_confirms_a_claim(part: str, counter: str, value: float) -> None:
    values: dict[str, Any] = {counter: value}

    profile = counted("simt.warptile", UNPADDED, **values)

    assert verdict(part, profile) == ("confirmed", value)


def test_an_sm_is_busy_in_the_share_of_four_instructions_a_cycle() -> None:
    profile = counted("simt.warptile", UNPADDED, ipc=2.97)

    assert verdict("SMs are 74% busy", profile) == ("confirmed", pytest.approx(2.97 / 4))


@pytest.mark.parametrize(
    ("ipc", "expected"),
    [
        pytest.param(3.03, "confirmed", id="higher"),
        pytest.param(2.98, "differs", id="higher by less than profiles differ"),
        pytest.param(2.97, "differs", id="the same"),
        pytest.param(2.9, "refuted", id="lower"),
    ],
)
def test_padding_raises_the_instructions_a_cycle(ipc: float, expected: str) -> None:
    unpadded = counted("simt.warptile", UNPADDED, ipc=2.97)
    padded = counted("simt.warptile", PADDED, ipc=ipc)

    assert verdict("padding raises the instructions", unpadded, padded)[0] == expected


# ---- traffic at 2048, of document 003's versions
EXECUTED = {"dram_read_bytes": 4e7, "ffma": 2048.0**3}
V05_PROFILE = counted("simt.vectorized", "block_k=16", 2048, l2_to_sm_bytes=5e8, **EXECUTED)
V06_PROFILE = counted(
    "simt.warptile", V06, 2048, l2_to_sm_bytes=1e9, l1_load_bytes=1.1e9, **EXECUTED
)
CUBLAS_PROFILE = counted("cublas", "", 2048, dram_read_bytes=4e7)


@pytest.mark.parametrize(
    ("part", "profiles", "expected", "value"),
    [
        pytest.param(
            "v06 generates twice the DRAM traffic",
            (V05_PROFILE, V06_PROFILE),
            *("differs", 1.0),
            id="from DRAM, v06 over v05",
        ),
        pytest.param(
            "works twice as hard",
            (V05_PROFILE, V06_PROFILE),
            *("confirmed", 2.0),
            id="from L2, v06 over v05",
        ),
        pytest.param(
            "v06's global loads are 1.11 GB",
            (V06_PROFILE,),
            *("confirmed", 1.1),
            id="from L1, GB of v06",
        ),
        pytest.param(
            "as much DRAM as cuBLAS",
            (V05_PROFILE, CUBLAS_PROFILE),
            *("confirmed", 1.0),
            id="from DRAM, v05 over cuBLAS",
        ),
    ],
)
def test_traffic_by_level_of_memory(
    part: str, profiles: tuple[Entry, ...], expected: str, value: float
) -> None:
    assert verdict(part, *profiles) == (expected, value)


def test_every_version_executes_an_ffma_for_each_term() -> None:
    found = finding("every version executes", V05_PROFILE, V06_PROFILE)

    assert found.verdict == "confirmed"
    assert found.ours == "8.590e+09 to 8.590e+09 in 2 of 6"


def test_a_version_that_executes_more_ffmas_differs() -> None:
    more = V06_PROFILE | {"ffma": 9e9}

    assert verdict("every version executes", V05_PROFILE, more) == ("differs", 9e9)
