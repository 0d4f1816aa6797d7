"""The finals on made-up times: who wins, how soon, how surely, and what noise and drift that all
share do to it.
"""

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outblas.autotune.measure.finals import (
    BATCH,
    MOST_ROUNDS,
    ROUNDS,
    SuccessiveElimination,
)

TIE = {"one": 50.0, "other": 50.0}


def run(
    us: Mapping[str, float],
    *,
    seed: int = 0,
    noise: float = 0.0,
    common: Sequence[float] = (1.0,) * MOST_ROUNDS,
    until: int = MOST_ROUNDS,
) -> SuccessiveElimination[str]:
    """A race as a sweep runs it. `common` is a factor on all times of a round, `noise` the σ of
    each one's own.
    """
    dice, race = random.Random(seed), SuccessiveElimination(list(us))

    def measured(name: str, round: int) -> float:
        return us.get(name, 100.0) * common[round] * math.exp(dice.gauss(0, noise))

    while race.alive and not race.over and race.rounds < until:
        rounds = range(race.rounds, race.rounds + BATCH)
        race.add(
            [measured("cuBLAS", i) for i in rounds],
            [[measured(name, i) for i in rounds] for name in race.alive],
        )
    return race


def test_a_clear_winner_is_found_at_once() -> None:
    race = run({"slow": 55.0, "fast": 50.0, "slower": 60.0}, noise=0.005)
    assert race.rounds == ROUNDS
    assert race.alive == ["fast"]
    assert race.order() == ["fast", "slow", "slower"]
    assert race.confidence("fast", race.times) > 0.999
    assert race.confidence("slow", race.times) == 0
    assert race.against_base("fast").median == pytest.approx(2.0, rel=0.01)
    lead = race.lead("fast", "slow")
    assert lead.sure_low <= 1.1 <= lead.sure_high
    assert lead.median == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("noise", [0.0, 0.0005])
def test_ties_are_as_fast_after_all_rounds(noise: float) -> None:
    race = run(TIE, noise=noise, seed=1)
    assert race.rounds == MOST_ROUNDS
    assert sorted(race.alive) == ["one", "other"]
    assert race.confidence(race.leader, race.times) < 0.98


def test_a_rival_that_cannot_go_on() -> None:
    race = SuccessiveElimination(["one", "other", "broken"])
    race.add([100.0] * BATCH, [[50.0] * BATCH, [51.0] * BATCH, [1.0] * BATCH])
    race.remove("broken")
    assert race.leader == "one"
    race.add([100.0] * BATCH, [[50.0] * BATCH, [51.0] * BATCH])
    assert race.order() == ["one", "other"]
    assert race.over
    with pytest.raises(ValueError, match="zip"):
        race.add([100.0], [[50.0], [51.0]])


def test_those_that_dropped_out_are_ordered_by_the_rounds_that_they_ran() -> None:
    """Drift of the clock after they left does not count for or against them."""
    race = run(
        TIE | {"third": 60.0, "fourth": 70.0},
        common=[1.0] * ROUNDS + [3.0] * (MOST_ROUNDS - ROUNDS),
        noise=0.0002,
    )
    assert race.rounds > ROUNDS
    assert len(race.times["third"]) == len(race.times["fourth"]) == ROUNDS
    assert race.order()[2:] == ["third", "fourth"]
    assert race.against_base("third").median == pytest.approx(100 / 60, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    leads=st.lists(st.floats(1.02, 3.0), min_size=1, max_size=7),
    drift=st.floats(-0.02, 0.02),
    jumps=st.floats(0.0, 0.5),
)
def test_what_all_share_changes_nothing(
    seed: int, leads: list[float], drift: float, jumps: float
) -> None:
    """A clock that drifts, and rounds that are slower than others by half."""
    us = {"best": 50.0} | {f"r{i}": 50.0 * lead for i, lead in enumerate(leads)}
    dice = random.Random(seed)
    weather = [(1 + drift) ** i * (1 + jumps * dice.random()) for i in range(MOST_ROUNDS)]
    race = run(us, seed=seed, noise=0.002, common=weather)
    assert race.rounds == ROUNDS
    assert race.alive == ["best"]
    assert race.order()[0] == "best"
    assert race.against_base("best").median == pytest.approx(2.0, rel=0.01)
    assert race.confidence("best", race.times) > 0.99


def test_equal_rivals_are_rarely_called_different() -> None:
    """A rival as fast as the leader drops out by chance: looks every few rounds make 95% intervals
    err more often.
    """
    errors = sum(len(run(TIE, noise=0.01, seed=seed).alive) < 2 for seed in range(200))
    assert errors / 200 < 0.25
