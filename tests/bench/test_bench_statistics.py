"""Schedules and statistics of the bench on synthetic timings: what drift, noise and neighbours may
not change.
"""

import itertools
from collections import Counter
from typing import Any

import pytest
from support.bench_machine import Machine

from outblas.bench import schedule
from outblas.bench.statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE, Verdict, ratio

# ---- verdicts
RUNS = 200


def verdicts(us: float, **machine: Any) -> Counter[Verdict]:
    """How often each verdict is given on a provider of `us` beside a base of 100 and a bystander,
    over RUNS machines of different luck.
    """
    found: Counter[Verdict] = Counter()
    providers = {"base": 100.0, "other": us, "bystander": 180.0}
    for seed in range(RUNS):
        times = Machine(dict(providers), seed=seed, **machine).burst(schedule.whole_rounds(3, 15))
        found[ratio(times["base"], times["other"]).verdict(BURST_TOLERANCE)] += 1
    return found


@pytest.mark.parametrize(
    ("us", "machine", "at_least"),
    [
        pytest.param(100.0, {}, 195, id="equal"),
        # The confidence is 95%: about one in twenty may be wrong, at most.
        pytest.param(100.0, {"noise": 0.02}, 185, id="equal, much noise"),
        pytest.param(100.2, {}, 190, id="0.2% apart, less than the protocol can tell"),
    ],
)
def test_equal_providers_are_tied_under_drift_and_noise(
    us: float, machine: dict[str, float], at_least: int
) -> None:
    assert verdicts(us, **machine)["tied"] >= at_least


@pytest.mark.parametrize(
    ("us", "machine", "verdict", "at_least"),
    [
        pytest.param(98.0, {}, "faster", 198, id="2% faster"),
        pytest.param(102.0, {}, "slower", 198, id="2% slower"),
        pytest.param(98.0, {"drift": 0.5}, "faster", 195, id="2% faster, much drift"),
    ],
)
def test_differences_beyond_the_tolerance_are_found(
    us: float, machine: dict[str, float], verdict: Verdict, at_least: int
) -> None:
    assert verdicts(us, **machine)[verdict] >= at_least


@pytest.mark.parametrize(
    ("tolerance", "verdict"), [(BURST_TOLERANCE, "tied"), (SUSTAINED_TOLERANCE, "faster")]
)
def test_a_median_within_the_tolerance_is_a_tie_however_sure(
    tolerance: float, verdict: Verdict
) -> None:
    assert ratio([1.004] * 20, [1.0] * 20).verdict(tolerance) == verdict


# ---- ratios
def test_a_ratio_is_of_times_in_the_same_round() -> None:
    spread = ratio([10.0, 10.0, 20.0, 10.0, 10.0], [10.0, 5.0, 10.0, 8.0, 4.0])

    assert spread.median == 2.0
    assert (spread.low, spread.high) == (pytest.approx(1.1), pytest.approx(2.3))
    assert (spread.sure_low, spread.sure_high) == (1.0, 2.5)  # of five rounds the extremes


@pytest.mark.parametrize(
    ("base", "times"),
    [pytest.param([1.0], [1.0], id="one round"), pytest.param([1.0, 2.0], [1.0], id="unequal")],
)
def test_a_ratio_needs_two_rounds_of_both(base: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="expected as many, at least 2"):
        ratio(base, times)


@pytest.mark.parametrize(("rounds", "rank"), [(2, 0), (5, 0), (6, 0), (9, 1), (15, 3), (25, 7)])
def test_the_sure_bounds_of_a_ratio_are_order_statistics(rounds: int, rank: int) -> None:
    ratios = [float(i) for i in range(rounds)]

    spread = ratio(ratios, [1.0] * rounds)

    assert (spread.sure_low, spread.sure_high) == (ratios[rank], ratios[-1 - rank])


# ---- schedules
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_provider_has_every_place_and_every_neighbour_equally_often(n: int) -> None:
    orders = list(schedule.rounds([f"p{i}" for i in range(n)], 2 * n))

    places = Counter((name, place) for order in orders for place, name in enumerate(order))
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))

    assert (set(places.values()), set(followed.values())) == ({2}, {2})
    assert len(followed) == n * (n - 1)


@pytest.mark.parametrize(
    ("providers", "rounds"), [(1, 16), (2, 16), (3, 18), (4, 16), (5, 20), (6, 18), (7, 28)]
)
def test_fifteen_rounds_grow_to_complete_the_design(providers: int, rounds: int) -> None:
    assert schedule.whole_rounds(providers, 15) == rounds


def test_turns_put_the_base_around_every_other() -> None:
    order = schedule.turns("base", ["a", "b"], 3)

    assert order[::2] == ["base"] * 7
    assert order[1::2] == ["a", "b", "b", "a", "a", "b"]
