"""The documents' claims about the Hopper ladder: one run against another, the L2 cache, clock and
power.
"""

import pytest
import seed_claims
from seed_claims import compare
from seed_claims.measured import hopper
from support.hopper_reports import CLIMBED, COUNTED
from support.reports import Entry, entry, findings, loaded, verdict

from outblas.core import configs, registry
from outblas.report.evidence import Evidence
from outblas.report.results import Measurements

# ---- one run against another
FIRST = compare.Run("hopper.tma_store")
SECOND = compare.Run("hopper.store_tuning", "sms=0,order=row")


def spread(run: compare.Run, ratio: float, by: float, config: str = "") -> Entry:
    """A timing of a run whose rounds are so far from the median on both sides."""
    low, high = ratio - by, ratio + by
    return entry(run.provider, ratio, config=config, ratio_low=low, ratio_high=high)


@pytest.mark.parametrize(
    ("first", "second", "by", "stated", "expected"),
    [
        pytest.param(1.05, 1.00, 0.001, (1.04, 1.0), "confirmed", id="about the stated gain"),
        pytest.param(1.05, 1.00, 0.001, (2.0, 1.0), "differs", id="far from the stated gain"),
        pytest.param(1.05, 1.00, 0.001, None, "confirmed", id="no stated gain"),
        pytest.param(1.01, 1.00, 0.100, None, "confirmed", id="ahead by over half a per cent"),
        pytest.param(1.003, 1.00, 0.001, None, "confirmed", id="ahead beyond the spreads"),
        pytest.param(1.003, 1.00, 0.002, None, "differs", id="a tie"),
        pytest.param(1.00, 1.05, 0.100, None, "refuted", id="behind by over half a per cent"),
        pytest.param(1.001, 1.00, 0.010, (1.004, 1.0), "confirmed", id="a tie as stated"),
        pytest.param(1.00, 1.003, 0.001, None, "refuted", id="behind beyond the spreads"),
    ],
)
def test_one_run_against_another(
    first: float, second: float, by: float, stated: tuple[float, float] | None, expected: str
) -> None:
    timings = loaded(spread(FIRST, first, by), spread(SECOND, second, by, config="order=row,sms=0"))

    settled = compare.against("001", "the first beats the second", FIRST, SECOND, stated).test(
        timings
    )

    assert (settled.verdict, settled.value) == (expected, pytest.approx(first / second - 1))


@pytest.fixture
def apart() -> Measurements:
    """Timings of both runs from two campaigns, the newer of which has the first run."""
    newer = loaded(entry(FIRST.provider, 1.1), date="2026-01-03")
    older = loaded(entry(SECOND.provider, 1.0, config=SECOND.config), date="2026-01-02")
    return newer.measurements + older.measurements


@pytest.fixture
def in_one_campaign() -> Measurements:
    """Timings of both runs from the oldest campaign."""
    timings = entry(FIRST.provider, 1.2), entry(SECOND.provider, 1.0, config=SECOND.config)
    return loaded(*timings, date="2026-01-01").measurements


def test_runs_of_different_campaigns_are_not_compared(apart: Measurements) -> None:
    settled = compare.against("001", "the first beats the second", FIRST, SECOND).test(
        Evidence(apart)
    )

    assert settled == seed_claims.NOT_MEASURED


@pytest.mark.parametrize("order", ["the newest first", "the oldest first"])
def test_runs_are_compared_in_the_campaign_that_has_both(
    order: str, apart: Measurements, in_one_campaign: Measurements
) -> None:
    newest_first = apart + in_one_campaign
    every = newest_first if order == "the newest first" else newest_first[::-1]

    settled = compare.against("001", "the first beats the second", FIRST, SECOND).test(
        Evidence(every)
    )

    assert settled.value == pytest.approx(0.2)


SIDE_EXPERIMENTS = sorted(
    {run for each in hopper.COMPARISONS for run in (each.faster, each.slower)}, key=str
)


@pytest.mark.parametrize("run", SIDE_EXPERIMENTS, ids=lambda run: f"{run.provider}-{run.config}")
def test_a_side_experiment_is_a_config_of_its_rung_in_brief_form(run: compare.Run) -> None:
    pytest.importorskip("cutlass")

    config = configs.from_text(registry.load(run.provider).Config, run.config)

    assert configs.brief(config) == run.config


# ---- the climb as measured
@pytest.fixture(scope="module")
def found() -> dict[str, seed_claims.Finding]:
    """What is found of every claim where all rungs are measured and some profiled, by its text."""
    return findings(*CLIMBED, *COUNTED)


def test_nine_steps_of_the_climb_are_measured(found: dict[str, seed_claims.Finding]) -> None:
    steps = [each for text, each in found.items() if " gains " in text and " on " in text]

    assert len(steps) == 9
    assert seed_claims.OPEN not in {step.verdict for step in steps}


def test_a_step_is_one_rung_over_the_one_below(found: dict[str, seed_claims.Finding]) -> None:
    step = found["hopper.lean_barriers gains 6.7% on persistent: 704 TFLOP/s after 660"]

    assert (step.verdict, step.value) == ("differs", pytest.approx(0.75 / 0.68 - 1))


@pytest.mark.parametrize(
    "text",
    ["the order in groups of 16×8 hits L2 83% of the time", "cuBLAS hits L2 70% of the time"],
)
def test_a_hit_rate_of_l2_that_ncu_confirms(
    text: str, found: dict[str, seed_claims.Finding]
) -> None:
    assert found[text].verdict == "confirmed"


def test_groups_of_tiles_hit_l2_more_often_than_cublas(
    found: dict[str, seed_claims.Finding],
) -> None:
    by = found["groups of 16×8 hit L2 more often than cuBLAS"].value

    assert by == pytest.approx(0.84 - 0.70)


def test_the_clock_falls_in_cublas_where_our_last_rung_has_no_clock(
    found: dict[str, seed_claims.Finding],
) -> None:
    clock = found["power bounds large products: at 8192 the clock falls"]

    assert clock.verdict == "confirmed"
    assert clock.ours == "1600 MHz, at 1024 1780 (cublas)"


def test_a_side_experiment_that_was_not_run_is_open(
    found: dict[str, seed_claims.Finding],
) -> None:
    assert found["groups of 16×8 beat 2×2"] == seed_claims.NOT_MEASURED


# ---- power, of a limit of 700 W
@pytest.mark.parametrize(
    ("part", "n", "watts", "expected"),
    [
        ("the 700 W limit", 8192, 695, "confirmed"),
        ("the 700 W limit", 8192, 500, "refuted"),
        ("the power wall stands", 2048, 500, "confirmed"),
        ("the power wall stands", 2048, 704, "differs"),
    ],
)
def test_power_binds_large_products_only(part: str, n: int, watts: float, expected: str) -> None:
    sustained = entry("cublas", 1.0, n, mode="sustained", watts=watts, clock_mhz=1400)

    assert verdict(part, sustained) == (expected, pytest.approx(watts / 700))
