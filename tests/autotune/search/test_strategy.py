"""Search strategies: in which order they propose, what a search tells them, and their names."""

import re
from dataclasses import replace
from typing import Any

import pytest
from support.strategies import pruned
from support.sweeps import H100

from outblas.autotune import Grid, ModelRanked, Random, Strategy
from outblas.autotune.search import gpu
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.plan import batches
from outblas.autotune.search.prune import problem
from outblas.autotune.search.strategy import Search, strategy_of
from outblas.autotune.search.target import of
from outblas.autotune.store.records import Trial, Workload, now
from outblas.base.configs import to_text

pytestmark = pytest.mark.usefixtures("faulty_log")

SQUARE = Workload(4096, 4096, 4096)


def first_batch(strategy: Strategy, search: Search) -> tuple[Candidate, ...]:
    return next(batches(strategy, search))


# Orders.


def test_a_grid_is_in_the_order_of_the_space() -> None:
    search = Search(SQUARE, H100, pruned("portable", SQUARE).candidates)
    space = of("portable").load().space(problem(SQUARE), gpu.machine(H100))
    places = {to_text(config): place for place, config in enumerate(space.configs())}

    batch = first_batch(Grid(), search)

    found = [places[candidate.text] for candidate in batch]
    assert found == sorted(found)
    assert len(batch) == len(search.candidates) > 50
    assert list(batch) != search.ranked()


def random_order(seed: int, workload: Workload = SQUARE) -> list[str]:
    """The configs of `portable` in the order in which they are drawn."""
    search = Search(workload, H100, pruned("portable", workload).candidates)
    return [candidate.text for candidate in first_batch(Random(seed), search)]


def test_a_random_order_does_not_depend_on_predictions_or_on_the_order_of_the_space() -> None:
    candidates = pruned("portable", SQUARE).candidates
    other = [replace(candidate, predicted_us=1.0) for candidate in reversed(candidates)]

    batch = first_batch(Random(1), Search(SQUARE, H100, other))

    assert [candidate.text for candidate in batch] == random_order(1)


def test_a_seed_has_another_order_at_another_workload() -> None:
    one, other = random_order(1), random_order(1, Workload(2048, 4096, 4096))

    shared = {*one} & {*other}
    assert len(shared) > 50
    assert [c for c in one if c in shared] != [c for c in other if c in shared]


# What a search tells a strategy.


@pytest.fixture
def search() -> Search:
    """The search of `portable` at a small product, of which nothing is measured."""
    workload = Workload(64, 64, 64)
    return Search(workload, H100, pruned("portable", workload).candidates)


def record(search: Search, candidate: Candidate, status: Any, us: float | None) -> None:
    """Tells a search what was measured of a candidate."""
    search.record(
        Trial(
            gpu=H100,
            workload=search.workload,
            kernel="portable",
            source="",
            config=candidate.text,
            status=status,
            us=us,
            when=now(),
        )
    )


def test_the_best_of_a_search_is_the_fastest_that_is_right(search: Search) -> None:
    first, second, third = search.candidates[:3]
    record(search, first, "ok", 9.0)
    record(search, second, "ok", 8.0)
    record(search, third, "wrong", None)

    assert search.best() == second
    assert [trial.status for trial in search.measured.values()] == ["ok", "ok", "wrong"]


# Names.


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("grid", Grid),
        ("ranked", ModelRanked),
        ("random", Random),
        ("outblas.autotune:Grid", Grid),
        (Grid, Grid),
    ],
)
def test_a_name_or_a_class_is_a_strategy(strategy: Any, expected: type[Strategy]) -> None:
    assert isinstance(strategy_of(strategy), expected)


NEEDS_AN_ARGUMENT = "expected a class that can be made without arguments"


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        ("luck", ValueError, "strategy is 'luck', expected one of grid, ranked, random, "),
        ("", ValueError, "strategy is ''"),
        ("random:x y", ValueError, "strategy is 'random:x y'"),
        ("json:Nothing", ValueError, "expected a class of json, which has no Nothing"),
        ("json:dumps", TypeError, "strategy is 'json:dumps', expected a subclass of outblas"),
        ("no_such_module:X", ImportError, "strategy is 'no_such_module:X', which cannot be imp"),
        ("support.strategies:Proposing", TypeError, NEEDS_AN_ARGUMENT),
        (Strategy, TypeError, NEEDS_AN_ARGUMENT),
        (int, TypeError, "expected a subclass of outblas.autotune.Strategy"),
        (7, TypeError, "strategy is 7, expected a subclass"),
    ],
)
def test_a_strategy_that_is_none_is_an_error(
    strategy: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        strategy_of(strategy)
